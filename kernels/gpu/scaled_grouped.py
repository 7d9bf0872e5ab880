"""The operations `expert_matmul_blocks` and `expert_weight_grad_blocks`, computed with torch's
`scaled_grouped_mm`, and `expert_matmul_blocks` for blocks of 128 values, computed by the Triton
matmul for fp8 operands.

The calls of torch use the interface of torch 2.10 to 2.13
(`aten/src/ATen/native/cuda/GroupedBlas.cpp`, `test/test_scaled_matmul_cuda.py`): operands are e4m3
or packed e2m1, scales are stored in cuBLAS's tiles of 128 x 4, and outputs are bfloat16. The code
in this module has never run on a GPU.

For the Triton matmul, the scales are powers of two, which are valid float32 scales. The codes can
therefore be passed to `kernels.fp8` unchanged. This implementation supports rows and weights in
e4m3, but not gradients in e5m2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels import block_products
from moe_plugin.kernels.block_formats import Blocks, power
from moe_plugin.kernels.fp8 import BLOCK, expert_matmul_fp8
from moe_plugin.kernels.groups import RowGroups


def fp8_why_not(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks, b_LO: Tensor | None,
            token_R: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return the reason why these arguments are not supported, or None if they are supported."""
    if {x_blocks.block, w_blocks.block} != {BLOCK}:
        return f"blocks of {x_blocks.block}, but only {BLOCK} are supported"
    if {x_blocks.codes.dtype, w_blocks.codes.dtype} != {torch.float8_e4m3fn}:
        return "e5m2 codes, but only e4m3 is supported"
    return expert_matmul_fp8.why_not("triton", x_blocks.codes, groups, w_blocks.codes, b_LO,
                                     token_R, x_blocks.scales.new_empty(0, dtype=dtype))


@block_products.expert_matmul_blocks.add("fp8", fp8_why_not, on_cpu=False)
def expert_matmul_fp8_blocks(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks,
                         b_LO: Tensor | None, token_R: Tensor | None,
                         dtype: torch.dtype) -> Tensor:
    """Compute `rows @ w + b` in Triton; see `kernels.block_products.expert_matmul_blocks`."""
    scales_LOB = power(w_blocks.scales)  # 128 consecutive outputs share a scale
    return expert_matmul_fp8(
        _codes(x_blocks), power(x_blocks.scales), groups, _codes(w_blocks).transpose(1, 2),
        scales_LOB[:, ::BLOCK].transpose(1, 2).contiguous(), b_LO, token_R, dtype)


def _codes(blocks: Blocks) -> Tensor:
    """Remove the padding of the last block from the codes."""
    codes = blocks.codes.view(torch.uint8)[..., :blocks.width]  # torch lacks most fp8 operations
    return codes.contiguous().view(blocks.codes.dtype)


STEP = 32  # all widths must be multiples: 16 bytes of e2m1
TILE_ROWS, TILE_COLUMNS = 128, 4


