"""Block-scaled fp8 in Triton: one pass per block of a row finds its largest value and converts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.fp8 import LARGEST, SMALLEST_SCALE
from moe_plugin.kernels.gpu.common import INTERPRETED

ROWS = 64 if INTERPRETED else 16


@triton.jit
def to_e4m3(value, finite, codes, LARGEST: tl.constexpr, ROUND: tl.constexpr):
    """`value` as the codes that `codes` points to; NaN where it is not finite."""
    code = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    # the interpreter loses the carry into the exponent: round to even here, three mantissa bits
    if ROUND:
        bits = code.to(tl.int32, bitcast=True)
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    bits = code.to(codes.dtype.element_ty).to(tl.uint8, bitcast=True)
    # e4m3's NaN: conversions differ in what they make of one
    bits = tl.where(finite, bits, 0x7F).to(tl.uint8)
    return bits.to(codes.dtype.element_ty, bitcast=True)


@triton.jit
def quantize_kernel(x, codes, scales, rows, width, blocks, LARGEST: tl.constexpr,
                    SMALLEST: tl.constexpr, ROUND: tl.constexpr, BR: tl.constexpr,
                    BLOCK: tl.constexpr):
    """codes = x / scale, scale = largest finite |x| of the block / LARGEST (1 for zeros).

    Values that are not finite become NaN.
    """
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    b = tl.program_id(1)
    d = b * BLOCK + tl.arange(0, BLOCK)
    inside = ((r < rows)[:, None] & (d < width)[None, :]) != 0
    at = r.to(tl.int64)[:, None] * width + d[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(value) < float("inf")
    largest = tl.max(tl.where(finite, tl.abs(value), 0.0), 1)
    scale = tl.where(largest > 0, tl.maximum(largest / LARGEST, SMALLEST), 1.0)
    code = to_e4m3(value / scale[:, None], finite, codes, LARGEST, ROUND)
    tl.store(codes + at, code, mask=inside)
    tl.store(scales + r * blocks + b, scale, mask=r < rows)


@triton.jit
def dequantize_kernel(codes, scales, out, rows, width, blocks, BR: tl.constexpr,
                      BLOCK: tl.constexpr):
    """out = codes * scale."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    b = tl.program_id(1)
    d = b * BLOCK + tl.arange(0, BLOCK)
    inside = ((r < rows)[:, None] & (d < width)[None, :]) != 0
    at = r.to(tl.int64)[:, None] * width + d[None, :]
    scale = tl.load(scales + r * blocks + b, mask=r < rows, other=0.0)
    value = tl.load(codes + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def quantize_fp8(x_RD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `moe_plugin.kernels.fp8.quantize_fp8`."""
    rows, width = x_RD.shape
    blocks = triton.cdiv(width, block)
    codes_RD = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x_RD.device)
    scales_RB = torch.empty(rows, blocks, dtype=torch.float32, device=x_RD.device)
    if rows:
        quantize_kernel[triton.cdiv(rows, ROWS),
                        blocks](x_RD.contiguous(), codes_RD, scales_RB, rows, width, blocks,
                                LARGEST, SMALLEST_SCALE, INTERPRETED, ROWS, block)
    return codes_RD, scales_RB


def dequantize_fp8(codes_RD: Tensor, scales_RB: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """See `moe_plugin.kernels.fp8.dequantize_fp8`."""
    (rows, width), blocks = codes_RD.shape, scales_RB.shape[1]
    out_RD = torch.empty(rows, width, dtype=dtype, device=codes_RD.device)
    if rows:
        dequantize_kernel[triton.cdiv(rows, ROWS), blocks](codes_RD.contiguous(), scales_RB, out_RD,
                                                           rows, width, blocks, ROWS, block)
    return out_RD
