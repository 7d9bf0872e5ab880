"""Measure all-to-all algorithms on the ranks of a real group or of an emulated cluster."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.cli.figures import refuse_links
from moe_plugin.comm import Comm, Topology, TorchComm, Traffic, algorithms, run_simulated
from moe_plugin.config import CommConfig
from moe_plugin.planner import COSTS, Cluster, predict
from moe_plugin.planner.fit import Measurement
from moe_plugin.tuning.exchange_tuner import ExchangeTuner
from moe_plugin.tuning.prepare_group import prepare
from moe_plugin.utils.checkout import laboratory
from moe_plugin.utils.machine import memory_bytes, wait_for_device
from moe_plugin.utils.messages import short

NAMES = "native,linear,2dh,leader,auto"
BURST = 3
BURST_UP_TO = 1 << 20
COUNTED_RANKS = 64


@dataclass(frozen=True)
class ExchangeRow:
    """The measurements of one all-to-all algorithm at one message size.

    Attributes:
        bytes: size of the input of each rank in bytes.
        median_ms: median time per exchange over all repeats, in ms.
        min_ms: shortest time per exchange over all repeats, in ms.
        floor_ms: lower bound on the time in ms, given by the bandwidth of the links.
        cpu_ms: CPU time in ms of all ranks and the emulated switch, divided by the number of cores.
        messages: number of messages that each node sends to other nodes.
        chosen: name of the algorithm that was selected by `auto`.
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
    """The all-to-all measurements to perform.

    Attributes:
        names: names of the algorithms to measure.
        sizes: input sizes per rank, in bytes.
        repeats: number of timed repeats. For sizes above `BURST_UP_TO` bytes, half as many repeats
            are timed.
        settings: settings of the group, e.g. its topology.
        helper: process ID of a helper process whose CPU time is also counted, such as the switch of
            an emulated cluster.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    repeats: int = 7
    settings: CommConfig | None = None
    helper: int | None = None


@dataclass(frozen=True)
class RankTimes:
    """The measurements of one all-to-all algorithm at one message size on one rank.

    Attributes:
        size: size of the input of each rank in bytes.
        seconds: for each repeat, the time per exchange in seconds, measured over all ranks.
        cpu_s: CPU time in seconds of this rank per exchange.
        chosen: name of the algorithm that `auto` selected.
    """

    name: str
    size: int
    seconds: list[float]
    cpu_s: float
    chosen: str | None


def measure_rank(plan: Plan,
                 comm: Comm | None = None) -> tuple[tuple[tuple[int, ...], ...], list[RankTimes]]:
    """Measure all algorithms on every rank. Return the nodes of the group, and one `RankTimes` for
    each algorithm and size.

    Each repeat runs all algorithms once, in an order that rotates from repeat to repeat.
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
            durations = _agreed(comm, spans[name], one_clock=plan.helper is not None)
            cells.append(RankTimes(name, size, [t / burst for t in durations], cpu[name] / repeats,
                                   _chosen(comm, name, x)))
    return comm.topology.nodes, cells


