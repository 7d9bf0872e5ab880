"""Times one call of a layer, forward and backward, without waiting for a device."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from moe_plugin.dispatch.base import Dispatcher, Sent, WrappedDispatcher
from moe_plugin.records import DispatchPlan, KeptRouting
from moe_plugin.utils.machine import record_event


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
