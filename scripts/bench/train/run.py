"""Start ranks on this machine or on an emulated cluster, and measure training steps on these ranks.
"""

from __future__ import annotations

import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import TorchComm
from moe_plugin.planner.units import show_time
from moe_plugin.utils.messages import tracked
from scripts.bench.child import on_processes
from scripts.bench.measure import versions
from scripts.bench.train.results import TrainReport
from scripts.bench.train.sides import Settings, Side, TrainShape, read_text
from scripts.bench.train.steps import SideTimes, measure
from scripts.emulate import EmulatedCluster

Load = tuple[float, float]  # the machine's load average before and after
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class TrainPlan:
    """One measurement: the host, the shape, and the models to train.

    Attributes:
        host: "megatron" or "fairseq".
        text: path of the training text.
        steps: number of timed steps per model.
        warm_up: number of untimed steps per model before the timed steps.
        ours: for each model with our layer, the settings of the layer.
        others: whether to also measure the host's own layer and a dense model.
        evaluate: whether to time forward passes of an evaluation instead of training steps.
    """

    host: str
    shape: TrainShape
    text: str
    steps: int
    warm_up: int
    ours: Mapping[str, Settings]
    others: bool = True
    evaluate: bool = False


def measure_rank(plan: TrainPlan) -> list[SideTimes]:
    """Measure all models of one plan. Every rank must call this function in an initialized group,
    and all ranks get the same result.
    """
    sides = sides_of(plan.host, plan.shape, read_text(plan.text), plan.ours, plan.others,
                     plan.evaluate)
    return measure(sides, TorchComm(), plan.steps, plan.warm_up)


def measure_plans(plans: Sequence[TrainPlan]) -> list[tuple[list[SideTimes], Load]]:
    """Measure all models of several plans one after the other. The load average of the machine is
    recorded for each plan.
    """
    found = []
    for plan in tracked(plans, "bench train", "shape"):
        before = os.getloadavg()[0]
        sides = measure_rank(plan)
        found.append((sides, (round(before, 2), round(os.getloadavg()[0], 2))))
    return found


def sides_of(host: str, shape: TrainShape, text: Tensor, ours: Mapping[str, Settings],
             others: bool = True, evaluate: bool = False) -> list[Side]:
    """Build all models with the same weights. Every rank must call this function in an initialized
    group.

    Args:
        host: "megatron" or "fairseq".
        text: the training text, as returned by `read_text`.
        ours: settings of our layer by the name of the model.
        others: whether to also build the host's own layer and a dense model.
        evaluate: whether steps are forward passes of an evaluation.
    """
    torch.set_num_threads(1)
    # Megatron compiles some small functions, which costs 15 s in every process. None of these
    # functions belongs to a layer.
    torch.compiler.set_stance("force_eager")
    comm = TorchComm()
    return _builder(host)(shape, text, comm.rank, comm.size, ours, others, evaluate)


def _builder(host: str) -> Callable[..., list[Side]]:
    # imported here, because each module imports its host
    if host == "megatron":
        from scripts.bench.train import megatron as module
    else:
        from scripts.bench.train import fairseq as module
    return module.build


def on_this_machine(plans: Sequence[TrainPlan], ranks: int) -> list[TrainReport]:
    """Measure in `ranks` new processes on this machine."""
    return _reports(plans, f"one machine, {ranks} ranks", ranks,
                    on_processes(ranks, measure_plans, plans))


def on_emulated(plans: Sequence[TrainPlan], cluster: EmulatedCluster) -> list[TrainReport]:
    """Measure several plans on a running emulated cluster. The hosts are imported before the ranks
    are forked.
    """
    forked_hosts({plan.host for plan in plans})
    place = (f"{cluster.nodes_wanted}x{cluster.ranks_per_node} emulated nodes, "
             f"{cluster.rate_bit_s / 1e6:g} Mbit/s, {show_time(cluster.delay_s)}")
    found = cluster.run(measure_plans, plans, timeout_s=len(plans) * TIMEOUT_S,
                        group_timeout_s=120.0)[0]
    return _reports(plans, place, cluster.size, found)


def sides_on_emulated(plan: TrainPlan, cluster: EmulatedCluster) -> list[SideTimes]:
    """Measure one plan on a running emulated cluster, and return the times of the models."""
    forked_hosts([plan.host])
    return cluster.run(measure_rank, plan, timeout_s=TIMEOUT_S, group_timeout_s=120.0)[0]


def settings_on_emulated(host: str, shape: TrainShape, text: str, ours: Mapping[str, Settings],
                         args: Namespace, cluster: EmulatedCluster) -> dict[str, Any]:
    """Train models with our layer and different settings on a running emulated cluster.

    Args:
        host: "megatron" or "fairseq".
        text: path of the training text.
        ours: settings of our layer by the name of the model.
        args: options of a study, including `steps` and `warm_up`.

    Returns: The label of the shape, and the results of each model: the layout, the median step time
        in seconds, and the last loss.
    """
    # in fairseq, k is a setting of our layer, and the ragged dispatcher creates no slots
    more = {"router.top_k": shape.top_k, "dispatch.name": "ragged"} if host == "fairseq" else {}
    sides = sides_on_emulated(TrainPlan(
        host, shape, text, args.steps, args.warm_up,
        {name: {**settings, **more} for name, settings in ours.items()}, others=False), cluster)
    return {"shape": shape.label(), "layouts": {side.name: side.layout for side in sides},
            "seconds": {side.name: statistics.median(side.seconds) for side in sides},
            "losses": {side.name: side.losses[-1] for side in sides}}


def forked_hosts(hosts: Iterable[str]) -> None:
    """Import the host frameworks before ranks are forked, so that the ranks need not import them
    again.
    """
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
