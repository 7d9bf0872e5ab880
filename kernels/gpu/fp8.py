"""Block-scaled fp8 in Triton: quantization of rows and weights, and matmuls with fp8 operands.

Each block of a row is processed in one pass, which finds the largest value and then converts all
values.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.fp8 import BLOCK, LARGEST, SMALLEST_SCALE
from moe_plugin.kernels.gpu.expert_matmul import programs
from moe_plugin.kernels.gpu.grouped_gemm import (
    load_rows,
    load_weights,
    row_tiles,
    rows_at,
    tile_at,
    weight_tiles,
    with_bias,
)
from moe_plugin.kernels.gpu.tilings import (
    FP8_REGISTERS,
    FP8_TILING,
    INTERPRETED,
    bounded_registers,
    chip_of,
    pointer,
)
from moe_plugin.kernels.groups import RowGroups

ROWS = 64 if INTERPRETED else 16


@triton.jit
def to_e4m3(value, finite, codes, LARGEST: tl.constexpr, ROUND: tl.constexpr):
    """Convert `value` to the dtype of the pointer `codes`. Infinities and NaN become NaN."""
    code = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    # The interpreter's conversion loses the carry into the exponent, so values are first rounded
    # here to three mantissa bits, ties to even.
    if ROUND:
        bits = code.to(tl.int32, bitcast=True)
        code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    bits = code.to(codes.dtype.element_ty).to(tl.uint8, bitcast=True)
    # e4m3's NaN is written as bits, because conversions treat NaN differently.
    bits = tl.where(finite, bits, 0x7F).to(tl.uint8)
    return bits.to(codes.dtype.element_ty, bitcast=True)


@triton.jit
def quantize_kernel(x, codes, scales, rows, width, blocks, LARGEST: tl.constexpr,
                    SMALLEST: tl.constexpr, ROUND: tl.constexpr, BR: tl.constexpr,
                    BLOCK: tl.constexpr):
    """Compute `codes = x / scale`. The scale is the largest finite |x| in the block divided by
    LARGEST, or 1 for a block of zeros.

    Infinities and NaN become NaN.
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
    """Compute `out = codes * scale`."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    b = tl.program_id(1)
    d = b * BLOCK + tl.arange(0, BLOCK)
    inside = ((r < rows)[:, None] & (d < width)[None, :]) != 0
    at = r.to(tl.int64)[:, None] * width + d[None, :]
    scale = tl.load(scales + r * blocks + b, mask=r < rows, other=0.0)
    value = tl.load(codes + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def quantize_fp8(x_RD: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Quantize rows in Triton; see `moe_plugin.kernels.fp8.quantize_fp8`."""
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
    """Dequantize rows in Triton; see `moe_plugin.kernels.fp8.dequantize_fp8`."""
    (rows, width), blocks = codes_RD.shape, scales_RB.shape[1]
    out_RD = torch.empty(rows, width, dtype=dtype, device=codes_RD.device)
    if rows:
        dequantize_kernel[triton.cdiv(rows, ROWS), blocks](codes_RD.contiguous(), scales_RB, out_RD,
                                                           rows, width, blocks, ROWS, block)
    return out_RD


# Tests in the interpreter have few rows.
_TILING = dataclasses.replace(FP8_TILING, rows=64) if INTERPRETED else FP8_TILING


