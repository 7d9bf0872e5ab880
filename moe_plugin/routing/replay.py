"""Routing that repeats itself when activations are recomputed.

Activation checkpointing runs a layer twice: once forward, once more inside backward. If the second
pass routed a token elsewhere (noise, a tie broken by another rounding), shapes and gradients would
be wrong. So the chosen experts of the first pass are recorded and used again in the second. Two
ways, for two kinds of checkpointing:

* `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False, context_fn=routing_replay)`: one
  recording for each checkpointed call, matched by order of the routers inside it. Or simply
  `checkpoint(fn, x)` of this module.
* reentrant checkpointing of hosts (fairseq, Megatron): the layer is built with
  `HostContext(replay=True)`, and each chooser has a `ReplayLog`. A pass in training without
  gradients is a first pass and records; a pass inside backward takes the oldest recording.

Under torch.compile nothing is recorded: the compiled backward reuses the values of the first pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")
MAX_RECORDS = 4096  # micro-batches in flight; more means that recordings are made and never used
_active: ContextVar["_Tape | None"] = ContextVar("moe_plugin_routing_tape", default=None)


class _Tape:
    """Chosen experts of one checkpointed call, in call order.

    recomputes: for activation checkpointing, within one pass; else to be kept and used again.
    """

    def __init__(self, recomputes: bool = False) -> None:
        self.recomputes = recomputes
        self.ids: list[Any] = []
        self.position: int | None = None  # None while recording

    def replayed(self, choose: Callable[[], T]) -> T:
        """Record `choose()`, or return the next recorded choice."""
        if self.position is None:
            self.ids.append(choose())
            return self.ids[-1]
        choice = self.ids[self.position]
        self.position += 1
        return choice


def routing_replay() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The pair (first pass, recomputation) for `context_fn` of `torch.utils.checkpoint`."""
    tape = _Tape(recomputes=True)
    return _use(tape, None), _use(tape, 0)


@contextmanager
def _use(tape: _Tape, position: int | None) -> Iterator[None]:
    tape.position = position
    token = _active.set(tape)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def record_routing() -> Iterator[_Tape]:
    """Record the routing of everything inside; the value is for `replay_routing`.

    Not around activation checkpointing, which has its own recording. What is recorded (`.ids`: the
    routers' choices in call order, and noise if weights depend on it) can be saved with
    `torch.save`.
    """
    tape = _Tape()
    with _use(tape, None):
        yield tape


@contextmanager
def replay_routing(tape: _Tape) -> Iterator[None]:
    """Route the same calls in the same order as recorded.

    Weights of the model and noise may differ; the weights of the choices are computed again.
    """
    with _use(tape, 0):
        yield


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, non-reentrant, with routing recorded and replayed."""
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=routing_replay, **kwargs)


class ReplayLog:
    """Choices of one chooser, recorded in first passes and repeated in recomputations.

    A chooser (a router, a router selector, a layout tuner) owns one log.

    Args:
        enabled: the host recomputes with reentrant checkpointing (`HostContext.replay`). A tape
            (`record_routing`, `checkpoint`) works without it.
    """

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.records: deque[Any] = deque()

    def replayed(self, choose: Callable[[], T], training: bool, *, values: bool = True) -> T:
        """`choose()` in a first or plain pass; the recorded choice in a recomputation.

        training: of the layer; without it nothing is recorded here. values: False for what belongs
        to one pass and its recomputation, and is no part of `record_routing`.
        Raises: RuntimeError: recordings and recomputations do not match.
        """
        if torch.compiler.is_compiling():
            # the compiler recomputes inside one graph, from the values the first pass had
            return choose()
        tape = _active.get()
        if tape is not None:
            return tape.replayed(choose) if values or tape.recomputes else choose()
        if not self.enabled or not training:
            return choose()
        if inside_backward():
            return self._oldest()
        choice = choose()
        if not torch.is_grad_enabled():
            self._add(choice)
        return choice

    def turn(self, counts: Sequence[int]) -> None:
        """The last calls will be recomputed in reverse order. counts: recordings of each call,
        first to last.
        """
        taken = [self.records.pop() for _ in range(sum(counts))][::-1]
        for start in reversed([sum(counts[:i]) for i in range(len(counts))]):
            self.records.extend(taken[start:])
            del taken[start:]

    def forget(self) -> None:
        """Drop all recordings."""
        self.records.clear()

    def _oldest(self) -> Any:
        if not self.records:
            raise RuntimeError(
                "a recomputation found no recorded routing: its first pass ran with gradients on; "
                "use moe_plugin.routing.replay.checkpoint, or build the layer with "
                "HostContext(replay=False)")
        return self.records.popleft()

    def _add(self, choice: Any) -> None:
        if len(self.records) >= MAX_RECORDS:
            raise RuntimeError(
                f"{MAX_RECORDS} routings were recorded for recomputations that never came; build "
                "the layer with HostContext(replay=False), or call eval() for passes without "
                "backward")
        self.records.append(choice)


class Replaying:
    """Base of everything that owns recordings, directly or through its parts."""

    def forget_recordings(self) -> None:
        """Drop recordings whose recomputation never came."""
        raise NotImplementedError


def forget(model: nn.Module) -> None:
    """Drop a model's recordings whose recomputation never came, as after an out-of-memory step.

    The next recomputation would otherwise use them. A host that recomputes (`HostContext.replay`)
    calls it when no backward pass is pending.
    """
    for module in model.modules():
        if isinstance(module, Replaying):
            module.forget_recordings()


def replaying() -> bool:
    """Whether this code runs in the second pass of a call that a tape recorded.

    It has gradients as the first one had; what counts passes must count one of them.
    """
    tape = _active.get()
    return tape is not None and tape.position is not None and inside_backward()


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass, that is, in a recomputation."""
    # set by the autograd engine for the time of a backward pass; -1 outside (torch >= 2.0)
    return torch._C._current_graph_task_id() != -1
