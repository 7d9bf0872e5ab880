"""The rule that chooses tiles, and how weight gradients are cut where one expert is hot."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch

from moe_plugin.kernels.gpu import tilings
from moe_plugin.kernels.gpu.tilings import (
    LEAST_PART,
    Chip,
    product_tiling,
    rows_of_a_part,
    weight_tiling,
)

pytestmark = pytest.mark.fast

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
