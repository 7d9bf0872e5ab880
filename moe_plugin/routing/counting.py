"""Which passes of a layer count, and sums to which each pass adds once.

A pass that is recomputed in backward must not be counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from moe_plugin.routing.replay import enclosing, runs_once
from moe_plugin.utils.machine import inside_backward

_first: ContextVar[bool] = ContextVar("moe_plugin_first_pass", default=False)


def counts(training: bool) -> bool:
    """Return true if a pass of a layer counts for statistics and for updates at each step.

    A pass in training mode with gradients counts once, and its recomputation does not count. A pass
    without gradients counts only if it is recomputed with gradients.
    """
    if not training or inside_backward():
        return False
    if torch.is_grad_enabled():
        return torch.compiler.is_compiling() or runs_once(training) or enclosing()[0] is None
    return _is_first_pass()


def add_counts(sums: Tensor, added: Callable[[], Tensor], training: bool,
               refusal: str = "") -> Tensor | None:
    """Add `added()` to `sums` in place if the pass counts (`counts`).

    Under a compiler this is an operation in the graph, because only the running pass, and not the
    traced one, knows whether it is a recomputation.

    Args:
        sums: the tensor that is changed.
        added: function that computes the values to add. Called only if they may be needed.
        training: whether the layer is in training mode.
        refusal: optional. The message of the `RuntimeError` that a recomputation raises. By default
            a recomputation adds nothing.
    Returns: A copy of the new sums, or None if nothing was added. Under a compiler the result is
        never None in training: if nothing was added, the operation returns a copy of `added()`.
    """
    if training and torch.compiler.is_compiling():
        return _add_counts(sums, added(), torch.is_grad_enabled(), refusal)
    if training and refusal and inside_backward():
        raise RuntimeError(refusal)
    return sums.add_(added()).clone() if counts(training) else None


@torch.library.custom_op("moe_plugin::add_counts", mutates_args=("sums",))
def _add_counts(sums: Tensor, added: Tensor, has_grad: bool, refusal: str) -> Tensor:
    if inside_backward():
        if refusal:
            raise RuntimeError(refusal)
    elif has_grad or _is_first_pass():
        return sums.add_(added).clone()
    return added.clone()


@_add_counts.register_fake
def _(sums: Tensor, added: Tensor, has_grad: bool, refusal: str) -> Tensor:
    return torch.empty_like(sums)


def _is_first_pass() -> bool:
    # Never compiled, because reading the call stack breaks the compiler's graph. A reentrant
    # checkpoint has `next_functions` exactly if autograd will return to it in backward.
    return _first.get() or any(
        isinstance(first, FunctionCtx)
        and first.next_functions  # type: ignore[attr-defined]  # torch's stubs lack it
        for first in enclosing()[1])


@contextmanager
def first_pass() -> Iterator[None]:
    """Declare that passes without gradients are first passes and are therefore counted.

    If such a pass is repeated with gradients, the caller must undo the counts of the repetition.
    """
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)
