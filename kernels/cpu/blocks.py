"""In which order and company a CPU computes its experts: pairs of about equal load, and blocks of
experts that share a cache.

A pair's products of one size go to one batched product, each on a thread of its own: two threads on
one small product after the other wait for each other. Experts are sorted by load and taken two by
two; the emptier one's rows are followed by places without a row, so that both are equally high.
Their inputs and gradients are zeros: nothing of them reaches a weight's gradient or a token.

Legend: R rows in the order of experts; P places, in the order of groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

# at most this part (1/16) of the fuller expert's rows may be places without a row; else each expert
# is by itself
WASTE = 16


@dataclass(frozen=True)
class Group:
    """One expert, or two with `height` places each. counts: rows by expert. start: first place."""

    experts: tuple[int, ...]
    counts: tuple[int, ...]
    start: int

    @cached_property
    def height(self) -> int:
        return max(self.counts)

    @cached_property
    def places(self) -> slice:
        return slice(self.start, self.start + self.height * len(self.experts))

    @cached_property
    def both(self) -> slice:
        """A pair among all experts: `values_L[group.both]` is a view."""
        first, second = self.experts
        return slice(first, second + 1, second - first)

    def fold(self, values_N: Tensor) -> Tensor:
        """A pair's places by expert, [2, height, ...], out of those of a block."""
        width = values_N.shape[1]
        return values_N[self.places].view(2, self.height, width)


@dataclass(frozen=True)
class Block:
    """Experts that go through everything together. places: theirs among all; groups: with starts
    counted from the block's.
    """

    places: slice
    groups: list[Group]

    @property
    def size(self) -> int:
        return self.places.stop - self.places.start

    def cleared(self, values_N: Tensor) -> Tensor:
        """The same memory, with zeros in the block's places without a row."""
        for group in self.groups:
            for number, count in enumerate(group.counts):
                if count < group.height:
                    values_N[group.start + number * group.height + count:group.start +
                             (number + 1) * group.height].zero_()
        return values_N

    def experts(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows in the block)."""
        for group in self.groups:
            for number, (expert, count) in enumerate(zip(group.experts, group.counts, strict=True)):
                start = group.start + number * group.height
                yield expert, slice(start, start + count)


def in_order(counts: list[int]) -> list[Group]:
    """Each expert by itself, its rows where they are; experts without rows left out."""
    groups, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            groups.append(Group((expert,), (count,), start))
        start += count
    return groups


def in_pairs(counts: list[int], most: int) -> list[Group]:
    """Experts of about equal load two by two, the fullest first, others by themselves; experts
    without rows left out.

    most: rows of an expert up to which it gets company; all threads together are as good at the
    products of fuller ones.
    """
    left = sorted((expert for expert, count in enumerate(counts) if count),
                  key=lambda expert: counts[expert])
    groups: list[Group] = []
    while left:
        experts = (left.pop(),)
        if left and counts[experts[0]] <= most and (counts[experts[0]] -
                                                    counts[left[-1]]) * WASTE <= counts[experts[0]]:
            experts = tuple(sorted((*experts, left.pop())))
        start = groups[-1].places.stop if groups else 0
        groups.append(Group(experts, tuple(counts[expert] for expert in experts), start))
    return groups


def blocks_of(groups: list[Group], most: int) -> list[Block]:
    """Groups in runs of at most `most` places; one that has more is a block of its own."""
    blocks: list[Block] = []
    for group in groups:
        if not blocks or group.places.stop - blocks[-1].places.start > most:
            blocks.append(Block(slice(group.start, group.start), []))
        start, held = blocks[-1].places.start, blocks[-1].groups
        blocks[-1] = Block(slice(start, group.places.stop),
                           [*held, replace(group, start=group.start - start)])
    return blocks


def moved(groups: list[Group], counts: list[int], source_R: Tensor,
          position_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(source_P, position_TK) of places from those of rows, see kernels.rows; a place without a row
    has source 0. counts: rows by expert.
    """
    shift_L, row = [0] * len(counts), 0
    place_of = {
        expert: group.start + number * group.height for group in groups
        for number, expert in enumerate(group.experts)
    }
    for expert, count in enumerate(counts):
        shift_L[expert], row = place_of.get(expert, row) - row, row + count
    shift_R = torch.tensor(shift_L).repeat_interleave(torch.tensor(counts),
                                                      output_size=source_R.numel())
    place_R = torch.arange(source_R.numel()) + shift_R
    source_P = source_R.new_zeros(groups[-1].places.stop).index_copy_(0, place_R, source_R)
    return source_P, torch.where(position_TK >= 0, place_R[position_TK.clamp(min=0)], -1)