@functools.cache
def no_scaled_grouped_mm(device: torch.device) -> str | None:
    """Return the reason why torch lacks a block-scaled grouped matmul for this GPU, or None."""
    if device.type != "cuda":
        return "not on a GPU"
    if torch.version.hip is not None:
        return "torch supports block scales only on NVIDIA GPUs"
    if not hasattr(F, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm; torch 2.10 is needed"
    major, minor = torch.cuda.get_device_capability(device)
    # The same condition as in torch's own tests. The call checks only the major number.
    if (major, minor) != (10, 0):
        return (f"a GPU of compute capability {major}.{minor} has no block scales, which need "
                "10.0")
    if not any(name in torch.__config__.show() for name in ("USE_MSLK", "USE_FBGEMM_GENAI")):
        return "torch was built with neither USE_MSLK nor USE_FBGEMM_GENAI"
    return None


def matmul_why_not(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks, b_LO: Tensor | None,
                   token_R: Tensor | None, dtype: torch.dtype) -> str | None:
    """Return the reason why torch's matmul cannot compute `expert_matmul_blocks`, or None."""
    return no_scaled_grouped_mm(x_blocks.device) or _not_so(
        dtype, (x_blocks, w_blocks), w_blocks.width, w_blocks.codes.shape[1])


def weight_grad_why_not(x_blocks: Blocks, grad_blocks: Blocks, groups: RowGroups,
                        dtype: torch.dtype) -> str | None:
    """Return the reason why torch's matmul cannot compute `expert_weight_grad_blocks`, or None."""
    return no_scaled_grouped_mm(x_blocks.device) or _not_so(
        dtype, (x_blocks, grad_blocks), x_blocks.codes.shape[0], grad_blocks.codes.shape[0])


def _not_so(dtype: torch.dtype, operands: tuple[Blocks, Blocks], *widths: int) -> str | None:
    if any(blocks.block > 32 for blocks in operands):
        return "blocks of 128, but only 32 and 16 are supported"
    if any(blocks.codes.dtype == torch.float8_e5m2 for blocks in operands):
        return "e5m2 codes, but only e4m3 is used here"
    if dtype != torch.bfloat16:
        return f"dtype {dtype}, but results are bfloat16"
    return None if all(w % STEP == 0 for w in widths) else (
        f"widths {widths}, which are not multiples of {STEP}")


@block_products.expert_matmul_blocks.add("scaled_grouped_mm", matmul_why_not, on_cpu=False)
def expert_matmul_blocks(x_blocks: Blocks, groups: RowGroups, w_blocks: Blocks,
                         b_LO: Tensor | None, token_R: Tensor | None,
                         dtype: torch.dtype) -> Tensor:
    """Compute the matmul with torch; see `kernels.block_products.expert_matmul_blocks`."""
    rows = x_blocks if token_R is None else x_blocks.rows(token_R)
    outer = w_blocks.codes.shape[1]
    if not groups.total:
        return torch.empty(0, outer, dtype=dtype, device=rows.device)
    scales_LN = _tiles(_to_tiles(w_blocks.scales)).flatten(1)
    out_RO = _call(rows, w_blocks, _tiled_rows(rows.scales, groups), scales_LN, groups)
    return out_RO if b_LO is None else out_RO + b_LO.index_select(0, groups.group_R)


@block_products.expert_weight_grad_blocks.add("scaled_grouped_mm", weight_grad_why_not,
                                              on_cpu=False)
def expert_weight_grad_blocks(x_blocks: Blocks, grad_blocks: Blocks, groups: RowGroups,
                              dtype: torch.dtype) -> Tensor:
    """Compute the matmul with torch; see `kernels.block_products.expert_weight_grad_blocks`."""
    x_scales, grad_scales = (_tiled_columns(blocks.scales, blocks.block, groups)
                             for blocks in (x_blocks, grad_blocks))
    return _call(x_blocks, grad_blocks, x_scales, grad_scales, groups)


def _call(a: Blocks, b: Blocks, a_scales: Tensor, b_scales: Tensor, groups: RowGroups) -> Tensor:
    functional: Any = F  # some names exist only in new versions of torch
    kinds = functional.ScalingType
    recipe: Any = kinds.BlockWise1x32
    codes, scales = [a.codes, b.codes], [[a_scales], [b_scales]]
    if a.tensor is None:
        scales = [[each.view(torch.float8_e8m0fnu)] for each in (a_scales, b_scales)]
    else:
        recipe = [kinds.BlockWise1x16, kinds.TensorWise]
        codes = [each.view(torch.float4_e2m1fn_x2) for each in codes]
        # The product needs a tensor scale for each group; all groups share the same value.
        for found, each in zip(scales, (a, b), strict=True):
            found.append(each.tensor.expand(groups.number).contiguous())
    return functional.scaled_grouped_mm(
        codes[0], codes[1].transpose(-2, -1), scales[0], recipe, scales[1], recipe,
        swizzle_a=functional.SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=functional.SwizzleType.SWIZZLE_32_4_4,
        offs=groups.ends_L, output_dtype=torch.bfloat16)


def _to_tiles(scales: Tensor) -> Tensor:
    """Pad scales [..., M, B] with zeros to a whole number of tiles."""
    rows, columns = scales.shape[-2:]
    filled = F.pad(scales.view(torch.uint8),
                   (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS))
    return filled.view(scales.dtype)


def _tiles(scales: Tensor) -> Tensor:
    """Divide padded scales into tiles, and return the tiles as a tensor [..., M / 128, B / 4, 512].

    Inside a tile, the scale (r, c) is at position `16 (r % 32) + 4 (r // 32) + c` (cuBLAS, 1D block
    scaling factors layout).
    """
    high, wide = scales.shape[-2] // TILE_ROWS, scales.shape[-1] // TILE_COLUMNS
    split = scales.view(torch.uint8).unflatten(-1, (wide, TILE_COLUMNS)).unflatten(
        -3, (high, TILE_ROWS // 32, 32))
    lead = list(range(split.dim() - 5))
    n = len(lead)
    return split.permute(*lead, n, n + 3, n + 2, n + 1, n + 4).flatten(-3).view(scales.dtype)


def _tiled_rows(scales_RB: Tensor, groups: RowGroups) -> Tensor:
    """Return the scales [R', B'] in tiles. Each group of rows starts at a tile boundary."""
    rows, lengths_L = scales_RB.shape[0], groups.lengths_L
    tiled_L = torch.div(lengths_L + (TILE_ROWS - 1), TILE_ROWS, rounding_mode="floor") * TILE_ROWS
    shift_L = (tiled_L.cumsum(0) - tiled_L) - (lengths_L.cumsum(0) - lengths_L)
    at_R = torch.arange(rows, device=scales_RB.device) + shift_L[groups.group_R]
    # An upper bound, because the host does not know the lengths.
    height = (-(-rows // TILE_ROWS) + groups.number) * TILE_ROWS
    wide = _to_tiles(scales_RB)[:rows].view(torch.uint8)
    placed = wide.new_zeros(height, wide.shape[1]).index_copy_(0, at_R, wide)
    return _tiles(placed).view(placed.shape).view(scales_RB.dtype)


def _tiled_columns(scales_MB: Tensor, block: int, groups: RowGroups) -> Tensor:
    """Return the scales [M', B'] in tiles. Each group of columns starts at a tile boundary."""
    columns, device = scales_MB.shape[1], scales_MB.device
    # Columns after the last group are treated as an additional group.
    blocks_G = _with_rest(torch.div(groups.lengths_L, block, rounding_mode="floor"), columns)
    tiles = -(-columns // TILE_COLUMNS) + groups.number
    tiles_G = _with_rest(torch.div(blocks_G[:-1] + (TILE_COLUMNS - 1), TILE_COLUMNS,
                                   rounding_mode="floor"), tiles)
    first_G = tiles_G.cumsum(0) - tiles_G
    group_B = torch.repeat_interleave(blocks_G, output_size=columns)
    shift_G = first_G * TILE_COLUMNS - (blocks_G.cumsum(0) - blocks_G)
    at_B = torch.arange(columns, device=device) + shift_G[group_B]
    tall = _to_tiles(scales_MB)[:, :columns].view(torch.uint8)
    placed = tall.new_zeros(tall.shape[0], tiles * TILE_COLUMNS).index_copy_(1, at_B, tall)
    tiled = _tiles(placed)  # [H, tiles, 512]; below, the tiles of a group become neighbours
    group_T = torch.repeat_interleave(tiles_G, output_size=tiles)
    inside_T = torch.arange(tiles, device=device) - first_G[group_T]
    at_HT = first_G[group_T] * tiled.shape[0] + inside_T + (
        torch.arange(tiled.shape[0], device=device)[:, None] * tiles_G[group_T])
    ordered = torch.empty_like(tiled).view(-1, tiled.shape[2]).index_copy_(
        0, at_HT.flatten(), tiled.flatten(0, 1))
    return ordered.view(placed.shape).view(scales_MB.dtype)


def _with_rest(number_L: Tensor, total: int) -> Tensor:
    return torch.cat([number_L, total - number_L.sum(0, keepdim=True)])
