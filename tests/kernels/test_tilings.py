"""Tiles: the rule that chooses them, and the table that is made from the lengths on the device."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch

from moe_plugin.kernels import RowGroups, kernels
from moe_plugin.kernels.gpu import tilings
from moe_plugin.kernels.gpu.tilings import (
    LEAST_PART,
    Chip,
    product_tiling,
    rows_of_a_part,
    weight_tiling,
)
from moe_plugin.kernels.groups import most_tiles, tile_table
from moe_plugin.records import RowCounts

pytestmark = pytest.mark.fast


# The rule that chooses tiles, and how weight gradients are cut where one expert is hot.


HOPPER = Chip("hopper", 132)
CHIPS = (HOPPER, Chip("blackwell", 148), Chip("ampere", 108), Chip("amd", 304))
BF16 = torch.bfloat16


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.kind)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_tiles_follow_the_rows_of_an_expert(chip: Chip, dtype: torch.dtype) -> None:
    for results in (1, 2):
        few, many = (product_tiling(chip, dtype, rows, results) for rows in (8, 8192))
        assert (few.rows, many.rows) == (64, 128)
        assert all(t.columns <= 256 and t.rows * t.columns * results <= 128 * 256
                   for t in (few, many))
    assert product_tiling(HOPPER, BF16, 8192, 1).columns == 256


def part(tiles: int, rows: int) -> int | None:
    """Rows of a part on an H200."""
    return rows_of_a_part(HOPPER, weight_tiling(HOPPER, BF16, True), tiles, rows)


def test_a_hot_expert_occupies_the_gpu() -> None:
    """However small its matrix: parts times tiles are about two for each program."""
    for tiles in (1, 8, 64, 132):
        rows = 1 << 19
        height = part(tiles, rows)
        work = -(-rows // height) * tiles
        assert 132 <= work <= 2 * 132 + tiles, (tiles, height)
    assert part(512, 1 << 19) is None  # its tiles alone are more than two for each program
    assert part(8, LEAST_PART) is None


def test_no_two_parts_share_a_slot_and_their_memory_is_bounded() -> None:
    """The numbering of `weight_kernel`: 2 * (first row // height), plus 1 for a group's last."""
    draw = random.Random(0)
    for _ in range(300):
        height = draw.choice((16, 48, 64))
        lengths = [draw.choice((0, 1, height, height + 1, draw.randrange(9 * height)))
                   for _ in range(draw.randrange(1, 9))]
        slots, start = [], 0
        for length in lengths:
            if length > height:
                heads = range(start, start + length, height)
                slots += [2 * (row // height) + (row + height >= start + length) for row in heads]
            start += length
        assert len(set(slots)) == len(slots)
        assert all(slot < 2 * (sum(lengths) // height + 1) for slot in slots)


def test_no_function_of_the_kernels_calls_itself() -> None:
    """Before Triton 3.3 its compiler never ends on one."""
    seen = 0
    for path in Path(tilings.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and any(
                    ast.unparse(each) == "triton.jit" for each in function.decorator_list):
                seen += 1
                called = [ast.unparse(each.func) for each in ast.walk(function)
                          if isinstance(each, ast.Call)]
                assert function.name not in called, f"{path.name}: {function.name}"
    assert seen > 20


# The table of tiles is made from the lengths on the device: the host reads nothing back, and
# every row is in one tile.


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
