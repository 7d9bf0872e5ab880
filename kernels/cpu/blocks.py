"""Blocks of experts whose values share the CPU's cache.

Legend: R rows, expert after expert; N rows of one block; B experts of one unit, M rows of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from moe_plugin.kernels.cpu.products import RowRule


class Unit(NamedTuple):
    """Consecutive experts that are multiplied together.

    Attributes:
        first: the first expert.
        experts: B, their number.
        rows: M, rows of each in memory; of several experts all have as many as the one with the
            most (`padding.Padding` tells which rows are whose).
        computed: rows that are multiplied: all in memory and, of a single expert, where that
            takes less time, a few of those that follow (`RowRule.fast`). What it writes there
            the next unit overwrites, so that units are computed in order.
    """

    first: int
    experts: int
    rows: int
    computed: int

    @property
    def index(self) -> int | slice:
        """What it takes of a tensor [L, ...]."""
        return self.first if self.experts == 1 else slice(self.first, self.first + self.experts)


@dataclass
class UnitBlock:
    """Units that go through all operations together.

    Attributes:
        rows: the block's rows among all.
        size: N, rows of the block.
        reach: rows from the block's first to the last one that is computed, at least N.
        exact: no unit computes other rows than its own.
        single: every unit is one expert.
    """

    rows: slice
    units: list[Unit]

    def __post_init__(self) -> None:
        # at once: between two products nothing is in the caches
        self.single = self.exact = True
        self._sizes: list[int] = []
        self._starts: list[int] = []  # counted from the block's
        start = reach = 0
        for _, experts, rows, computed in self.units:
            size = experts * rows
            self._sizes.append(size)
            self._starts.append(start)
            reach = max(reach, start + computed)
            start += size
            if experts > 1:
                self.single = False
            if computed != size:
                self.exact = False
        self.size = self.rows.stop - self.rows.start
        self.reach = self.size if self.exact else reach

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """x, [N, W], by unit: [M, W], or [B, M, W] of several experts. All views at once: one by
        one they take as long as the operations of a small expert.
        """
        parts = (x,) if len(self.units) == 1 else x.split_with_sizes(self._sizes)
        return parts if self.single else tuple(
            part if unit.experts == 1 else part.view(unit.experts, unit.rows, -1)
            for unit, part in zip(self.units, parts, strict=True))

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """The transposed rows by unit: [W, M], or [B, W, M]."""
        if self.single and len(self.units) > 1:
            return x.t().split_with_sizes(self._sizes, 1)
        return tuple(part.transpose(-2, -1) for part in self.split(x))

    def cover(self, x: Tensor, first: int, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The computed rows of each unit, which overlap.

        Args:
            first: the block's first row in x, which has at least `reach` rows from there.
            own: of `split`.
        """
        return tuple([part if unit.computed == size else x.narrow(0, first + start, unit.computed)
                      for start, size, unit, part in zip(self._starts, self._sizes, self.units, own,
                                                         strict=True)])

    def clipped(self, end: int) -> UnitBlock:
        """The block, computing no row from `end` on."""
        left = end - self.rows.start
        return UnitBlock(self.rows, [
            unit._replace(computed=min(unit.computed, left - start))
            for start, unit in zip(self._starts, self.units, strict=True)])


def units_of(counts: list[int], limit: int, rule: RowRule) -> list[Unit]:
    """Experts with rows, those together that are faster so, of at most `limit` rows."""
    if not rule.narrow:
        return [Unit(expert, 1, rows, rows) for expert, rows in enumerate(counts) if rows]
    units: list[Unit] = []
    first = experts = most = own = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        if experts and expert == first + experts and rule.joins(experts, most, own, count) and (
                experts + 1) * rule.fast(max(most, count)) <= limit:
            experts, most, own = experts + 1, max(most, count), own + count
            continue
        if experts:
            units.append(_unit(first, experts, most, rule))
        first, experts, most, own = expert, 1, count, count
    if experts:
        units.append(_unit(first, experts, most, rule))
    return units


def _unit(first: int, experts: int, most: int, rule: RowRule) -> Unit:
    fast = rule.fast(most)
    return Unit(first, experts, most if experts == 1 else fast, experts * fast)


def blocks_of(counts: list[int], limit: int, rule: RowRule) -> list[UnitBlock]:
    """Experts in blocks of at most `limit` rows; an expert with more rows is a block of its own.

    counts: rows of each expert; experts without rows are left out.
    """
    blocks: list[UnitBlock] = []
    units: list[Unit] = []
    start = size = 0
    found = units_of(counts, limit, rule)
    if rule.narrow and 0 < sum([unit.experts for unit in found]) - len(found) < rule.least:
        found = [_unit(expert, 1, rows, rule) for expert, rows in enumerate(counts) if rows]
    for unit in found:
        unit_size = unit.experts * unit.rows
        if units and size + unit_size > limit:
            blocks.append(UnitBlock(slice(start, start + size), units))
            units, start, size = [], start + size, 0
        units.append(unit)
        size += unit_size
    if units:
        blocks.append(UnitBlock(slice(start, start + size), units))
    return blocks


def clipped(blocks: list[UnitBlock]) -> list[UnitBlock]:
    """The blocks, of which none computes more rows than there are: for rows in foreign memory."""
    return [block if block.exact else block.clipped(blocks[-1].rows.stop) for block in blocks]
