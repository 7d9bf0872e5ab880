"""Blocks of experts that share the CPU's cache, views of the rows of these experts, and padding.

The views of all rows are created before the first matmul. A matmul evicts Python's data from the
caches. A line of Python code between two matmuls therefore takes several times as long as in a
separate loop. In addition, the views of all rows can be created with only one call.

Experts that are multiplied together are padded to the number of rows of the longest expert. The
padding consists of copies of the expert's last row, whose gradient is zero. The copies add nothing
to the weight gradients, and a NaN in one expert does not affect any other expert.

Notation: R is the number of rows (ordered by expert), P the number of rows with padding, N the
number of rows of one block, B the number of experts of one unit, M the number of rows of each of
these experts, C the number of rows that the unit's matmuls compute (M or a few more, see
`Unit.computed`), W the width, T the number of tokens and K the number of choices. Experts that are
multiplied together share a view with a leading axis of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.products import RowRule
from moe_plugin.kernels.rows import bags, sum_bags


class Unit(NamedTuple):
    """Consecutive experts that are multiplied together in one matmul.

    Attributes:
        first: index of the first expert.
        experts: number B of experts in the unit.
        rows: number M of rows of each expert in memory. If there are several experts, all are
            padded to the number of rows of the longest expert (see `Padding`).
        computed: number of rows on which the matmul is computed. The number includes all rows in
            memory and, for a single expert, a few of the following rows if this takes less time
            (`RowRule.fast`). The results of the next unit overwrite the additional results, so
            units must be computed in order.
    """

    first: int
    experts: int
    rows: int
    computed: int

    @property
    def index(self) -> int | slice:  # type: ignore[override]  # not the method of tuples
        """The index with which the unit's part of a tensor [L, ...] is selected."""
        return self.first if self.experts == 1 else slice(self.first, self.first + self.experts)


@dataclass
class UnitBlock:
    """A group of units that pass through all operations together.

    Attributes:
        rows: range of the block's rows among all rows.
        size: number N of rows in the block.
        reach: number of rows from the first row of the block to its last computed row. The number
            is at least N.
        exact: whether each unit computes only its own rows.
        single: whether every unit consists of one expert.
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
        """Split x [N, W] into one view per unit: [M, W], or [B, M, W] if the unit has several
        experts.

        All views are created at the same time, because creating single views would take as long as
        the operations of a small expert.
        """
        parts = (x,) if len(self.units) == 1 else x.split_with_sizes(self._sizes)
        return parts if self.single else tuple(
            part if unit.experts == 1 else part.view(unit.experts, unit.rows, -1)
            for unit, part in zip(self.units, parts, strict=True))

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one transposed view of the rows per unit: [W, M], or [B, W, M]."""
        if self.single and len(self.units) > 1:
            return x.t().split_with_sizes(self._sizes, 1)
        return tuple(part.transpose(-2, -1) for part in self.split(x))

    def cover(self, x: Tensor, first: int, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return views of the computed rows of each unit. The views may overlap.

        Args:
            x: rows of one block or of all blocks.
            first: index in `x` of the block's first row, from which at least `reach` rows follow.
            own: views that were returned by `split`.
        """
        return tuple([part if unit.computed == size else x.narrow(0, first + start, unit.computed)
                      for start, size, unit, part in zip(self._starts, self._sizes, self.units, own,
                                                         strict=True)])

    def clipped(self, end: int) -> UnitBlock:
        """Return the block, in which the computed rows end at `end`."""
        left = end - self.rows.start
        return UnitBlock(self.rows, [
            unit._replace(computed=min(unit.computed, left - start))
            for start, unit in zip(self._starts, self.units, strict=True)])


def units_of(counts: list[int], limit: int, rule: RowRule) -> list[Unit]:
    """Return units for the experts that have rows, joining experts of up to `limit` rows if faster.
    """
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
    """Group experts into blocks of at most `limit` rows. An expert with more rows becomes a
    separate block.

    counts: number of rows of each expert. Experts without rows are skipped.
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
    """Return the blocks without computed rows beyond the last row.

    This is necessary if the rows are in memory that this package does not own.
    """
    return [block if block.exact else block.clipped(blocks[-1].rows.stop) for block in blocks]


@dataclass(frozen=True)
class Padding:
    """The mapping between rows without padding and rows with padding.

    Attributes:
        row_P: int64 [P], the index of the row that each padded row contains.
        real_P: bool [P], False for rows that are copies.
        padded_R: int64 [R + 1], the position of each row after padding is added. The last element
            is -1, so that index -1 maps to -1.
    """

    row_P: Tensor
    real_P: Tensor
    padded_R: Tensor

    def positions(self, position: Tensor) -> Tensor:
        """Return the positions of rows after padding is added (int64 of any shape; -1 means no
        row).
        """
        return self.padded_R[position]


def padding_of(counts: list[int], blocks: list[UnitBlock]) -> Padding:
    """Return the padding of blocks in which some units have several experts. counts: number of rows
    of each expert.
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
    """Views of the rows of each unit in a block.

    Attributes:
        own: views of the unit's own rows [M, W].
        computed: views of those rows [C, W] that matmuls compute row by row.
    """

    own: tuple[Tensor, ...]
    computed: tuple[Tensor, ...]


class BlockRows:
    """Rows of all blocks, or memory for the rows of one block that is overwritten by each block.

    Attributes:
        memory: tensor [R, W] if `whole` is true, otherwise [N of the largest block, W].
        of_block: view of the rows [N, W] of each block.
        of_units: for each block, views of the rows of its units.
    """

    def __init__(self, blocks: list[UnitBlock], memory: Tensor, whole: bool,
                 by_row: bool = True) -> None:
        """Create the views of all blocks.

        Args:
            blocks: the blocks.
            memory: tensor that may have additional rows, for results computed beyond the rows of
                the last expert.
            whole: whether the memory contains the rows of all blocks.
            by_row: whether matmuls that compute row by row read or write the memory. If `by_row` is
                False, `of_units` is empty.
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
    """Rows of tokens, which are gathered for one block at a time. This class has the interface of
    `BlockRows`.

    Args:
        blocks: the blocks.
        x_TW: tokens.
        token_R: index of the token of each row.
        rows: memory for the rows of one block.
    """

    def __init__(self, blocks: list[UnitBlock], x_TW: Tensor, token_R: Tensor,
                 rows: BlockRows) -> None:
        self.x_TW, self.tokens, self.rows = x_TW, by_block(blocks, token_R), rows

    def take(self, block: int) -> UnitRows:
        """Return the rows of one block, which are valid until the next block is requested."""
        torch.index_select(self.x_TW, 0, self.tokens[block], out=self.rows.of_block[block])
        return self.rows.take(block)

    def columns(self) -> list[tuple[Tensor, ...]]:
        """Return, for each block, views of the transposed rows [W, M] of each of its units."""
        return self.rows.columns()


class WeightedRows:
    """Rows of tokens that are multiplied by a factor per row and computed for one block at a time.

    Args:
        blocks: the blocks.
        x_TW: tokens.
        token_R: index of the token of each row.
        scale_R: the factor of each row, in float32 (float64 for float64 rows).
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
    """Return each block's part of a tensor whose axis 0 has size R.

    computed: whether to include the following rows that the block also computes.
    """
    if computed and not all(block.exact for block in blocks):
        return [x[block.rows.start:block.rows.start + block.reach] for block in blocks]
    if len(blocks) == 1:
        return [x]
    return list(x.split_with_sizes([block.size for block in blocks])) if blocks else []
