"""Blocks of experts whose rows fit into the CPU's cache, views of these rows, and padding.

The views of all rows are created before the first matmul. A matmul evicts the data of the Python
interpreter from the CPU's caches. Python code between two matmuls therefore runs several times
slower than the same code in a loop without matmuls. In addition, one call can create the views of
all rows.

If several experts are computed by one batched matmul, the rows of each expert are padded to the
number of rows of the largest expert. The padding consists of copies of the expert's last row. The
gradient of a copy is zero. The copies therefore add nothing to the weight gradients, and a NaN in
the rows of one expert does not affect other experts.

Notation: R is the number of rows (ordered by expert), P the number of rows with padding, N the
number of rows of one block, B the number of experts of one unit, M the number of rows of each of
these experts, C the number of rows that the unit's matmuls compute (M or a few more, see
`Unit.computed`), W the width, T the number of tokens and K the number of choices. Experts that are
computed by one batched matmul share a view whose first axis is the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.products import RowRule
from moe_plugin.kernels.rows import bags, sum_bags


class Unit(NamedTuple):
    """Consecutive experts that are computed by one matmul.

    Attributes:
        first: index of the first expert.
        experts: number of experts in the unit, B.
        rows: number of rows in memory for each expert, M. If there are several experts, each is
            padded to the number of rows of the largest expert (see `Padding`).
        computed: number of rows that the matmul computes. The number includes all rows in memory.
            For a single expert, it also includes a few of the next rows if a matmul with more rows
            is faster (`RowRule.fast`). The additional output rows are overwritten when the next
            unit is computed, so units must be computed in order.
    """

    first: int
    experts: int
    rows: int
    computed: int

    @property
    def index(self) -> int | slice:  # type: ignore[override]  # not the method of tuples
        """The index that selects the unit's experts in a tensor of shape [L, ...]."""
        return self.first if self.experts == 1 else slice(self.first, self.first + self.experts)


