"""Training steps of several models in one set of ranks, alternately."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from scripts.bench.train.host_sides import Side

WARM_UP = 4
LONGEST_WARM_UP = 60  # steps in which tuners may settle


@dataclass(frozen=True)
class SideTimes:
    """What a side's steps took; seconds of the slowest rank.

    Attributes:
        losses: of all steps, the last warm-up's included: side by side they are of equal data
            and begin with equal weights.
        parameters: of one rank.
    """

    name: str
    kind: str
    seconds: list[float]
    optimizer_s: list[float]
    losses: list[float]
    parameters: int
    layout: str


@dataclass
class _Clock:
    """Seconds inside optimizers' steps."""

    now: Callable[[], float]
    seconds: float = 0.0
    begun: float = field(default=0.0, repr=False)

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self.begun = self.now()

    def _stop(self, *_: Any) -> None:
        self.seconds += self.now() - self.begun

    def take(self) -> float:
        """Seconds since the last time this was called."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def measure(sides: Sequence[Side], comm: Comm, steps: int, warm_up: int = WARM_UP,
            now: Callable[[], float] = time.perf_counter) -> list[SideTimes]:
    """Train all sides, alternating after each step; every rank calls it. now: the clock, seconds.

    Before it counts every side runs `warm_up` steps. One whose tuners have not settled then runs
    some more on its own, and begins again with the weights it had: what is timed has equal weights
    and data, and so the same load of the experts, on all sides.
    """
    runs = [_Run(side, comm, now) for side in sides]
    for run in runs:
        run.warm_up(warm_up)
    for _ in range(steps):
        for run in runs:
            run.timed()
    return [run.times() for run in runs]


class _Run:
    def __init__(self, side: Side, comm: Comm, now: Callable[[], float]) -> None:
        self.side, self.comm, self.clock = side, comm, _Clock(now)
        self.seconds: list[float] = []
        self.optimizer_s: list[float] = []
        self.losses: list[float] = []
        self.start = [([p.detach().clone() for g in optimizer.param_groups for p in g["params"]],
                       copy.deepcopy(optimizer.state_dict())) for optimizer in side.optimizers]
        self.weights = [p.detach().clone() for p in side.parameters]
        for optimizer in side.optimizers:
            self.clock.watch(optimizer)

    def warm_up(self, steps: int) -> None:
        self._run(steps)
        while not self.side.settled() and len(self.losses) < LONGEST_WARM_UP:
            self._step()
        if len(self.losses) > steps:
            self._restart()
            self._run(steps)
        self.start.clear()
        self.weights.clear()
        self.clock.take()

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
        begun = self.clock.now()
        self._step()
        self.seconds.append(self.clock.now() - begun)
        self.optimizer_s.append(self.clock.take())

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
