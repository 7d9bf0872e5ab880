"""Blocks of experts that share the CPU's cache, views of their rows, and padding.

The views of all rows are made before the first matmul. A matmul evicts Python's data from the
caches, so a line of Python between two matmuls takes several times as long as in a separate loop.
Also, the views of all rows need only one call.

Experts that are multiplied together are padded to the number of rows of the longest expert. The
padding consists of copies of the expert's last row, with a gradient of zero. The copies add nothing
to the weight gradients, and a NaN of one expert reaches no other expert.

Notation: R rows, expert after expert; P the same rows with padding; N rows of one block; B experts
of one unit, M rows of each; C rows that the unit's products compute, M or a few more
(`Unit.computed`); W width; T tokens, K choices. Experts that are multiplied together share a view
with a leading axis of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.products import RowRule
from moe_plugin.kernels.rows import bags, sum_bags


class Unit(NamedTuple):
    """Consecutive experts that are multiplied together.

    Attributes:
        first: the first expert.
        experts: number B of experts.
        rows: number M of rows of each expert in memory. Several experts are padded to the number of
            rows of the longest expert (see `Padding`).
        computed: number of rows that are multiplied. These are all rows in memory and, for a single
            expert, a few following rows if this takes less time (`RowRule.fast`). The next unit
            overwrites the additional results, so units must be computed in order.
    """

    first: int
    experts: int
    rows: int
    computed: int

    @property
    def index(self) -> int | slice:
        """The unit's index into a tensor [L, ...]."""
        return self.first if self.experts == 1 else slice(self.first, self.first + self.experts)


@dataclass
class UnitBlock:
    """Units that pass through all operations together.

    Attributes:
        rows: the block's rows among all rows.
        size: number N of rows in the block.
        reach: number of rows from the block's first to the last computed row, at least N.
        exact: whether no unit computes rows other than its own.
        single: whether every unit is one expert.
    """

    rows: slice
    units: list[Unit]

    def __post_init__(self) -> None:
        # Computed once here, because between two products Python code would miss the caches.
        self.single = self.exact = True
        self._sizes: list[int] = []
        self._starts: list[int] = []  # relative to the block's first row
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
        """Split x [N, W] by unit into [M, W], or [B, M, W] for several experts.

        All views are made at once, because single views would take as long as the operations of a
        small expert.
        """
        parts = (x,) if len(self.units) == 1 else x.split_with_sizes(self._sizes)
        return parts if self.single else tuple(
            part if unit.experts == 1 else part.view(unit.experts, unit.rows, -1)
            for unit, part in zip(self.units, parts, strict=True))

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the transposed rows by unit: [W, M], or [B, W, M]."""
        if self.single and len(self.units) > 1:
            return x.t().split_with_sizes(self._sizes, 1)
        return tuple(part.transpose(-2, -1) for part in self.split(x))

    def cover(self, x: Tensor, first: int, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the computed rows of each unit, which overlap.

        Args:
            x: rows of one or all blocks.
            first: the block's first row in x, which has at least `reach` rows from there.
            own: result of `split`.
        """
        return tuple([part if unit.computed == size else x.narrow(0, first + start, unit.computed)
                      for start, size, unit, part in zip(self._starts, self._sizes, self.units, own,
                                                         strict=True)])

    def clipped(self, end: int) -> UnitBlock:
        """Return the block without computed rows from `end` on."""
        left = end - self.rows.start
        return UnitBlock(self.rows, [
            unit._replace(computed=min(unit.computed, left - start))
            for start, unit in zip(self._starts, self.units, strict=True)])


def units_of(counts: list[int], limit: int, rule: RowRule) -> list[Unit]:
    """Return units of experts with rows, joining experts if that is faster, up to `limit` rows."""
    # Joining saves time only for 16-bit products, see `RowRule`.
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
    """Return experts in blocks of at most `limit` rows. An expert with more rows is a separate
    block.

    counts: rows of each expert. Experts without rows are skipped.
    """
    blocks: list[UnitBlock] = []
    units: list[Unit] = []
    start = size = 0
    all_units = units_of(counts, limit, rule)
    if rule.narrow and 0 < sum([unit.experts for unit in all_units]) - len(all_units) < rule.least:
        all_units = [_unit(expert, 1, rows, rule) for expert, rows in enumerate(counts) if rows]
    for unit in all_units:
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
    """Return the blocks without computed rows past the last row.

    This is needed if the rows lie in memory that this package does not own.
    """
    return [block if block.exact else block.clipped(blocks[-1].rows.stop) for block in blocks]


@dataclass(frozen=True)
class Padding:
    """The mapping between rows with and without padding.

    Attributes:
        row_P: int64 [P], the row that each padded row contains.
        real_P: bool [P], False for a copy.
        padded_R: int64 [R + 1], the position of each row with padding. The last element is -1, so
            that index -1 maps to -1.
    """

    row_P: Tensor
    real_P: Tensor
    padded_R: Tensor

    def positions(self, position: Tensor) -> Tensor:
        """Return the positions with padding of rows (int64, any shape; -1 for no row)."""
        return self.padded_R[position]


