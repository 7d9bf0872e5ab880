"""Matmuls of 16 bits on a CPU: by the processor's own instructions, or in float32.

Without AVX-512 (x86) or bf16 instructions (Arm) torch multiplies 16-bit matrices number by number,
which takes up to a hundred times as long as the same product in float32. Here the operands are
converted, multiplied in float32 and rounded once, which is at least as exact: the sums have always
been of 32 bits.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

_NATIVE = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


class Product(Protocol):
    """a b (+ base) into `out_NO`, which is returned.

    a_NI: [N, I]. b_IO: [I, O]. base: [N, O], also `out_NO` itself, or [O]. out_NO: [N, O]. All of
    one dtype.
    """

    def __call__(self, a_NI: Tensor, b_IO: Tensor, out_NO: Tensor,
                 base: Tensor | None = None) -> Tensor: ...


@functools.cache
def in_float32(dtype: torch.dtype) -> bool:
    """Whether this processor has no instructions for products of a 16-bit dtype."""
    return dtype in _NATIVE and not (torch.backends.mkldnn.is_available()
                                     and getattr(torch.ops.mkldnn, _NATIVE[dtype])())


def product_of(like: Tensor) -> Product:
    """The way to multiply matrices of `like`'s dtype, on its device."""
    return _widened if like.device.type == "cpu" and in_float32(like.dtype) else _native


def _native(a_NI: Tensor, b_IO: Tensor, out_NO: Tensor, base: Tensor | None = None) -> Tensor:
    if base is None:
        return torch.mm(a_NI, b_IO, out=out_NO)
    return torch.addmm(base, a_NI, b_IO, out=out_NO)


def _widened(a_NI: Tensor, b_IO: Tensor, out_NO: Tensor, base: Tensor | None = None) -> Tensor:
    wide_NO = a_NI.new_empty(out_NO.shape, dtype=torch.float32)
    torch.mm(a_NI.float(), b_IO.float(), out=wide_NO)  # into memory: autocast leaves it as it is
    return out_NO.copy_(wide_NO if base is None else wide_NO.add_(base))
