"""Blocks of experts whose values share the CPU's cache.

Legend: R rows, expert after expert; N rows of one block; B experts of one unit, M rows of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

from torch import Tensor

from moe_plugin.kernels.cpu.products import RowRule


class Unit(NamedTuple):
    """Consecutive experts that are multiplied together.

    first: the first expert. experts: B, their number. rows: M, rows of each in memory; of several
    experts all have as many as the one with the most (`padding.Padding` tells which rows are
    whose). computed: rows that are multiplied: all in memory and, of a single expert, where that
    takes less time, a few of those that follow (`RowRule.fast`). What it writes there the next unit
    overwrites, so that units are computed in order.
    """

    first: int
    experts: int
    rows: int
    computed: int

    @property
    def size(self) -> int:
        """Rows in memory."""
        return self.experts * self.rows

    @property
    def index(self) -> int | slice:
        """What it takes of a tensor [L, ...]."""
        return self.first if self.experts == 1 else slice(self.first, self.first + self.experts)


@dataclass
class Block:
    """Units that go through all operations together.

    Attributes:
        rows: the block's rows among all.
        size: N, rows of the block.
        reach: rows from the block's first to the last one that is computed, at least N.
        exact: no unit computes other rows than its own.
    """

    rows: slice
    units: list[Unit]

    def __post_init__(self) -> None:
        # at once: between two products nothing is in the caches
        units = self.units
        self.size = self.reach = self.rows.stop - self.rows.start
        self._sizes = [unit.experts * unit.rows for unit in units]
        self._starts = list(accumulate(self._sizes[:-1], initial=0))  # counted from the block's
        self._single = len(units) == sum([unit.experts for unit in units])
        computed = [unit.computed for unit in units]
        self.exact = computed == self._sizes
        if not self.exact:
            self.reach = max(map(add, self._starts, computed))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """x, [N, W], by unit: [M, W], or [B, M, W] of several experts. All views at once: one by
        one they take as long as the operations of a small expert.
        """
        return self._by_unit(x, 0)

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """The transposed rows by unit: [W, M], or [B, W, M]."""
        parts = self._by_unit(x.t(), 1)
        return parts if self._single else tuple(
            part.transpose(-2, -1) if unit.experts > 1 else part
            for unit, part in zip(self.units, parts, strict=True))

    def _by_unit(self, x: Tensor, axis: int) -> tuple[Tensor, ...]:
        parts = (x,) if len(self.units) == 1 else x.split_with_sizes(self._sizes, axis)
        if self._single:
            return parts
        return tuple(part if unit.experts == 1 else (part if axis == 0 else part.t()).view(
            unit.experts, unit.rows, -1) for unit, part in zip(self.units, parts, strict=True))

    def cover(self, x: Tensor, first: int, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The computed rows of each unit, which overlap; first: the block's first row in x, which
        has at least `reach` rows from there. own: of `split`.
        """
        return tuple([part if unit.computed == size else x.narrow(0, first + start, unit.computed)
                      for start, size, unit, part in zip(self._starts, self._sizes, self.units, own,
                                                         strict=True)])

    def clipped(self, end: int) -> Block:
        """The block, computing no row from `end` on."""
        left = end - self.rows.start
        return Block(self.rows, [
            unit._replace(computed=min(unit.computed, left - start))
            for start, unit in zip(self._starts, self.units, strict=True)])


def units_of(counts: list[int], limit: int, rule: RowRule) -> Iterator[Unit]:
    """Experts with rows, those together that are faster so, of at most `limit` rows."""
    first = experts = most = own = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        if experts and expert == first + experts and rule.joins(experts, most, own, count) and (
                experts + 1) * rule.fast(max(most, count)) <= limit:
            experts, most, own = experts + 1, max(most, count), own + count
            continue
        if experts:
            yield _unit(first, experts, most, rule)
        first, experts, most, own = expert, 1, count, count
    if experts:
        yield _unit(first, experts, most, rule)


def _unit(first: int, experts: int, most: int, rule: RowRule) -> Unit:
    fast = rule.fast(most)
    return Unit(first, experts, most if experts == 1 else fast, experts * fast)


def blocks_of(counts: list[int], limit: int, rule: RowRule) -> list[Block]:
    """Experts in blocks of at most `limit` rows; an expert with more rows is a block of its own.

    counts: rows of each expert; experts without rows are left out.
    """
    blocks: list[Block] = []
    units: list[Unit] = []
    start = size = 0
    found = list(units_of(counts, limit, rule))
    if 0 < sum([unit.experts for unit in found]) - len(found) < rule.least:
        found = [_unit(expert, 1, rows, rule) for expert, rows in enumerate(counts) if rows]
    for unit in found:
        if units and size + unit.size > limit:
            blocks.append(Block(slice(start, start + size), units))
            units, start, size = [], start + size, 0
        units.append(unit)
        size += unit.size
    if units:
        blocks.append(Block(slice(start, start + size), units))
    return blocks


def clipped(blocks: list[Block]) -> list[Block]:
    """The blocks, of which none computes more rows than there are: for rows in foreign memory."""
    return [block if block.exact else block.clipped(blocks[-1].rows.stop) for block in blocks]
