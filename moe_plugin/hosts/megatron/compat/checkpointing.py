"""Wrappers around functions of `megatron.core.dist_checkpointing`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import dist_checkpointing

Around = Callable[[Callable[..., Any], dict[str, Any]], Any]


def wrap(name: str, around: Around) -> None:
    """Replace a function with `around(original, given)` until the process ends.

    A second call with the same `around` has no effect.

    name: name of the function in `megatron.core.dist_checkpointing`.
    around: function that is called with the original function and a dict. The dict maps parameter
        names to the arguments of the call.
    """
    original = getattr(dist_checkpointing, name)
    if is_wrapped(name, around):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, signature.bind(*args, **kwargs).arguments)

    call.around = (*getattr(original, "around", ()), around)  # type: ignore[attr-defined]
    setattr(dist_checkpointing, name, call)


def is_wrapped(name: str, around: Around) -> bool:
    """Return True if `wrap` has already been called with these arguments."""
    return around in getattr(getattr(dist_checkpointing, name), "around", ())
