"""Calls of compiled functions with CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

SMALL = 1 << 14  # values that are worth another thread
POINTER, INT64, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


def function(functions: ctypes.CDLL, name: str, *types: type) -> Callable[..., None]:
    """A function that returns nothing; types: of its arguments."""
    found = getattr(functions, name)
    found.argtypes, found.restype = types, None
    return found


def readable(x: Tensor) -> bool:
    """Whether compiled functions can read x: values in the memory of the CPU, which no mode or
    compiler holds back.
    """
    return (x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)
            and not torch.compiler.is_compiling())


def address(x: Tensor | None) -> int | None:
    """Where its first value is; None: NULL."""
    return None if x is None else x.data_ptr()


def threads(x: Tensor) -> int:
    """How many threads are worth it for a pass over x."""
    return min(torch.get_num_threads(), x.numel() // SMALL)