@triton.jit
def quantize_weights_kernel(w, codes, scales, inner, outer, high, wide, stride_group, stride_i,
                            stride_o, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
                            ROUND: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize one block of one group.

    The kernel computes the scale and the codes of the block, and stores the transposed codes.
    """
    group = tl.program_id(1)
    row, column = tl.program_id(0) // wide, tl.program_id(0) % wide
    i = row * BLOCK + tl.arange(0, BLOCK)
    o = column * BLOCK + tl.arange(0, BLOCK)
    inside = ((i < inner)[:, None] & (o < outer)[None, :]) != 0
    value = tl.load(w + group.to(tl.int64) * stride_group + i.to(tl.int64)[:, None] * stride_i +
                    o.to(tl.int64)[None, :] * stride_o, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(value) < float("inf")
    largest = tl.max(tl.max(tl.where(finite, tl.abs(value), 0.0), 1), 0)
    scale = tl.where(largest > 0, tl.maximum(largest / LARGEST, SMALLEST), 1.0)
    code = to_e4m3(value / scale, finite, codes, LARGEST, ROUND)
    # Codes are stored transposed, because matrix units read 8-bit operands along the sum.
    at = (group.to(tl.int64) * outer + o[None, :]) * inner + i[:, None]
    tl.store(codes + at, code, mask=inside)
    tl.store(scales + (group * high + row) * wide + column, scale)


@triton.jit
def fp8_tile(t, x, x_tiles, scales, token, w, w_tiles, w_scales, bias, out, tile_group, tile_row,
             tiles, ends, wide, stride_group, stride_k, stride_n, K: tl.constexpr,
             GATHER: tl.constexpr, BIAS: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr,
             BLOCK: tl.constexpr):
    """Compute tile t of `fp8_product_kernel`."""
    pm, pn = tile_at(t, tl.cdiv(wide, BLOCK), tiles, 8)
    group, first, r, inside, at, live = rows_at(pm, token, tile_group, tile_row, ends, GATHER, BM)
    column = pn * BLOCK
    n = column + tl.arange(0, BLOCK)
    steps: tl.constexpr = (K + BLOCK - 1) // BLOCK
    total = tl.zeros([BM, BLOCK], tl.float32)
    for step in range(steps):
        a = load_rows(x, x_tiles, first, at, live, step * BLOCK, K, BLOCK)
        b = load_weights(w, w_tiles, group, step * BLOCK, column, wide, stride_group, stride_k,
                         stride_n, K, True, BLOCK, BLOCK)
        mine = tl.load(scales + at * steps + step, mask=live, other=0.0)
        theirs = tl.load(w_scales + (group * steps + step) * tl.cdiv(wide, BLOCK) + pn)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        # A new sum for each scale, added in float32, because the matrix units accumulate with fewer
        # bits than float32.
        total += tl.dot(a, b) * (mine * theirs)[:, None]
    total = with_bias(total, bias, group, n, wide, BIAS)
    where = tl.arange(0, BM)[:, None] * wide + n[None, :]
    tl.store(out + first.to(tl.int64) * wide + where, total.to(out.dtype.element_ty),
             mask=(inside[:, None] & (n < wide)[None, :]) != 0)


@triton.jit
def fp8_product_kernel(x, x_tiles, scales, token, w, w_tiles, w_scales, bias, out, tile_group,
                       tile_row, used, ends, wide, stride_group, stride_k, stride_n,
                       K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr,
                       UPCAST: tl.constexpr, WHILE: tl.constexpr, BM: tl.constexpr,
                       BLOCK: tl.constexpr):
    """Compute `out = (x * scales)[token] @ (w * w_scales) + bias`."""
    tiles = tl.load(used)
    number = tiles * tl.cdiv(wide, BLOCK)
    if WHILE:
        t = tl.program_id(0)
        while t < number:
            fp8_tile(t, x, x_tiles, scales, token, w, w_tiles, w_scales, bias, out, tile_group,
                     tile_row, tiles, ends, wide, stride_group, stride_k, stride_n, K, GATHER, BIAS,
                     UPCAST, BM, BLOCK)
            t += tl.num_programs(0)
    else:
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0)):
            fp8_tile(t, x, x_tiles, scales, token, w, w_tiles, w_scales, bias, out, tile_group,
                     tile_row, tiles, ends, wide, stride_group, stride_k, stride_n, K, GATHER, BIAS,
                     UPCAST, BM, BLOCK)


def quantize_weights_fp8(w_LIO: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize weights in Triton; see `moe_plugin.kernels.fp8.quantize_weights_fp8`."""
    groups, inner, outer = w_LIO.shape
    high, wide = triton.cdiv(inner, BLOCK), triton.cdiv(outer, BLOCK)
    codes_LOI = torch.empty(groups, outer, inner, dtype=torch.float8_e4m3fn, device=w_LIO.device)
    scales_LHW = torch.empty(groups, high, wide, dtype=torch.float32, device=w_LIO.device)
    if w_LIO.numel():
        quantize_weights_kernel[high * wide, groups](w_LIO, codes_LOI, scales_LHW, inner, outer,
                                                     high, wide, *w_LIO.stride(), LARGEST,
                                                     SMALLEST_SCALE, INTERPRETED, BLOCK,
                                                     num_warps=8)
    return codes_LOI.transpose(1, 2), scales_LHW


def expert_matmul_fp8(codes: Tensor, scales: Tensor, groups: RowGroups, codes_LIO: Tensor,
                      scales_LHW: Tensor, b_LO: Tensor | None, token_R: Tensor | None,
                      dtype: torch.dtype) -> Tensor:
    """Multiply fp8 operands in Triton; see `moe_plugin.kernels.fp8.expert_matmul_fp8`."""
    inner, wide = codes_LIO.shape[1:]
    out_RO = torch.empty(groups.total, wide, dtype=dtype, device=codes.device)
    if not groups.total:
        return out_RO
    t, chip = _TILING, chip_of(codes.device)
    x_tiles = w_tiles = None
    if chip.copies_tiles:
        w_tiles, transposed = weight_tiles(codes_LIO, t.depth, t.columns)
        w_tiles = w_tiles if transposed else None  # the kernel reads tiles along the sum only
        x_tiles = row_tiles(codes, (t.rows, t.depth)) if token_R is None else None
    table = groups.tiles(t.rows)
    work = table[0].numel() * triton.cdiv(wide, BLOCK)
    fp8_product_kernel[(programs(chip, t, work, groups),)](
        codes, x_tiles, scales, pointer(token_R, codes), codes_LIO, w_tiles, scales_LHW,
        pointer(b_LO, codes), out_RO, *table, groups.ends_L, wide, *codes_LIO.stride(), K=inner,
        GATHER=token_R is not None, BIAS=b_LO is not None, UPCAST=INTERPRETED, WHILE=INTERPRETED,
        BM=t.rows, BLOCK=BLOCK, num_warps=t.warps, num_stages=t.stages,
        **bounded_registers(FP8_REGISTERS, chip))
    return out_RO
