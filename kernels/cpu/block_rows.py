"""Views of rows by block and by expert, made before the first matmul.

A matmul leaves nothing of Python's own data in the caches, so that a line between two of them takes
several times as long as in a loop of its own; the views of all rows at once are one call.

Legend: R rows of all blocks; N rows of one block; M rows of one expert; W width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.cpu.blocks import Block
from moe_plugin.kernels.rows import bags, sum_bags


class BlockRows:
    """Rows of all blocks, or memory for those of one block, which each block overwrites.

    Attributes:
        memory: [R, W] where `whole`, or [N of the largest block, W].
        of_block: [N, W] of each block.
        of_experts: for each block, [M, W] of each of its experts.
    """

    def __init__(self, blocks: list[Block], memory: Tensor, whole: bool) -> None:
        self.memory, self._blocks = memory, blocks
        self.of_block = by_block(blocks, memory) if whole else [
            memory if block.size == memory.shape[0] else memory[:block.size] for block in blocks
        ]
        self.of_experts = [block.split(x) for block, x in zip(blocks, self.of_block, strict=True)]

    def take(self, block: int) -> tuple[Tensor, ...]:
        """Rows of one block, [M, W] of each of its experts."""
        return self.of_experts[block]

    def columns(self) -> list[tuple[Tensor, ...]]:
        """For each block, the transposed rows [W, M] of each of its experts."""
        return [block.split(x.t(), 1)
                for block, x in zip(self._blocks, self.of_block, strict=True)]


class GatheredRows:
    """Rows of tokens, gathered for one block at a time; the interface of `BlockRows`.

    x_TW: tokens. token_R: the token of each row. rows: memory for one block.
    """

    def __init__(self, blocks: list[Block], x_TW: Tensor, token_R: Tensor,
                 rows: BlockRows) -> None:
        self.x_TW, self.tokens, self.rows = x_TW, by_block(blocks, token_R), rows

    def take(self, block: int) -> tuple[Tensor, ...]:
        """Rows of one block, [M, W] of each of its experts; they hold until the next block."""
        torch.index_select(self.x_TW, 0, self.tokens[block], out=self.rows.of_block[block])
        return self.rows.of_experts[block]

    def columns(self) -> list[tuple[Tensor, ...]]:
        """For each block, where its transposed rows [W, M] will be, of each of its experts."""
        return self.rows.columns()


class WeightedRows:
    """Rows of tokens, each times a factor, made for one block at a time.

    x_TW: tokens. token_R: the token of each row. scale_R: its factor, float32 (float64).
    """

    def __init__(self, blocks: list[Block], x_TW: Tensor, token_R: Tensor,
                 scale_R: Tensor) -> None:
        self.x_TW, self._blocks = x_TW, blocks
        self.bags = [by_block(blocks, part)
                     for part in bags(token_R[:, None], scale_R[:, None], x_TW.dtype)]

    def take(self, block: int) -> tuple[Tensor, ...]:
        """Rows of one block, [M, W] of each of its experts."""
        index, scale = (parts[block] for parts in self.bags)
        return self._blocks[block].split(sum_bags(self.x_TW, index, scale))


def by_block(blocks: list[Block], x: Tensor) -> list[Tensor]:
    """The part of each block along axis 0, which is of R."""
    if len(blocks) == 1:
        return [x]
    return list(x.split_with_sizes([block.size for block in blocks])) if blocks else []
