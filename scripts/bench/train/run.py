"""Start ranks on this machine or on an emulated cluster, and measure training steps on these ranks.
The models alternate after every step.
"""

from __future__ import annotations

import copy
import importlib
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm import Comm, TorchComm
from moe_plugin.planner.units import show_time
from moe_plugin.utils.messages import tracked
from scripts.bench.child import on_processes
from scripts.bench.measure import versions
from scripts.bench.train.results import TrainReport
from scripts.bench.train.sides import Settings, Side, SideTimes, TrainShape, read_text
from scripts.emulate import EmulatedCluster

Load = tuple[float, float]  # the machine's load average before and after
TIMEOUT_S = 900.0
WARM_UP = 4
LONGEST_WARM_UP = 60  # maximum number of steps in which tuners can choose


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
    return _host(host).build(shape, text, comm.rank, comm.size, ours, others, evaluate)


def _host(host: str) -> Any:
    # imported here, because each module imports its host
    return importlib.import_module(f"scripts.bench.train.{host}")


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
        _host(host).import_host()


def _reports(plans: Sequence[TrainPlan], place: str, ranks: int,
             found: Sequence[tuple[list[SideTimes], Load]]) -> list[TrainReport]:
    known = {name: value for name, value in versions("cpu").items() if name != "triton"}
    return [TrainReport(plan.host, place, ranks, plan.shape, sides, load, known, plan.evaluate)
            for plan, (sides, load) in zip(plans, found, strict=True)]


# -- timed steps


def measure(sides: Sequence[Side], comm: Comm, steps: int,
            warm_up: int = WARM_UP) -> list[SideTimes]:
    """Time the training steps of all models on all ranks. The models alternate after each step.

    Each model first runs `warm_up` untimed steps. If its tuners have not finished then, the model
    runs more steps alone and restarts from its initial weights. Therefore all models have the same
    weights, data and expert loads in the timed steps.
    """
    runs = [_Run(side, comm) for side in sides]
    for run in runs:
        run.warm_up(warm_up)
    for _ in range(steps):
        for run in runs:
            run.timed()
    return [run.times() for run in runs]


class _Run:
    def __init__(self, side: Side, comm: Comm) -> None:
        self.side, self.comm, self.inside, self.begun = side, comm, 0.0, 0.0
        self.seconds: list[float] = []
        self.optimizer_s: list[float] = []
        self.losses: list[float] = []
        self.start = [([p.detach().clone() for g in optimizer.param_groups for p in g["params"]],
                       copy.deepcopy(optimizer.state_dict())) for optimizer in side.optimizers]
        self.weights = [p.detach().clone() for p in side.parameters]
        for optimizer in side.optimizers:
            optimizer.register_step_pre_hook(self._begin)
            optimizer.register_step_post_hook(self._end)

    def _begin(self, *_: Any) -> None:
        self.begun = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.inside += time.perf_counter() - self.begun

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        while not self.side.settled() and len(self.losses) < LONGEST_WARM_UP:
            self._step()
        if len(self.losses) > steps:
            self._restart()
            for _ in range(steps):
                self._step()
        self.start.clear()
        self.weights.clear()

    def _restart(self) -> None:
        for optimizer, (weights, state) in zip(self.side.optimizers, self.start, strict=True):
            _copy((p for group in optimizer.param_groups for p in group["params"]), weights)
            optimizer.load_state_dict(state)
        _copy(self.side.parameters, self.weights)
        self.losses.clear()

    def timed(self) -> None:
        self.comm.barrier()
        begun, self.inside = time.perf_counter(), 0.0
        self._step()
        self.seconds.append(time.perf_counter() - begun)
        self.optimizer_s.append(self.inside)

    def _step(self) -> None:
        self.losses.append(self.side.step(len(self.losses)))

    def times(self) -> SideTimes:
        side, agree = self.side, self.comm.agree_max
        held = {id(p): p.numel() for o in side.optimizers for g in o.param_groups
                for p in g["params"]}
        return SideTimes(side.name, side.kind, agree(self.seconds), agree(self.optimizer_s),
                         self.losses, sum(held.values()), side.layout())


@torch.no_grad()
def _copy(parameters: Iterable[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
