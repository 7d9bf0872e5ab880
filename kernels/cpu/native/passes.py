"""What `fused` does between two matmuls, each in one pass over the values: in C, for CPU tensors.

Torch's operations take several passes, and gelu and its derivative are computed apart. Here forward
leaves the derivative where the value before the activation was, and backward multiplies by it, by
the row's weight, and adds up the gradient of that weight. The layer of 8 experts of widths 512 and
2048 takes 0.96 of its time in bfloat16, gated 0.95 (4,096 tokens, k = 2, AMD Zen 5).

Legend: N rows, F inner width, D width of a row. All tensors are contiguous, float32 or bfloat16;
scale_N, dots_N: float32. Computed in float32, each result rounded once.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.native import build
from moe_plugin.kernels.cpu.native.calls import (
    INT,
    INT64,
    POINTER,
    address,
    function,
    readable,
    threads,
)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativePasses:
    """The passes for one activation and dtype."""

    def __init__(self, functions: ctypes.CDLL, dtype: torch.dtype) -> None:
        of, sizes = DTYPES[dtype], (INT64, INT64)
        self._forward = function(functions, f"forward_{of}", *sizes, *[POINTER] * 3, INT, INT)
        self._backward = function(functions, f"backward_{of}", *sizes, *[POINTER] * 7, INT, INT)
        self._scale = function(functions, f"scale_{of}", *sizes, *[POINTER] * 2, INT)

    def forward(self, before_NF: Tensor, up_NF: Tensor | None, after_NF: Tensor,
                keep_slope: bool) -> None:
        """after = act(before), times `up` of a gated expert.

        keep_slope: before = act'(before); without `up` alone.
        """
        self._forward(*before_NF.shape, before_NF.data_ptr(), address(up_NF),
                      after_NF.data_ptr(), keep_slope, threads(before_NF))

    def backward(self, grad_NF: Tensor, before_NF: Tensor, up_NF: Tensor | None, after_NF: Tensor,
                 grad_up_NF: Tensor | None, scale_N: Tensor | None, dots_N: Tensor | None,
                 has_slope: bool) -> None:
        """grad, of the value after the activation, becomes that of the value before it.

        Args:
            has_slope: forward left act'(before) and `after`, which are read. Otherwise `after`
                is computed again and written.
            scale_N: the gradients, of `grad_up` as well, times a factor of each row; None: 1.
            dots_N: sums over the inner width of grad, before that, times `after`.
        """
        self._backward(*grad_NF.shape, grad_NF.data_ptr(), before_NF.data_ptr(), address(up_NF),
                       after_NF.data_ptr(), address(grad_up_NF), address(scale_N),
                       address(dots_N), has_slope, threads(grad_NF))

    def scale(self, grad_ND: Tensor, scale_N: Tensor) -> None:
        """grad = scale grad."""
        self._scale(*grad_ND.shape, grad_ND.data_ptr(), scale_N.data_ptr(), threads(grad_ND))


def passes(x: Tensor, activation: str) -> NativePasses | None:
    """The passes for experts whose input is x; None: torch's operations, see `why_not`."""
    return _passes(activation, x.dtype) if x.dtype in DTYPES and readable(x) else None


def why_not(activation: str) -> str | None:
    """Why this machine has no passes for an activation; None where it has."""
    return build.why_not(*_of(activation))


@functools.cache
def _passes(activation: str, dtype: torch.dtype) -> NativePasses | None:
    found = build.library(*_of(activation))
    return None if isinstance(found, str) else NativePasses(found, dtype)


def _of(activation: str) -> tuple[str, str]:
    """Source and definition of an activation's passes, see `build.library`."""
    return "passes.c", f"ACTIVATION={activation}"