@dataclass
class UnitBlock:
    """A group of units. All operations are applied to one block before the first operation of the
    next block starts.

    Attributes:
        rows: slice that selects the block's rows among all rows.
        size: number of rows in the block, N.
        reach: number of rows from the first row of the block to the last row that its matmuls
            compute. `reach` is at least N.
        exact: whether each unit computes only its own rows.
        single: whether every unit consists of a single expert.
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

        All views are created in one call, because creating a single view takes as long as one of a
        small expert's operations.
        """
        parts = (x,) if len(self.units) == 1 else x.split_with_sizes(self._sizes)
        return parts if self.single else tuple(
            part if unit.experts == 1 else part.view(unit.experts, unit.rows, -1)
            for unit, part in zip(self.units, parts, strict=True))

    def columns(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one transposed view per unit, with shape [W, M] or [B, W, M]."""
        if self.single and len(self.units) > 1:
            return x.t().split_with_sizes(self._sizes, 1)
        return tuple(part.transpose(-2, -1) for part in self.split(x))

    def cover(self, x: Tensor, first: int, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """For each unit, return a view of the rows that its matmuls compute. The views may overlap.

        Args:
            x: rows of one block or of all blocks.
            first: index in `x` of the block's first row. x must contain at least `reach` rows from
                this index on.
            own: views that were returned by `split`.
        """
        return tuple([part if unit.computed == size else x.narrow(0, first + start, unit.computed)
                      for start, size, unit, part in zip(self._starts, self._sizes, self.units, own,
                                                         strict=True)])

    def clipped(self, end: int) -> UnitBlock:
        """Return a copy of the block. The matmuls of the copy compute no row at or after row `end`.
        """
        left = end - self.rows.start
        return UnitBlock(self.rows, [
            unit._replace(computed=min(unit.computed, left - start))
            for start, unit in zip(self._starts, self.units, strict=True)])


def units_of(counts: list[int], limit: int, rule: RowRule) -> list[Unit]:
    """Create units for all experts that have rows. Experts are combined into units of up to `limit`
    rows if one joint matmul is faster.
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
    """Group experts into blocks of at most `limit` rows. An expert with more than `limit` rows has
    a separate block.

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
    """Return copies of the blocks. The matmuls of the copies compute no row after the last row.

    This is necessary if the rows are in memory that this package did not allocate.
    """
    return [block if block.exact else block.clipped(blocks[-1].rows.stop) for block in blocks]


@dataclass(frozen=True)
class Padding:
    """A mapping between unpadded rows and padded rows.

    Attributes:
        row_P: int64 [P], the index of the unpadded row that is copied to each padded row.
        real_P: bool [P], False for padding.
        padded_R: int64 [R + 1], the position of each unpadded row among the padded rows. The last
            element is -1, so that an index of -1 is mapped to -1.
    """

    row_P: Tensor
    real_P: Tensor
    padded_R: Tensor

    def positions(self, position: Tensor) -> Tensor:
        """Convert positions of unpadded rows (int64, -1 for no row) to positions of padded rows."""
        return self.padded_R[position]


def padding_of(counts: list[int], blocks: list[UnitBlock]) -> Padding:
    """Create the padding for blocks in which some units consist of several experts. counts: number
    of rows of each expert.
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
        own: for each unit, a view of its own rows [M, W].
        computed: for each unit, a view of the rows [C, W] that row-wise matmuls compute.
    """

    own: tuple[Tensor, ...]
    computed: tuple[Tensor, ...]


class BlockRows:
    """The rows of all blocks, or a buffer for the rows of one block that is reused for each block.

    Attributes:
        memory: tensor [R, W] if `whole` is true, otherwise [N of the largest block, W].
        of_block: a view of the rows [N, W] of each block.
        of_units: views of the rows of each unit, for each block.
    """

    def __init__(self, blocks: list[UnitBlock], memory: Tensor, whole: bool,
                 by_row: bool = True) -> None:
        """Create the views of all blocks.

        Args:
            blocks: the blocks.
            memory: tensor with the rows. The tensor may have additional rows at its end. The
                matmuls of the last expert may compute additional rows, which are written there.
            whole: True if the memory contains the rows of all blocks, False if it is reused for
                each block.
            by_row: whether the operands or outputs of row-wise matmuls are in this memory. If
                `by_row` is False, `of_units` is empty.
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
        """Return views of the rows of one block."""
        return self.of_units[block]

    def columns(self) -> list[tuple[Tensor, ...]]:
        """For each block, return the transposed rows [W, M] of each of its units."""
        return [block.columns(x) for block, x in zip(self._blocks, self.of_block, strict=True)]


class GatheredRows:
    """The rows of tokens, gathered into a buffer one block at a time. This class has the interface
    of `BlockRows`.

    Args:
        blocks: the blocks.
        x_TW: tokens.
        token_R: index of each row's token.
        rows: buffer for the rows of one block.
    """

    def __init__(self, blocks: list[UnitBlock], x_TW: Tensor, token_R: Tensor,
                 rows: BlockRows) -> None:
        self.x_TW, self.tokens, self.rows = x_TW, by_block(blocks, token_R), rows

    def take(self, block: int) -> UnitRows:
        """Gather the rows of one block. The returned views are valid until the next call."""
        torch.index_select(self.x_TW, 0, self.tokens[block], out=self.rows.of_block[block])
        return self.rows.take(block)

    def columns(self) -> list[tuple[Tensor, ...]]:
        """Return, for each block, views of the transposed rows [W, M] of each of its units."""
        return self.rows.columns()


class WeightedRows:
    """The rows of tokens, multiplied by one factor per row. The rows are computed one block at a
    time.

    Args:
        blocks: the blocks.
        x_TW: tokens.
        token_R: index of each row's token.
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
        """Return views of the rows of one block."""
        index, scale = (parts[block] for parts in self.bags)
        rows = sum_bags(self.x_TW, index, scale)
        return BlockRows([self._blocks[block]], rows, False).of_units[0]


def by_block(blocks: list[UnitBlock], x: Tensor, computed: bool = False) -> list[Tensor]:
    """Split a tensor of size R along axis 0 into one tensor per block.

    computed: whether to include the additional rows that the block's matmuls compute.
    """
    if computed and not all(block.exact for block in blocks):
        return [x[block.rows.start:block.rows.start + block.reach] for block in blocks]
    if len(blocks) == 1:
        return [x]
    return list(x.split_with_sizes([block.size for block in blocks])) if blocks else []
