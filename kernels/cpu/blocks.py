"""Blocks of experts whose values share the CPU's cache.

Legend: R rows, expert after expert; N rows of one block.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Consecutive experts that go through all operations together.

    rows: the block's rows among all. experts: (expert, its rows counted from the block's first).
    """

    rows: slice
    experts: tuple[tuple[int, slice], ...]

    @property
    def size(self) -> int:
        """N, rows of the block."""
        return self.rows.stop - self.rows.start


def blocks_of(counts: list[int], limit: int) -> list[Block]:
    """Experts in blocks of at most `limit` rows; an expert with more rows is a block of its own.

    counts: rows of each expert; experts without rows are left out.
    """
    blocks: list[Block] = []
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        if not blocks or start + count - blocks[-1].rows.start > limit:
            blocks.append(Block(slice(start, start), ()))
        first, experts = blocks[-1].rows.start, blocks[-1].experts
        here = slice(start - first, start - first + count)
        start += count
        blocks[-1] = Block(slice(first, start), (*experts, (expert, here)))
    return blocks
