"""Views of rows by block and by unit, made before the first matmul.

A matmul leaves nothing of Python's own data in the caches, so that a line between two of them takes
several times as long as in a loop of its own; the views of all rows at once are one call.

Legend: R rows of all blocks; N rows of one block; M rows of one unit; C rows that its products
compute, M or a few more (`Unit.computed`); W width. Experts that are multiplied together are one
view with an axis before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.blocks import UnitBlock
from moe_plugin.kernels.rows import bags, sum_bags


class UnitRows(NamedTuple):
    """Rows of each unit of a block.

    Attributes:
        own: [M, W].
        computed: [C, W], for products by row.
    """

    own: tuple[Tensor, ...]
    computed: tuple[Tensor, ...]


class BlockRows:
    """Rows of all blocks, or memory for those of one block, which each block overwrites.

    Attributes:
        memory: [R, W] where `whole`, or [N of the largest block, W].
        of_block: [N, W] of each block.
        of_units: for each block, the rows of its units.
    """

    def __init__(self, blocks: list[UnitBlock], memory: Tensor, whole: bool,
                 by_row: bool = True) -> None:
        """memory: may have more rows, which hold what is computed after the last expert. by_row:
        products by row read or write it; False: there are no `of_units`.
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
        """Rows of one block."""
        return self.of_units[block]

    def columns(self) -> list[tuple[Tensor, ...]]:
        """For each block, the transposed rows [W, M] of each of its units."""
        return [block.columns(x) for block, x in zip(self._blocks, self.of_block, strict=True)]


class GatheredRows:
    """Rows of tokens, gathered for one block at a time; the interface of `BlockRows`.

    Args:
        x_TW: tokens.
        token_R: the token of each row.
        rows: memory for one block.
    """

    def __init__(self, blocks: list[UnitBlock], x_TW: Tensor, token_R: Tensor,
                 rows: BlockRows) -> None:
        self.x_TW, self.tokens, self.rows = x_TW, by_block(blocks, token_R), rows

    def take(self, block: int) -> UnitRows:
        """Rows of one block; they hold until the next block."""
        torch.index_select(self.x_TW, 0, self.tokens[block], out=self.rows.of_block[block])
        return self.rows.take(block)

    def columns(self) -> list[tuple[Tensor, ...]]:
        """For each block, where the transposed rows [W, M] of each of its units will be."""
        return self.rows.columns()


class WeightedRows:
    """Rows of tokens, each times a factor, made for one block at a time.

    Args:
        x_TW: tokens.
        token_R: the token of each row.
        scale_R: its factor, float32 (float64).
    """

    def __init__(self, blocks: list[UnitBlock], x_TW: Tensor, token_R: Tensor,
                 scale_R: Tensor) -> None:
        self.x_TW, self._blocks = x_TW, blocks
        spare = max((block.rows.start + block.reach for block in blocks), default=0) - len(token_R)
        if spare > 0:  # any row does
            token_R, scale_R = (torch.cat([of_R, of_R[-1:].expand(spare)])
                                for of_R in (token_R, scale_R))
        self.bags = [by_block(blocks, part, computed=True)
                     for part in bags(token_R[:, None], scale_R[:, None], x_TW.dtype)]

    def take(self, block: int) -> UnitRows:
        """Rows of one block."""
        index, scale = (parts[block] for parts in self.bags)
        rows = sum_bags(self.x_TW, index, scale)
        return BlockRows([self._blocks[block]], rows, False).of_units[0]


def by_block(blocks: list[UnitBlock], x: Tensor, computed: bool = False) -> list[Tensor]:
    """The part of each block along axis 0, which is of R; computed: with the rows that it computes
    of those that follow.
    """
    if computed and not all(block.exact for block in blocks):
        return [x[block.rows.start:block.rows.start + block.reach] for block in blocks]
    if len(blocks) == 1:
        return [x]
    return list(x.split_with_sizes([block.size for block in blocks])) if blocks else []
