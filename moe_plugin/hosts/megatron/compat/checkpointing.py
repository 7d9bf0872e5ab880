"""Functions of `megatron.core.dist_checkpointing` with ours around them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import dist_checkpointing

Around = Callable[[Callable[..., Any], dict[str, Any]], Any]


def wrap(name: str, around: Around) -> None:
    """Let `around(original, given)` be called in place of one of these functions, once for each
    `around`; stays for the life of the process.

    given: the call's arguments, by their names in Megatron.
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
    """Whether `wrap` has been called with these."""
    return around in getattr(getattr(dist_checkpointing, name), "around", ())
