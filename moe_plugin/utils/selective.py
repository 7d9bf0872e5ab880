"""Hides operations from the policies of torch's selective activation checkpoints.

A selective checkpoint (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) counts the
calls of each operator in both passes. The recomputation then receives the saved output of the call
with the same number. A layer of this package does not call the same operators in both passes: a
recomputation repeats recorded choices and counts nothing, and one kernel of the first pass may
correspond to several operators of the recomputation. It also writes to its buffers in place. Saved
outputs would therefore belong to other calls. Inside a hidden function, a policy sees no operator,
and everything is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch.utils import _python_dispatch as modes
from torch.utils import checkpoint

P = ParamSpec("P")
T = TypeVar("T")
_SELECTIVE = tuple(mode for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
                   if (mode := getattr(checkpoint, name, None)) is not None)


# torch's function without a wrapper, because every call of a layer uses it
dispatch_modes = torch._C._len_torch_dispatch_stack


def hidden_from_policies(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function such that policies of selective checkpoints see none of its operators.

    Other dispatch modes, for example counters of operations, still see the operators.
    """
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling() or not dispatch_modes() or not has_policy():
            return function(*args, **kwargs)
        with without_policies():
            return function(*args, **kwargs)

    return run


def has_policy() -> bool:
    """Return whether the policy of a selective checkpoint sees operators now."""
    return any(isinstance(mode, _SELECTIVE) for mode in modes._get_current_dispatch_mode_stack())


@contextmanager
def without_policies() -> Iterator[None]:
    """Hide the operators inside the block from the policies of selective checkpoints."""
    active = [modes._pop_mode() for _ in range(dispatch_modes())][::-1]
    kept = [mode for mode in active if not isinstance(mode, _SELECTIVE)]
    for mode in kept:
        modes._push_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            modes._pop_mode()
        for mode in active:
            modes._push_mode(mode)
