"""Measure the forward and backward times of a layer call without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from moe_plugin.dispatch.base import Dispatcher, Sent, WrappedDispatcher
from moe_plugin.records import DispatchPlan, KeptRouting
from moe_plugin.utils.machine import record_event


def mark(device: torch.device) -> Any:
    """Return the current time, or an event that a GPU records now."""
    return record_event(device) if device.type == "cuda" else time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two marks. On a GPU, the host waits for the second mark."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


class CallTimer:
    """A timer for the forward and backward passes of one call.

    The forward time is the time from `start` to `stopped(y)`. The backward time is the time from
    the gradient of y to the gradient of the tensor that `started(x)` returned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: dict[str, Any] = {}
        self.wants_backward = False

    def start(self) -> None:
        """Start measuring the time of the forward pass."""
        self._mark("forward")

    def started(self, x: Tensor, anchor: Tensor | None) -> Tensor:
        """Return x unchanged. The backward time ends when the gradient of this tensor has been
        computed.

        Args:
            x: input tensor of the computation that is timed.
            anchor: a parameter. If x does not require a gradient, the parameter ensures that
                backward reaches this point.
        """
        return _Mark.apply(x, anchor, self, "backward_end")

    def stopped(self, y: Tensor) -> Tensor:
        """Return y unchanged. The forward time ends when this method is called, and the backward
        time starts when the gradient of y is computed.
        """
        self._mark("forward_end")
        self.wants_backward = torch.is_grad_enabled() and y.requires_grad
        return _Mark.apply(y, None, self, "backward")

    @property
    def over(self) -> bool:
        """True if all start and end times have been recorded."""
        return "forward_end" in self.marks and (not self.wants_backward
                                                or "backward_end" in self.marks)

    def seconds(self) -> float:
        """Return the sum of the forward and backward times in seconds, or 0 if the passes have not
        ended.

        On a GPU, the host waits for the last recorded event.
        """
        if not self.over:
            return 0.0
        return self._between("forward", "forward_end") + (self._between("backward", "backward_end")
                                                          if self.wants_backward else 0.0)

    def _mark(self, name: str) -> None:
        self.marks[name] = mark(self.device)

    def _between(self, start: str, end: str) -> float:
        return seconds_between(self.marks[start], self.marks[end])


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
    """A dispatcher that times the plan, dispatch, experts and combine steps of one call."""

    def __init__(self, inner: Dispatcher, timer: CallTimer) -> None:
        super().__init__(inner)
        self.timer, self.reads_anchor = timer, True  # backward must pass the mark of `started`

    def plan(self, kept: KeptRouting) -> DispatchPlan:
        self.timer.start()
        return self.inner.plan(kept)

    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, anchor: Tensor | None) -> Sent:
        return self.inner.dispatch(self.timer.started(x_TD, anchor), plan, anchor)

    def combine(self, sent: Sent, plan: DispatchPlan) -> Tensor:
        return self.timer.stopped(self.inner.combine(sent, plan))
