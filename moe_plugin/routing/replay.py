"""Routing that repeats itself when activations are recomputed.

Activation checkpointing runs a layer twice: once forward, once more inside backward. If the second
pass routed a token elsewhere (noise, a tie broken by another rounding), shapes and gradients would
be wrong. So the chosen experts of the first pass are recorded and used again in the second. Two
ways, for two kinds of checkpointing:

* `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False, context_fn=routing_replay)`: one
  recording for each checkpointed call, matched by order of the routers inside it. Or simply
  `checkpoint(fn, x)` of this module.
* reentrant checkpointing that hosts bring (fairseq's, Megatron's): the host sets
  `router.replay = True`. A pass in training without gradients is a first pass and records; a pass
  inside backward takes the oldest recording of that router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

MAX_RECORDS = 4096  # micro-batches in flight; more means that recordings are made and never used
_active: ContextVar["_Tape | None"] = ContextVar("moe_plugin_routing_tape", default=None)


class _Tape:
    """Chosen experts of one checkpointed call, in call order."""

    def __init__(self) -> None:
        self.ids: list[Tensor] = []
        self.position: int | None = None  # None while recording


def routing_replay() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The pair (first pass, recomputation) that `torch.utils.checkpoint`'s `context_fn` asks for.
    """
    tape = _Tape()
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
    """Routing of everything inside is recorded; the value is for `replay_routing`. Not around
    activation checkpointing, which has its own.

    What is recorded (`.ids`: the routers' choices in call order, and noise where weights depend on
    it) can be saved with `torch.save`.
    """
    tape = _Tape()
    with _use(tape, None):
        yield tape


@contextmanager
def replay_routing(tape: _Tape) -> Iterator[None]:
    """The same calls in the same order route as recorded, whatever weights and noise are now; the
    weights of the choices are computed anew.
    """
    with _use(tape, 0):
        yield


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, non-reentrant, with routing recorded and replayed."""
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=routing_replay, **kwargs)


def replayed(router: nn.Module, choose: Callable[[], Tensor]) -> Tensor:
    """`choose()` in a first or plain pass; the recorded choice in a recomputation."""
    if torch.compiler.is_compiling():
        # the compiler recomputes inside one graph, from the values the first pass had
        return choose()
    tape = _active.get()
    if tape is not None:
        return _from_tape(tape, choose)
    if not getattr(router, "replay", False) or not router.training:
        return choose()
    records: deque[Tensor] = router.__dict__.setdefault("_replay_records", deque())
    if inside_backward():
        if not records:
            raise RuntimeError(
                "a recomputation found no recorded routing: its first pass ran with gradients on; "
                "use "
                "moe_plugin.routing.replay.checkpoint, or set router.replay = False")
        return records.popleft()
    ids_TK = choose()
    if not torch.is_grad_enabled():
        if len(records) >= MAX_RECORDS:
            raise RuntimeError(
                f"{MAX_RECORDS} routings were recorded for a recomputation that never came; set "
                "router.replay "
                "= False, or call eval() for passes without backward")
        records.append(ids_TK)
    return ids_TK


def forget(model: nn.Module) -> None:
    """Drop recordings whose recomputation never came, as after a step that was given up (out of
    memory, say).

    The next recomputation would take them for its own. A host with `router.replay` calls it where
    it knows that no backward pass is due.
    """
    for module in model.modules():
        for holder in (module, getattr(module, "auto", None),
                       getattr(getattr(module, "layouts", None), "shadows", None)):
            if holder is not None:
                holder.__dict__.pop("_replay_records", None)


def _from_tape(tape: _Tape, choose: Callable[[], Tensor]) -> Tensor:
    if tape.position is None:
        tape.ids.append(choose())
        return tape.ids[-1]
    ids_TK = tape.ids[tape.position]
    tape.position += 1
    return ids_TK


def inside_backward() -> bool:
    """Whether this code runs inside a backward pass, that is, in a recomputation."""
    # set by the autograd engine for the time of a backward pass; -1 outside (torch >= 2.0)
    return torch._C._current_graph_task_id() != -1
