"""The flat list of tiles that a grouped matmul works through, made on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.registry import op


@op
def tile_table(lengths_L: Tensor, height: int, total: int,
               least: int) -> tuple[Tensor, Tensor, Tensor]:
    """(group, first row, used): of each tile, int32 [M] each, and the number of tiles, int32 [1].

    No tile spans two groups.

    Args:
        lengths_L: int64 [L], rows of each group, which lie one after the other.
        height: rows of a tile.
        total: rows of all groups, or a bound.
        least: tiles that a group without rows has, 0 or 1. M = total // height + L, which no
            lengths exceed; what is unused, at the end, has group -1 and row 0. The host does
            not wait for the device.
    """
    groups, device = lengths_L.numel(), lengths_L.device
    if groups == 0:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    tiles_L = torch.div(lengths_L + (height - 1), height, rounding_mode="floor").clamp_(min=least)
    last_L, end_L = tiles_L.cumsum(0), lengths_L.cumsum(0)
    tile_M = torch.arange(most_tiles(groups, height, total), device=device)
    group_M = torch.searchsorted(last_L, tile_M, right=True)
    used_M, at_M = group_M < groups, group_M.clamp(max=groups - 1)
    row_M = (end_L - lengths_L - (last_L - tiles_L) * height)[at_M] + tile_M * height
    return (torch.where(used_M, group_M, -1).to(torch.int32),
            torch.where(used_M, row_M, 0).to(torch.int32), last_L[-1:].to(torch.int32))


def most_tiles(groups: int, height: int, total: int) -> int:
    """M of `tile_table`: the most tiles of `height` rows that `total` rows in `groups` can make."""
    return total // height + groups if groups else 0
