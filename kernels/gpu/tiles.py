"""tile_table in Triton: one launch, whatever the loads are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.groups import most_tiles

ELEMENTS = 4096  # comparisons of a program; their tile is in registers


@triton.jit
def tile_kernel(lengths, group_out, row_out, used_out, groups, number, height, least,
                BT: tl.constexpr, BL: tl.constexpr):
    """See tile_table. Every program counts the tiles of all groups, then finds BT tiles."""
    l = tl.arange(0, BL)
    length = tl.load(lengths + l, mask=l < groups, other=0).to(tl.int32)
    tiles = tl.where(l < groups, tl.maximum((length + height - 1) // height, least), 0)
    last = tl.cumsum(tiles, 0)
    base = tl.cumsum(length, 0) - length - (last - tiles) * height
    tile = tl.program_id(0) * BT + tl.arange(0, BT)
    before = ((last[None, :] <= tile[:, None]) & (l < groups)[None, :]) != 0
    group = tl.sum(before.to(tl.int32), 1)
    row = tl.sum(tl.where(group[:, None] == l[None, :], base[None, :], 0), 1) + tile * height
    used = group < groups
    tl.store(used_out, tl.sum(tiles, 0), mask=tl.program_id(0) == 0)
    tl.store(group_out + tile, tl.where(used, group, -1), mask=tile < number)
    tl.store(row_out + tile, tl.where(used, row, 0), mask=tile < number)


def tile_table(lengths_L: Tensor, height: int, total: int,
               least: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `moe_plugin.kernels.groups.tile_table`."""
    groups = lengths_L.numel()
    number = most_tiles(groups, height, total)
    table = torch.empty(2 * number + 1, dtype=torch.int32, device=lengths_L.device)
    group_M, row_M, used_1 = table.split([number, number, 1])
    if not number:
        return group_M, row_M, used_1.zero_()
    columns = triton.next_power_of_2(groups)
    step = max(1, min(128, ELEMENTS // columns))
    tile_kernel[(triton.cdiv(number, step),)](lengths_L.contiguous(), group_M, row_M, used_1,
                                              groups, number, height, least, step, columns)
    return group_M, row_M, used_1
