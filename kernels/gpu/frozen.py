"""The grouped matmul of frozen weights in Triton: codes are decoded inside the loop over tiles.

A tile of codes is loaded with the outputs first, as it is stored, decoded in registers, and
transposed if rows are multiplied by the weights. Rows that are multiplied by the transposed
weights use the tile as it is. No decoded weight is written to memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.frozen import FROZEN_FORMATS, FrozenWeight
from moe_plugin.kernels.gpu.expert_matmul import programs
from moe_plugin.kernels.gpu.grouped_gemm import (
    copies_tiles,
    load_rows,
    multiply,
    row_tiles,
    rows_at,
    tile_at,
)
from moe_plugin.kernels.gpu.tilings import (
    FP8_REGISTERS,
    INTERPRETED,
    Chip,
    Tiling,
    bounded_registers,
    chip_of,
    needs_upcast,
)
from moe_plugin.kernels.groups import RowGroups

PAIRS = tl.constexpr(512)  # the numbers of 16 codes follow those of both codes of all 256 bytes
SHARED_BY_ALL = 1 << 30  # more inputs than any weight has


@triton.jit
def scales_at(scales, nested, dynamic, first_scale, apart, added, o, b, OUTER: tl.constexpr,
              BLOCKS: tl.constexpr, FORMAT: tl.constexpr):
    """Return the float32 scales of the outputs o in the blocks b of an expert, or 0 outside of the
    weight.
    """
    inside = ((o < OUTER) & (b < BLOCKS)) != 0
    row = o // 128 if FORMAT == "fp8" else o
    at = row * BLOCKS + b
    if FORMAT == "mxfp4":
        code = tl.load(scales + at, mask=inside, other=0).to(tl.int32)
        # a code of 0 stands for 2^-127, a subnormal number
        scale = tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)
        scale = tl.where(inside, scale, 0.0)
    elif FORMAT == "nf4_double":
        code = tl.load(scales + at, mask=inside, other=0).to(tl.int32)
        of_scale = tl.load(nested + (first_scale + row * apart + b) // 256, mask=inside, other=0.0)
        scale = tl.load(dynamic + code) * of_scale + tl.load(nested + added)
        scale = tl.where(inside, scale, 0.0)
    else:
        scale = tl.load(scales + at, mask=inside, other=0.0)
    return scale


@triton.jit
def decoded_tile(codes, scales, nested, numbers, dynamic, first_scale, apart, added, output,
                 input_, OUTER: tl.constexpr, INNER: tl.constexpr, FORMAT: tl.constexpr,
                 INPUTS: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr):
    """Return the float32 weights [BO, BI] of an expert from `output` and `input_` on."""
    o = output + tl.arange(0, BO)
    SIZE: tl.constexpr = INNER if FORMAT == "fp8" or FORMAT == "int8" else INNER // 2
    STEP: tl.constexpr = BI if FORMAT == "fp8" or FORMAT == "int8" else BI // 2
    j = (input_ if FORMAT == "fp8" or FORMAT == "int8" else input_ // 2) + tl.arange(0, STEP)
    byte = tl.load(codes + o[:, None] * SIZE + j[None, :],
                   mask=((o < OUTER)[:, None] & (j < SIZE)[None, :]) != 0, other=0)
    if FORMAT == "int8":
        value = byte.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == "fp8":
        value = tl.load(numbers + byte.to(tl.int32))
    else:
        low, high = byte & 15, byte >> 4
        if FORMAT == "mxfp4":
            code = tl.interleave(low, high)
        else:
            code = tl.interleave(high, low)
        value = tl.load(numbers + PAIRS + code.to(tl.int32))
    BLOCKS: tl.constexpr = (INNER + INPUTS - 1) // INPUTS
    if INPUTS >= BI:
        scale = scales_at(scales, nested, dynamic, first_scale, apart, added, o, input_ // INPUTS,
                          OUTER, BLOCKS, FORMAT)
        value *= scale[:, None]
    else:
        b = input_ // INPUTS + tl.arange(0, BI // INPUTS)
        scale = scales_at(scales, nested, dynamic, first_scale, apart, added, o[:, None],
                          b[None, :], OUTER, BLOCKS, FORMAT)
        value = tl.reshape(value, (BO, BI // INPUTS, INPUTS)) * scale[:, :, None]
        value = tl.reshape(value, (BO, BI))
    return value


@triton.jit
def frozen_tile(t, x, x_tiles, codes, scales, nested, numbers, dynamic, out, tile_group, tile_row,
                tiles, ends, stride_codes, stride_scales, stride_nested, first_scale, apart, added,
                OUTER: tl.constexpr, INNER: tl.constexpr, BACK: tl.constexpr, FORMAT: tl.constexpr,
                INPUTS: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):
    """Compute tile t of `frozen_product_kernel`."""
    K: tl.constexpr = OUTER if BACK else INNER
    wide: tl.constexpr = INNER if BACK else OUTER
    pm, pn = tile_at(t, tl.cdiv(wide, BN), tiles, 8)
    group, first, r, inside, at, live = rows_at(pm, x, tile_group, tile_row, ends, False, BM)
    column = pn * BN
    codes += group.to(tl.int64) * stride_codes
    scales += group.to(tl.int64) * stride_scales
    nested += group.to(tl.int64) * stride_nested
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        a = load_rows(x, x_tiles, first, at, live, start, K, BK)
        if BACK:
            b = decoded_tile(codes, scales, nested, numbers, dynamic, first_scale, apart, added,
                             start, column, OUTER, INNER, FORMAT, INPUTS, BK, BN)
        else:
            b = tl.trans(decoded_tile(codes, scales, nested, numbers, dynamic, first_scale, apart,
                                      added, column, start, OUTER, INNER, FORMAT, INPUTS, BN, BK))
        total = multiply(a, b.to(x.dtype.element_ty), total, UPCAST, "ieee")
    n = column + tl.arange(0, BN)
    where = tl.arange(0, BM)[:, None] * wide + n[None, :]
    tl.store(out + first.to(tl.int64) * wide + where, total.to(out.dtype.element_ty),
             mask=(inside[:, None] & (n < wide)[None, :]) != 0)


@triton.jit
def frozen_product_kernel(x, x_tiles, codes, scales, nested, numbers, dynamic, out, tile_group,
                          tile_row, used, ends, stride_codes, stride_scales, stride_nested,
                          first_scale, apart, added, OUTER: tl.constexpr, INNER: tl.constexpr,
                          BACK: tl.constexpr, FORMAT: tl.constexpr, INPUTS: tl.constexpr,
                          UPCAST: tl.constexpr, WHILE: tl.constexpr, BM: tl.constexpr,
                          BN: tl.constexpr, BK: tl.constexpr):
    """Compute `out = x @ w`, or `out = x @ w^T` if BACK is true, with frozen weights w."""
    tiles = tl.load(used)
    number = tiles * tl.cdiv(INNER if BACK else OUTER, BN)
    if WHILE:
        t = tl.program_id(0)
        while t < number:
            frozen_tile(t, x, x_tiles, codes, scales, nested, numbers, dynamic, out, tile_group,
                        tile_row, tiles, ends, stride_codes, stride_scales, stride_nested,
                        first_scale, apart, added, OUTER, INNER, BACK, FORMAT, INPUTS, UPCAST, BM,
                        BN, BK)
            t += tl.num_programs(0)
    else:
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0)):
            frozen_tile(t, x, x_tiles, codes, scales, nested, numbers, dynamic, out, tile_group,
                        tile_row, tiles, ends, stride_codes, stride_scales, stride_nested,
                        first_scale, apart, added, OUTER, INNER, BACK, FORMAT, INPUTS, UPCAST, BM,
                        BN, BK)


def frozen_tiling(chip: Chip, dtype: torch.dtype, rows_each: float) -> Tiling:
    """Return the tile size. Decoded values stay in registers, so tiles are smaller than those of
    `product_tiling`.
    """
    if dtype == torch.float32:
        return Tiling(64, 64, 32, 4, 2)
    if rows_each <= 96:
        return Tiling(64, 64, 64, 4, 3, 2)
    # more columns would spill on CDNA 3
    return Tiling(128, 64 if chip.kind == "amd" else 128, 64, 8, 3)


def expert_matmul_frozen(rows: Tensor, groups: RowGroups, weight: FrozenWeight,
                         back: bool) -> Tensor:
    """Multiply rows in Triton; see `moe_plugin.kernels.frozen_products.expert_matmul_frozen`."""
    _, inner, outer = weight.shape
    depth, wide = (outer, inner) if back else (inner, outer)
    # rows after the last group are not computed
    out = rows.new_zeros(rows.shape[0], wide)
    if not out.numel():
        return out
    rows, form = rows.contiguous(), FROZEN_FORMATS[weight.format]
    codes = weight.parts[0] if weight.parts[0][0].is_contiguous() else weight.parts[0].contiguous()
    scales, nested = _floats(weight.parts[1], form.scale_bytes == 4), codes
    if form.nested:
        nested = _floats(weight.parts[2], True)
    chip = chip_of(rows.device)
    t = frozen_tiling(chip, rows.dtype, groups.total / groups.number)
    x_tiles = None
    if copies_tiles(rows, chip.copies_tiles):
        x_tiles = row_tiles(rows, (t.rows, t.depth))
    table = groups.tiles(t.rows)
    work = table[0].numel() * triton.cdiv(wide, t.columns)
    frozen_product_kernel[(programs(chip, t, work, groups),)](
        rows, x_tiles, codes, scales, nested, *weight.tables(), out, *table, groups.ends_L,
        codes.stride(0), scales.stride(0), nested.stride(0), *weight.nested_index(), OUTER=outer,
        INNER=inner, BACK=back, FORMAT=weight.format, INPUTS=form.inputs or SHARED_BY_ALL,
        UPCAST=needs_upcast(rows.dtype), WHILE=INTERPRETED, BM=t.rows, BN=t.columns, BK=t.depth,
        num_warps=t.warps, num_stages=t.stages, **bounded_registers(FP8_REGISTERS, chip))
    return out


def _floats(part: Tensor, of_float32: bool) -> Tensor:
    """Return scales as float32 or bytes. They are copied only if the bytes of an expert are not
    contiguous, or if the float32 scales are not aligned.
    """
    starts = part.storage_offset(), part.stride(0)
    if not part[0].is_contiguous() or of_float32 and any(start % 4 for start in starts):
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(torch.float32) if of_float32 else part
