"""Conversions to floating-point dtypes of at least 32 bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for floating-point dtypes with fewer than 32 bits, and the given dtype
    otherwise.
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def keep_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function for `Module._apply`, so that floating-point results with fewer than 32 bits
    become float32.
    """

    def apply(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        dtype = at_least_float32(made.dtype)
        return made if made.dtype == dtype else tensor.to(made.device, dtype)

    return apply
