"""A stand-in for `torch.nn.functional.scaled_grouped_mm` on a CPU, block scales alone.

The signature and the checks are those of torch 2.13 (`aten/src/ATen/native/cuda/GroupedBlas.cpp`),
where a group's scales lie as its kernels read them; slow, in float64, rounded to bfloat16 at last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TABLE = torch.tensor(E2M1 + [-v for v in E2M1], dtype=torch.float64)


def scaled_grouped_mm(mat_a: Tensor, mat_b: Tensor, scale_a: Any, scale_recipe_a: Any, scale_b: Any,
                      scale_recipe_b: Any, swizzle_a: Any = None, swizzle_b: Any = None,
                      bias: Tensor | None = None, offs: Tensor | None = None,
                      output_dtype: torch.dtype | None = torch.bfloat16,
                      contraction_dim: Sequence[int] = (), use_fast_accum: bool = False) -> Tensor:
    """a [M, K] b [G, K, N], groups of rows; or a [M, K] b [K, N], groups along K: [G, M, N]."""
    assert bias is None and not contraction_dim and output_dtype == torch.bfloat16
    assert swizzle_a == swizzle_b == SwizzleType.SWIZZLE_32_4_4
    assert mat_a.dtype == mat_b.dtype and mat_a.dim() == 2 and mat_b.dim() in (2, 3)
    assert offs is not None and offs.dtype == torch.int32 and offs.dim() == 1
    fp4 = mat_a.dtype == torch.float4_e2m1fn_x2
    for recipe in (scale_recipe_a, scale_recipe_b):
        assert recipe == ([ScalingType.BlockWise1x16, ScalingType.TensorWise] if fp4 else
                          ScalingType.BlockWise1x32)
    for mat, transposed in ((mat_a, False), (mat_b, True)):
        inner, outer = (mat.stride()[-2:] if transposed else mat.stride()[-2:][::-1])
        assert inner == 1 and outer % 16 == 0, f"strides {mat.stride()}"
        assert mat.shape[-1] % 16 == 0 and (not transposed or mat.shape[-2] % 16 == 0)
    groups, block = offs.numel(), 16 if fp4 else 32
    (a_scales, *a_global), (b_scales, *b_global) = scale_a, scale_b
    for scales, tensor in ((a_scales, a_global), (b_scales, b_global)):
        assert scales.dtype == (torch.float8_e4m3fn if fp4 else torch.float8_e8m0fnu)
        assert [(t.dtype, tuple(t.shape)) for t in tensor] == [(torch.float32, (groups,))] * fp4
        assert scales.is_contiguous()
    a_MK, b_NK = _values(mat_a), _values(mat_b.transpose(-2, -1))
    both = torch.ones(groups, dtype=torch.float64)
    if fp4:
        both = (a_global[0] * b_global[0]).double()
    assert a_scales.dim() == 2 and a_scales.shape[0] >= mat_a.shape[0]
    made = _row_groups if mat_b.dim() == 3 else _sum_groups
    return made(a_MK, b_NK, a_scales, b_scales, both, offs.tolist(), block).to(torch.bfloat16)


def _row_groups(a_MK: Tensor, b_GNK: Tensor, a_scales: Tensor, b_scales: Tensor, both_G: Tensor,
                ends: list[int], block: int) -> Tensor:
    (groups, wide, inner), start, used = b_GNK.shape, 0, 0
    columns = _up(inner // block, 4)
    assert tuple(b_scales.shape) == (groups, columns * _up(wide, 128))
    out = torch.full((a_MK.shape[0], wide), torch.nan, dtype=torch.float64)
    for g, end in enumerate(ends):
        rows = a_MK[start:end] * _grown(a_scales.flatten()[used:], end - start, inner, block)
        weights = b_GNK[g] * _grown(b_scales[g], wide, inner, block)
        out[start:end] = rows @ weights.T * both_G[g]
        used, start = used + _up(end - start, 128) * columns, end
    assert used <= a_scales.numel()
    return out


def _sum_groups(a_MK: Tensor, b_NK: Tensor, a_scales: Tensor, b_scales: Tensor, both_G: Tensor,
                ends: list[int], block: int) -> Tensor:
    start, used = 0, 0  # tiles' columns
    out = torch.full((len(ends), a_MK.shape[0], b_NK.shape[0]), torch.nan, dtype=torch.float64)
    assert b_scales.dim() == 2 and b_scales.shape[0] >= b_NK.shape[0]
    for g, end in enumerate(ends):
        size = end - start
        assert size % 16 == 0
        if size:  # the kernels write nothing for a group without values
            left, right = (
                each[:, start:end] * _grown(
                    scales.flatten()[_up(each.shape[0], 128) * used:], each.shape[0], size, block)
                for each, scales in ((a_MK, a_scales), (b_NK, b_scales)))
            out[g] = left @ right.T * both_G[g]
        used, start = used + _up(size // block, 4), end
    assert used * _up(a_MK.shape[0], 128) <= a_scales.numel()
    return out


def _values(mat: Tensor) -> Tensor:
    if mat.dtype != torch.float4_e2m1fn_x2:
        return mat.double()
    codes = mat.view(torch.uint8)
    return TABLE[torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()]


def _grown(flat: Tensor, rows: int, inner: int, block: int) -> Tensor:
    """Scales of each value, [rows, inner], from tiles of 128 x 4 (cuBLAS's documentation)."""
    wide = _up(inner // block, 4) // 4
    r, c = torch.arange(rows)[:, None], torch.arange(inner)[None] // block
    tile = (r // 128) * wide + c // 4
    return flat.double()[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
