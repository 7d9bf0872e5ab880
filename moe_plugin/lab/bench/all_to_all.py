"""Measures all-to-all algorithms on the ranks of a group, real ones or an emulated cluster's."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from moe_plugin.comm import Comm, Topology, TorchComm, Traffic, algorithms, run_simulated
from moe_plugin.config import CommConfig
from moe_plugin.lab.emulate import EmulatedCluster
from moe_plugin.lab.planning.fit import Measurement
from moe_plugin.machine import wait_for_device
from moe_plugin.planner import COSTS, Cluster, predict
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from moe_plugin.tuning.prepare_group import prepare

BURST = 3
BURST_UP_TO = 1 << 20
COUNTED_RANKS = 64


@dataclass(frozen=True)
class ExchangeRow:
    """One cell: an algorithm at a size.

    Attributes:
        bytes: per rank.
        median_ms, min_ms: of one exchange, over all ranks.
        floor_ms: least time of the bytes on the wire.
        cpu_ms: CPU time of all ranks and the switch, divided by the number of cores.
        messages: leaving one node.
        chosen: the algorithm that auto runs.
    """

    nodes: int
    ranks_per_node: int
    algorithm: str
    bytes: int
    median_ms: float
    min_ms: float
    floor_ms: float | None
    cpu_ms: float | None
    messages: float | None
    chosen: str | None = None


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        repeats: timed repeats of a cell; half as many above `BURST_UP_TO` bytes.
        settings: of the group, e.g. its topology.
        helper: id of a process whose CPU time counts, too (an emulated cluster's switch).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    repeats: int = 7
    settings: CommConfig | None = None
    helper: int | None = None


@dataclass(frozen=True)
class RankTimes:
    """One rank's part of a cell.

    Attributes:
        seconds: per exchange, by repeat, over all ranks.
        cpu_s: own CPU seconds per exchange.
    """

    name: str
    size: int
    seconds: list[float]
    cpu_s: float
    chosen: str | None


def measure_rank(plan: Plan,
                 comm: Comm | None = None) -> tuple[tuple[tuple[int, ...], ...], list[RankTimes]]:
    """Run on every rank; returns (nodes of the group, one entry per cell).

    Each repeat runs all algorithms, in an order that rotates.
    """
    comm = comm or TorchComm()
    prepare(comm, plan.settings or CommConfig())
    cells = []
    for size in plan.sizes:
        x = torch.zeros(comm.size, max(size // comm.size // 4, 1), device=comm.device)
        for name in plan.names:
            _warm_up(comm, name, x)
        small = size <= BURST_UP_TO
        burst, repeats = (BURST, plan.repeats) if small else (1, (plan.repeats + 1) // 2)
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.names}
        cpu = dict.fromkeys(plan.names, 0.0)
        for repeat in range(repeats):
            for index in range(len(plan.names)):
                name = plan.names[(index + repeat) % len(plan.names)]
                begin, end, used = _burst(comm, name, x, burst, plan.helper)
                spans[name].append((begin, end))
                cpu[name] += used / burst
        for name in plan.names:
            taken = _agreed(comm, spans[name], one_clock=plan.helper is not None)
            cells.append(RankTimes(name, size, [t / burst for t in taken], cpu[name] / repeats,
                                   _chosen(comm, name, x)))
    return comm.topology.nodes, cells


def _warm_up(comm: Comm, name: str, x: torch.Tensor) -> None:
    """Run once; auto until it has chosen."""
    run = algorithms.get(name)
    run(comm, x)
    for _ in range(100):
        if name != "auto" or _chosen(comm, name, x):
            return
        run(comm, x)


def _chosen(comm: Comm, name: str, x: torch.Tensor) -> str | None:
    if name != "auto":
        return None
    return ExchangeTuner.of(comm).chosen(comm, x.numel() * x.element_size())


def _agreed(comm: Comm, spans: Sequence[tuple[float, float]], one_clock: bool) -> list[float]:
    """Seconds of each repeat over all ranks.

    With one clock: from the first begin to the last end; else the slowest rank's time.
    """
    if not one_clock:
        return comm.agree_max([end - begin for begin, end in spans])
    return [
        end + begin
        for end, begin in zip(comm.agree_max([end for _, end in spans]),
                              comm.agree_max([-begin for begin, _ in spans]), strict=True)
    ]


def _burst(comm: Comm, name: str, x: torch.Tensor, burst: int,
           helper: int | None) -> tuple[float, float, float]:
    """(begin, end, own CPU seconds) of `burst` exchanges, to reduce the effect of the barrier."""
    run = algorithms.get(name)
    comm.barrier()
    wait_for_device(x.device)
    begin, cpu = time.perf_counter(), _cpu_s(comm, helper)
    for _ in range(burst):
        run(comm, x)
    wait_for_device(x.device)
    return begin, time.perf_counter(), _cpu_s(comm, helper) - cpu


def _cpu_s(comm: Comm, helper: int | None) -> float:
    """CPU seconds of this rank; on rank 0 also those of the helper."""
    if helper is None or comm.rank:
        return time.process_time()
    return time.process_time() + int(Path(f"/proc/{helper}/schedstat").read_text().split()[0]) / 1e9


def measure_emulated(cluster: EmulatedCluster, plan: Plan) -> list[ExchangeRow]:
    """Measure on a running emulated cluster."""
    plan = replace(plan, helper=cluster.switch_pid)
    answers = cluster.run(measure_rank, plan, timeout_s=1800.0, group_timeout_s=120.0)
    cells = answers[0][1]
    cores = os.cpu_count() or 1
    rows = []
    for index, cell in enumerate(cells):
        cpu_ms = 1e3 * sum(answer[1][index].cpu_s for answer in answers) / cores
        floor = wire_floor_s(cluster.nodes_wanted, cluster.ranks_per_node, cell.size,
                             cluster.rate_bit_s, cluster.delay_s, cluster.mtu)
        rows.append(row_of(Topology(answers[0][0]), cell, 1e3 * floor, cpu_ms))
    return rows


def row_of(topology: Topology, cell: RankTimes, floor_ms: float | None = None,
           cpu_ms: float | None = None) -> ExchangeRow:
    """Of a cell; links of a real group are unknown, so that it has no floor."""
    return ExchangeRow(len(topology.nodes), max(map(len, topology.nodes)), cell.name, cell.size,
                       1e3 * statistics.median(cell.seconds), 1e3 * min(cell.seconds), floor_ms,
                       cpu_ms, messages_out(topology, cell.chosen or cell.name), cell.chosen)


def messages_out(topology: Topology, name: str) -> float | None:
    """Messages that leave one node, by formula or counted on simulated ranks.

    The mean of unequal nodes; None for large groups of unequal nodes.
    """
    known = "linear" if name == "native" else name
    if topology.uniform_nodes and known in COSTS:
        return predict(Cluster(nodes=len(topology.nodes), ranks_per_node=len(topology.nodes[0])),
                       known, 1.0).inter_messages
    if topology.size > COUNTED_RANKS:
        return None
    traffic = Traffic()
    run_simulated(topology.size, lambda comm: algorithms.get(name)
                  (comm, torch.zeros(topology.size)), traffic=traffic, topology=topology)
    return traffic.between(topology) / len(topology.nodes)


def measurements_of(rows: Sequence[ExchangeRow]) -> list[Measurement]:
    """Input of the planner's fit, for algorithms with a cost model.

    Medians, because with many ranks on few cores the fastest repeat is an outlier.
    """
    return [
        Measurement(r.nodes, r.ranks_per_node, r.algorithm, r.bytes, r.median_ms / 1e3,
                    None if r.cpu_ms is None else r.cpu_ms / 1e3) for r in rows
        if r.algorithm in COSTS
    ]


def as_dicts(rows: Sequence[ExchangeRow]) -> list[dict]:
    """For JSON; milliseconds to a thousandth."""
    return [{k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(row).items()}
            for row in rows]


def wire_floor_s(nodes: int, ranks_per_node: int, size: float, rate_bit_s: float, delay_s: float,
                 mtu: int = 1500) -> float:
    """Least seconds of one exchange's bytes on one node's link, with TCP/IP and Ethernet framing.

    Every node sends P S (N-1)/N bytes; a frame of `mtu` carries mtu - 52 of them and occupies mtu +
    38 on the wire.
    """
    if nodes == 1:
        return 0.0
    out = ranks_per_node * size * (nodes - 1) / nodes
    return out * (mtu + 38) / (mtu - 52) * 8 / rate_bit_s + delay_s