def padding_of(counts: list[int], blocks: list[UnitBlock]) -> Padding:
    """Return the padding of blocks with several experts in some units. counts: rows of each expert.
    """
    units = [unit for block in blocks for unit in block.units]
    own = [rows for rows in counts if rows]
    padded = [unit.rows for unit in units for _ in range(unit.experts)]
    own_L, padded_L = torch.tensor([own, padded], device="cpu")  # whatever the default device
    first_L, start_L = own_L.cumsum(0) - own_L, padded_L.cumsum(0) - padded_L
    expert_P = torch.repeat_interleave(padded_L)
    nth_P = torch.arange(expert_P.numel(), device="cpu") - start_L[expert_P]
    # Positions behind an expert's last row become copies of this row.
    last_P = (own_L - 1)[expert_P]
    shift_R = (start_L - first_L).repeat_interleave(own_L)
    padded_R = torch.arange(shift_R.numel() + 1, device="cpu")
    padded_R[:-1] += shift_R
    padded_R[-1] = -1
    return Padding(first_L[expert_P] + torch.minimum(nth_P, last_P), nth_P <= last_P,
                   padded_R)


class UnitRows(NamedTuple):
    """Rows of each unit of a block.

    Attributes:
        own: the unit's own rows [M, W].
        computed: the rows [C, W] that products by row compute.
    """

    own: tuple[Tensor, ...]
    computed: tuple[Tensor, ...]


class BlockRows:
    """Rows of all blocks, or memory for the rows of one block, which each block overwrites.

    Attributes:
        memory: [R, W] if `whole`, else [N of the largest block, W].
        of_block: rows [N, W] of each block.
        of_units: for each block, the rows of its units.
    """

    def __init__(self, blocks: list[UnitBlock], memory: Tensor, whole: bool,
                 by_row: bool = True) -> None:
        """Create the views of all blocks.

        Args:
            blocks: the blocks.
            memory: may have additional rows, for results computed behind the last expert.
            whole: whether memory contains the rows of all blocks.
            by_row: whether products by row read or write the memory. If False, `of_units` is empty.
        """
        self._blocks = blocks
        self.of_block: list[Tensor] = []
        self.of_units: list[UnitRows] = []
        end = 0
        for block in blocks:
            first, last = (block.rows.start, block.rows.stop) if whole else (0, block.size)
            end = max(end, last)
            x = memory if first == 0 and last == memory.shape[0] else memory[first:last]
            self.of_block.append(x)
            if by_row:
                own = block.split(x)
                self.of_units.append(
                    UnitRows(own, own if block.exact else block.cover(memory, first, own)))
        self.memory = memory if end == memory.shape[0] else memory[:end]

    def take(self, block: int) -> UnitRows:
        """Return the rows of one block."""
        return self.of_units[block]

    def columns(self) -> list[tuple[Tensor, ...]]:
        """Return, for each block, the transposed rows [W, M] of each of its units."""
        return [block.columns(x) for block, x in zip(self._blocks, self.of_block, strict=True)]


class GatheredRows:
    """Rows of tokens, gathered for one block at a time. It has the interface of `BlockRows`.

    Args:
        blocks: the blocks.
        x_TW: tokens.
        token_R: the token of each row.
        rows: memory for one block.
    """

    def __init__(self, blocks: list[UnitBlock], x_TW: Tensor, token_R: Tensor,
                 rows: BlockRows) -> None:
        self.x_TW, self.tokens, self.rows = x_TW, by_block(blocks, token_R), rows

    def take(self, block: int) -> UnitRows:
        """Return the rows of one block, valid until the next block is taken."""
        torch.index_select(self.x_TW, 0, self.tokens[block], out=self.rows.of_block[block])
        return self.rows.take(block)

    def columns(self) -> list[tuple[Tensor, ...]]:
        """Return, for each block, views of the transposed rows [W, M] of each of its units."""
        return self.rows.columns()


class WeightedRows:
    """Rows of tokens times a factor per row, computed for one block at a time.

    Args:
        blocks: the blocks.
        x_TW: tokens.
        token_R: the token of each row.
        scale_R: the factor of each row, float32 (float64).
    """

    def __init__(self, blocks: list[UnitBlock], x_TW: Tensor, token_R: Tensor,
                 scale_R: Tensor) -> None:
        self.x_TW, self._blocks = x_TW, blocks
        spare = max((block.rows.start + block.reach for block in blocks), default=0) - len(token_R)
        if spare > 0:  # the results of additional rows are overwritten, so any row will do
            token_R, scale_R = (torch.cat([of_R, of_R[-1:].expand(spare)])
                                for of_R in (token_R, scale_R))
        self.bags = [by_block(blocks, part, computed=True)
                     for part in bags(token_R[:, None], scale_R[:, None], x_TW.dtype)]

    def take(self, block: int) -> UnitRows:
        """Return the rows of one block."""
        index, scale = (parts[block] for parts in self.bags)
        rows = sum_bags(self.x_TW, index, scale)
        return BlockRows([self._blocks[block]], rows, False).of_units[0]


def by_block(blocks: list[UnitBlock], x: Tensor, computed: bool = False) -> list[Tensor]:
    """Return the part of each block along axis 0 of size R.

    computed: whether to include the following rows that the block also computes.
    """
    if computed and not all(block.exact for block in blocks):
        return [x[block.rows.start:block.rows.start + block.reach] for block in blocks]
    if len(blocks) == 1:
        return [x]
    return list(x.split_with_sizes([block.size for block in blocks])) if blocks else []
