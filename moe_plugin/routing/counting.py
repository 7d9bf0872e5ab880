"""Functions that decide which passes of a layer are counted, and count each pass exactly once.

A pass that is recomputed during the backward pass must not be counted twice.
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
    """Return whether the statistics, and the updates after each step, include a pass of a layer.

    In training mode, a pass with gradients is counted once, and its recomputation is not counted. A
    pass without gradients is counted only if it will be recomputed with gradients.
    """
    if not training or inside_backward():
        return False
    if torch.is_grad_enabled():
        return torch.compiler.is_compiling() or runs_once(training) or enclosing()[0] is None
    return _is_first_pass()


def add_counts(sums: Tensor, added: Callable[[], Tensor], training: bool,
               refusal: str = "") -> Tensor | None:
    """If the pass is counted (see `counts`), add `added()` to `sums` in place.

    Under a compiler, the addition is an operation in the graph. Whether a pass is a recomputation
    is known only when the pass runs, and not when it is traced.

    Args:
        sums: tensor that is changed in place.
        added: function that returns the tensor to add, called only if it may be needed.
        training: True if the layer is in training mode.
        refusal: optional. If `refusal` is passed, a recomputation raises a `RuntimeError` with this
            message. By default, a recomputation adds nothing.
    Returns: A copy of the new sums, or None if nothing was added. In training under a compiler, the
    function never returns None. If nothing was added, it returns a copy of `added()`.
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
    """Within this context, passes without gradients are treated as first passes and counted.

    If a pass is repeated with gradients, the caller must undo the counts of the repeated pass.
    """
    token = _first.set(True)
    try:
        yield
    finally:
        _first.reset(token)
