"""Time training steps of several models on the same ranks. The models alternate after every step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from scripts.bench.train.sides import Side

WARM_UP = 4
LONGEST_WARM_UP = 60  # maximum number of steps in which tuners can choose


@dataclass(frozen=True)
class SideTimes:
    """The step times of one model, in seconds on the slowest rank.

    Attributes:
        kind: "ours", "native" or "dense".
        seconds: time of each timed step.
        optimizer_s: time spent in the optimizer during each timed step.
        losses: losses of all steps, including the steps of the last warm-up. The losses of two
            models can be compared step by step, because all models start with the same weights and
            use the same data.
        parameters: number of parameters per rank.
    """

    name: str
    kind: str
    seconds: list[float]
    optimizer_s: list[float]
    losses: list[float]
    parameters: int
    layout: str


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
        self._run(steps)
        while not self.side.settled() and len(self.losses) < LONGEST_WARM_UP:
            self._step()
        if len(self.losses) > steps:
            self._restart()
            self._run(steps)
        self.start.clear()
        self.weights.clear()

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

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
