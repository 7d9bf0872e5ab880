"""The table of tiles is made from the lengths on the device: the host reads nothing back, and every
row is in one tile.
"""

from __future__ import annotations

import pytest
import torch

from moe_plugin.kernels import RowGroups, kernels
from moe_plugin.kernels.groups import most_tiles, tile_table
from moe_plugin.records import RowCounts

pytestmark = pytest.mark.fast

COUNTS = ([5, 0, 130, 1, 0], [0, 0], [128, 128], [7], [], [3] * 70)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("least", [0, 1])
def test_every_row_is_in_one_tile_of_its_group(counts: list[int], least: int) -> None:
    lengths, height = torch.tensor(counts, dtype=torch.int64), 64
    group_M, row_M, used = tile_table(lengths, height, sum(counts) + 9, least)
    assert len(group_M) == most_tiles(len(counts), height, sum(counts) + 9)
    wanted, start = [], 0
    for group, count in enumerate(counts):
        heads = list(range(start, start + count, height)) or [start] * least
        wanted += [(group, row) for row in heads]
        start += count
    assert used.tolist() == [len(wanted)]
    wanted += [(-1, 0)] * (len(group_M) - len(wanted))
    assert list(zip(group_M.tolist(), row_M.tolist(), strict=True)) == wanted


def test_made_once_and_without_reading_the_lengths() -> None:
    """On the meta device a read would be an error."""
    groups = RowGroups(RowCounts([5, 0, 300]), torch.device("meta"))
    group_M, row_M, _ = groups.tiles(128)
    assert group_M.shape == row_M.shape == (2 + 3,) and group_M.is_meta
    assert groups.tiles(128)[0] is group_M and groups.tiles(64)[0] is not group_M
    assert kernels.get("tile_table").choose(groups.lengths_L, 128, 305, 0) == "torch"
