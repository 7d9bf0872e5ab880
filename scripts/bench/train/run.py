"""Starts ranks on this machine or on an emulated cluster, and measures training steps on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm import TorchComm
from moe_plugin.planner.units import show_time
from moe_plugin.utils.messages import tracked
from scripts.bench.measure import versions
from scripts.bench.ranks import on_processes
from scripts.bench.train.host_sides import Settings, Side, TrainShape
from scripts.bench.train.host_steps import read_text
from scripts.bench.train.results import TrainReport
from scripts.bench.train.steps import SideTimes, measure
from scripts.emulate import EmulatedCluster

Load = tuple[float, float]  # the machine's load average before and after
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class TrainPlan:
    """What to measure.

    Attributes:
        host: megatron or fairseq.
        text: path of the text that models train on.
        steps: timed ones of each side.
        ours: settings of our layer by the side's name.
        others: the host's own layer and a dense one, too.
        evaluate: forward passes in evaluation take the place of training steps.
        processor: clocks count processor time.
    """

    host: str
    shape: TrainShape
    text: str
    steps: int
    warm_up: int
    ours: Mapping[str, Settings]
    others: bool = True
    evaluate: bool = False
    processor: bool = False


def measure_rank(plan: TrainPlan) -> list[SideTimes]:
    """All sides; every rank calls it in an initialized group, and all get the same result."""
    sides = sides_of(plan.host, plan.shape, read_text(plan.text), plan.ours, plan.others,
                     plan.evaluate)
    return measure(sides, TorchComm(), plan.steps, plan.warm_up,
                   time.process_time if plan.processor else time.perf_counter)


def measure_plans(plans: Sequence[TrainPlan]) -> list[tuple[list[SideTimes], Load]]:
    """All sides of each, one plan after the other on these ranks, and the machine's load."""
    found = []
    for plan in tracked(plans, "bench train", "shape"):
        before = os.getloadavg()[0]
        sides = measure_rank(plan)
        found.append((sides, (round(before, 2), round(os.getloadavg()[0], 2))))
    return found


def sides_of(host: str, shape: TrainShape, text: Tensor, ours: Mapping[str, Settings],
             others: bool = True, evaluate: bool = False) -> list[Side]:
    """All sides with equal weights; every rank calls it in an initialized group.

    Args:
        text: what `read_text` gives.
        ours, others, evaluate: see `TrainPlan`.
    """
    torch.set_num_threads(1)
    # Megatron compiles some small functions: 15 s in every process, and none of them is a layer's
    torch.compiler.set_stance("force_eager")
    comm = TorchComm()
    return _builder(host)(shape, text, comm.rank, comm.size, ours, others, evaluate)


def _builder(host: str) -> Callable[..., list[Side]]:
    # one of them is imported: they import their host
    if host == "megatron":
        from scripts.bench.train import megatron as module
    else:
        from scripts.bench.train import fairseq as module
    return module.build


def on_own_ranks(plans: Sequence[TrainPlan]) -> list[TrainReport]:
    """Measure on the ranks that a launcher started; rank 0 alone returns reports."""
    joined = dist.is_initialized()
    if not joined:
        dist.init_process_group("gloo")
    try:
        ranks, first = dist.get_world_size(), dist.get_rank() == 0
        found = measure_plans(plans)
        return _reports(plans, f"{ranks} ranks", ranks, found) if first else []
    finally:
        if not joined:
            dist.destroy_process_group()


def on_this_machine(plans: Sequence[TrainPlan], ranks: int) -> list[TrainReport]:
    """Measure on `ranks` new processes of this machine."""
    return _reports(plans, f"one machine, {ranks} ranks", ranks,
                    on_processes(ranks, measure_plans, plans))


def on_emulated(plans: Sequence[TrainPlan], cluster: EmulatedCluster) -> list[TrainReport]:
    """Measure on a running emulated cluster; the ranks are forked with the host imported."""
    forked_hosts({plan.host for plan in plans})
    place = (f"{cluster.nodes_wanted}x{cluster.ranks_per_node} emulated nodes, "
             f"{cluster.rate_bit_s / 1e6:g} Mbit/s, {show_time(cluster.delay_s)}")
    found = cluster.run(measure_plans, plans, timeout_s=len(plans) * TIMEOUT_S,
                        group_timeout_s=120.0)[0]
    return _reports(plans, place, cluster.size, found)


def sides_on_emulated(plan: TrainPlan, cluster: EmulatedCluster) -> list[SideTimes]:
    """All sides; the ranks are forked with the host imported."""
    forked_hosts([plan.host])
    return cluster.run(measure_rank, plan, timeout_s=TIMEOUT_S, group_timeout_s=120.0)[0]


def forked_hosts(hosts: Iterable[str]) -> None:
    """Import what trains before ranks are forked."""
    for host in hosts:
        _builder(host)
        _import_host(host)


def _import_host(host: str) -> None:
    if host == "megatron":
        from moe_plugin.hosts.megatron.compat import cpu

        cpu.enable(force=True)
        from moe_plugin.hosts.megatron import spec  # noqa: F401
    else:
        from moe_plugin.hosts.fairseq import registered  # noqa: F401


def _reports(plans: Sequence[TrainPlan], place: str, ranks: int,
             found: Sequence[tuple[list[SideTimes], Load]]) -> list[TrainReport]:
    known = {name: value for name, value in versions("cpu").items() if name != "triton"}
    return [TrainReport(plan.host, place, ranks, plan.shape, sides, load, known, plan.evaluate)
            for plan, (sides, load) in zip(plans, found, strict=True)]