def _warm_up(comm: Comm, name: str, x: torch.Tensor) -> None:
    """Run an all-to-all algorithm once before it is timed. `auto` is run repeatedly until it has
    selected an algorithm.
    """
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
    """For each repeat, combine the times of all ranks into one time in seconds.

    If all ranks share one clock, a repeat lasts from the earliest start on any rank to the latest
    end on any rank. Otherwise, the time of a repeat is that of the slowest rank.
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
    """Run `burst` exchanges after a single barrier, so that the barrier has less effect on the
    measured time.

    Return the start time, the end time, and the CPU time of this rank in seconds.
    """
    run = algorithms.get(name)
    comm.barrier()
    wait_for_device(x.device)
    begin, cpu = time.perf_counter(), _cpu_s(comm, helper)
    for _ in range(burst):
        run(comm, x)
    wait_for_device(x.device)
    return begin, time.perf_counter(), _cpu_s(comm, helper) - cpu


def _cpu_s(comm: Comm, helper: int | None) -> float:
    """Return the CPU time of this rank in seconds. On rank 0, the CPU time of the helper process is
    included.
    """
    if helper is None or comm.rank:
        return time.process_time()
    return time.process_time() + int(Path(f"/proc/{helper}/schedstat").read_text().split()[0]) / 1e9


def row_of(topology: Topology, cell: RankTimes, floor_ms: float | None = None,
           cpu_ms: float | None = None) -> ExchangeRow:
    """Convert the `RankTimes` of one rank to an `ExchangeRow`. `floor_ms` is left out for a real
    group, because the bandwidths of its links are unknown.
    """
    return ExchangeRow(len(topology.nodes), max(map(len, topology.nodes)), cell.name, cell.size,
                       1e3 * statistics.median(cell.seconds), 1e3 * min(cell.seconds), floor_ms,
                       cpu_ms, messages_out(topology, cell.chosen or cell.name), cell.chosen)


def messages_out(topology: Topology, name: str) -> float | None:
    """Return the number of messages that a node sends to other nodes. The number is computed by a
    formula, or counted by running the algorithm on simulated ranks.

    If the nodes have different numbers of ranks, return the mean over all nodes, or None if the
    group has more than `COUNTED_RANKS` ranks.
    """
    algorithm = "linear" if name == "native" else name
    if topology.uniform_nodes and algorithm in COSTS:
        return predict(Cluster(nodes=len(topology.nodes), ranks_per_node=len(topology.nodes[0])),
                       algorithm, 1.0).inter_messages
    if topology.size > COUNTED_RANKS:
        return None
    traffic = Traffic()
    run_simulated(topology.size, lambda comm: algorithms.get(name)
                  (comm, torch.zeros(topology.size)), traffic=traffic, topology=topology)
    return traffic.between(topology) / len(topology.nodes)


def measurements_of(rows: Sequence[ExchangeRow]) -> list[Measurement]:
    """Return the measurements of all algorithms that have a cost model. The planner fits its
    network model to these measurements.

    Each measurement is a median, because the fastest repeat is an outlier when many ranks share few
    cores.
    """
    return [
        Measurement(r.nodes, r.ranks_per_node, r.algorithm, r.bytes, r.median_ms / 1e3,
                    None if r.cpu_ms is None else r.cpu_ms / 1e3) for r in rows
        if r.algorithm in COSTS
    ]


def measure_rows(args: argparse.Namespace, plan: Plan, command: str
                 ) -> tuple[list[ExchangeRow], dict[str, Any]]:
    """Measure all algorithms. Return the measurements and a description of the ranks. On all ranks
    except rank 0, the list of measurements is empty.

    command: name of the command for error messages, such as `bench all-to-all`.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats {short(args.repeats)} must be >= 1, e.g. 7")
    memory = memory_bytes(torch.device("cpu")) or float("inf")
    if not 1 <= min(plan.sizes) <= max(plan.sizes) <= memory:
        raise ValueError(f"--sizes {short(args.sizes)} must be between 1 and the {memory} bytes of "
                         "this machine's memory, e.g. 64KiB,1MiB")
    if args.emulate:
        return laboratory("bench.studies.all_to_all").emulated(args, plan)
    refuse_links(args)
    return _own_ranks(plan, command)


def _own_ranks(plan: Plan, command: str) -> tuple[list[ExchangeRow], dict[str, Any]]:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ):
        raise ValueError("there are no ranks to measure. Start the command with `torchrun "
                         f"--nproc-per-node 2 -m moe_plugin.cli.main {command}` on each node, or "
                         "emulate a cluster with --emulate 4x4")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        comm = TorchComm()
        _, cells = measure_rank(plan, comm)
        rows = [row_of(comm.topology, cell) for cell in cells] if comm.rank == 0 else []
        return rows, {"backend": comm.backend, "ranks": comm.size, "topology": str(comm.topology)}
    finally:
        dist.destroy_process_group()
