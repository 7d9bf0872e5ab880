"""Blocks of experts whose values share the CPU's cache.

Legend: R rows, expert after expert; N rows of one block.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Consecutive experts that go through all operations together.

    rows: the block's rows among all. experts: those with rows. lengths: rows of each of them.
    """

    rows: slice
    experts: list[int]
    lengths: list[int]

    @property
    def size(self) -> int:
        """N, rows of the block."""
        return self.rows.stop - self.rows.start

    def split(self, x: Tensor, axis: int = 0) -> tuple[Tensor, ...]:
        """x, N long in `axis`, by expert. All views at once: one by one they take as long as the
        operations of a small expert.
        """
        return x.split_with_sizes(self.lengths, axis) if len(self.lengths) > 1 else (x,)


def blocks_of(counts: list[int], limit: int) -> list[Block]:
    """Experts in blocks of at most `limit` rows; an expert with more rows is a block of its own.

    counts: rows of each expert; experts without rows are left out.
    """
    blocks: list[Block] = []
    experts: list[int] = []
    lengths: list[int] = []
    first = stop = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        if experts and stop + count - first > limit:
            blocks.append(Block(slice(first, stop), experts, lengths))
            experts, lengths, first = [], [], stop
        experts.append(expert)
        lengths.append(count)
        stop += count
    if experts:
        blocks.append(Block(slice(first, stop), experts, lengths))
    return blocks
