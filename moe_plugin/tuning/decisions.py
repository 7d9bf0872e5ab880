"""What the trial engine is told and tells: settings, decisions, and what outlives a process."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moe_plugin.dispatch.base import Dispatcher, Sent, WrappedDispatcher
from moe_plugin.planner.trials import ContestRules
from moe_plugin.records import DispatchPlan, KeptRouting
from moe_plugin.utils.machine import record_event


# Times one call of a layer, forward and backward, without waiting for a device.
class CallTimer:
    """From `start` to `stopped(y)`, and from the gradient of y to the gradient of `started(x)`;
    seconds when both are over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, Any] = {}
        self.wants_backward = False

    def start(self) -> None:
        """From here on time counts."""
        self._mark("forward")

    def started(self, x: Tensor, anchor: Tensor | None) -> Tensor:
        """x itself, at whose gradient time ends; anchor: a parameter, so that backward comes by
        here whatever x is.
        """
        return _Mark.apply(x, anchor, self, "backward_end")

    def stopped(self, y: Tensor) -> Tensor:
        """y itself, up to where time counts."""
        self._mark("forward_end")
        self.wants_backward = torch.is_grad_enabled() and y.requires_grad
        return _Mark.apply(y, None, self, "backward")

    @property
    def over(self) -> bool:
        """Whether all marks are set."""
        return "forward_end" in self.marks and (not self.wants_backward
                                                or "backward_end" in self.marks)

    def seconds(self) -> float:
        """Forward plus backward; 0 where they are not over. On GPU waits for the last mark."""
        if not self.over:
            return 0.0
        return self._between("forward", "forward_end") + (self._between("backward", "backward_end")
                                                          if self.wants_backward else 0.0)

    def _mark(self, name: str) -> None:
        if self.device.type == "cuda":
            self.marks[name] = record_event(self.device)
        else:
            self.marks[name] = time.perf_counter()

    def _between(self, start: str, end: str) -> float:
        first, last = self.marks[start], self.marks[end]
        if self.device.type == "cuda":
            last.synchronize()
            return first.elapsed_time(last) / 1e3
        return last - first


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, watch: CallTimer, name: str) -> Tensor:
        ctx.watch, ctx.name = watch, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.watch._mark(ctx.name)
        return grad, None, None, None


class Timed(WrappedDispatcher):
    """A dispatcher, one call of which is timed: plan, dispatch, experts and combine."""

    def __init__(self, inner: Dispatcher, timer: CallTimer) -> None:
        super().__init__(inner)
        self.timer, self.reads_anchor = timer, True  # so that a mark is passed in backward

    def plan(self, kept: KeptRouting) -> DispatchPlan:
        self.timer.start()
        return self.inner.plan(kept)

    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, anchor: Tensor | None) -> Sent:
        return self.inner.dispatch(self.timer.started(x_TD, anchor), plan, anchor)

    def combine(self, sent: Sent, plan: DispatchPlan) -> Tensor:
        return self.timer.stopped(self.inner.combine(sent, plan))


Bucket = TypeVar("Bucket", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class TunerSettings:
    """Rules of a tuner.

    Attributes:
        tries: candidates timed in a new bucket, the best predicted first; None: all.
        within: candidates predicted slower than this factor times the best are not tried.
        contest: how candidates are told apart.
        drift: relative change of the watched time that counts as drift, `patience` times in a
            row.
        watch: a settled bucket is timed once per so many calls.
        allowance, budget: calls that may be spent on trials: allowance, or budget * calls if more.
        each: these are of each bucket; False: of all buckets together.
    """

    tries: int | None = 4
    within: float = 2.0
    contest: ContestRules = ContestRules(least=2)
    drift: float = 0.3
    patience: int = 3
    watch: float = 8
    allowance: float = 36
    budget: float = 0.02
    each: bool = False


@dataclass(frozen=True)
class TunerDecision:
    """One entry of the log: what was decided at which call for which bucket, and why.

    event: predict, explore, settle, keep or restore. Times in seconds, None: unknown.
    """

    call: int
    bucket: Any
    choice: Any
    event: str
    why: str
    predicted_s: float | None = None
    measured_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON lines and reports."""
        return {**asdict(self), "choice": str(self.choice), "bucket": plain(self.bucket)}


@dataclass(frozen=True)
class KeptDecision:
    """A decision that outlives the process.

    Attributes:
        name, why: the candidate's, and why it was chosen.
        spread: of the times that chose it, see `Contest.spread`.
        seconds: of the candidates by name.
        behind: by name those that were far behind, with the factor.
        made: when, in seconds since 1970.
    """

    name: str
    why: str
    spread: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    behind: Mapping[str, float] = field(default_factory=dict)
    made: float = 0.0


class Memory(Protocol[Bucket]):
    """Decisions that outlive the process, by bucket."""

    def get(self, bucket: Bucket) -> KeptDecision | None:
        """None: nothing is known."""

    def put(self, bucket: Bucket, kept: KeptDecision) -> None:
        """Keep a decision."""

    def forget(self, bucket: Bucket) -> None:
        """Keep none any more."""

def new_fields(saved: Any, choices: Iterable[Any]) -> dict[str, Any]:
    """Fields with a default that these choices have and a saved one has not, with the default."""
    kind = next(iter(choices), None)
    if not is_dataclass(kind) or not isinstance(saved, Mapping):
        return {}
    return {f.name: f.default for f in fields(kind)
            if f.default is not MISSING and f.name not in saved}


def filled(saved: Any, new: Mapping[str, Any]) -> Any:
    """A saved choice with fields that it has not."""
    return {**new, **saved} if isinstance(saved, Mapping) else saved


def plain(value: Any) -> Any:
    """A choice or a bucket as plain values."""
    if is_dataclass(value):
        return asdict(value)
    return list(value) if isinstance(value, tuple) else value


def text_of(value: Any) -> str:
    """Plain values as text that is equal for equal ones."""
    return json.dumps(value, sort_keys=True)
