"""Rows in groups, one per expert, and the tiles that a grouped matmul is divided into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.registry import op
from moe_plugin.records import DeviceCounts, RowCounts


# Rows in pages of one buffer: copies whose lengths only the device knows.
#
# A buffer is [S + 1, P]: S slots of P elements, and one for what is not kept; `host` is another, in
# memory of the host, whose slots have the numbers from S on. Which slots hold a tensor is its
# record,
# int64 [M]: the slot of its i-th run of P elements, -1: none.
@op
def write_pages(x_N: Tensor, record_M: Tensor, pages_SP: Tensor, host_SP: Tensor) -> Tensor:
    """Copy the runs of x_N that have a slot there; returns the slots of `pages_SP`, [S, P].

    What is left of the last run is zeros.

    Args:
        x_N: [N] of any dtype, N <= M P.
        record_M: int64 [M].
        pages_SP, host_SP: x's dtype, see the module, changed in place.
    """
    size, pages = pages_SP.shape[1], record_M.shape[0]
    x_MP = F.pad(x_N, (0, pages * size - x_N.shape[0])).view(pages, size)
    for buffer_SP, slot_M in zip((pages_SP, host_SP), _slots(record_M, pages_SP, host_SP),
                                 strict=True):
        buffer_SP.index_copy_(0, slot_M, x_MP)
    return pages_SP[:-1]


@op
def read_pages(record_M: Tensor, pages_SP: Tensor, host_SP: Tensor, length: int,
               enough: Tensor) -> Tensor:
    """The first `length` elements of what a record holds, [length]; any values without a slot.

    Args:
        record_M: int64 [M], length <= M P.
        pages_SP, host_SP: see the module; floating point.
        enough: bool scalar on the device; where it is false, all elements are NaN.
    """
    here_M, there_M = _slots(record_M, pages_SP, host_SP)
    x_MP = pages_SP.index_select(0, here_M)
    if host_SP.shape[0] > 1:
        on_host_M1 = (record_M >= pages_SP.shape[0] - 1)[:, None]
        x_MP = torch.where(on_host_M1, host_SP.index_select(0, there_M), x_MP)
    return x_MP.view(-1)[:length].masked_fill_(~enough, torch.nan)


def _slots(record_M: Tensor, pages_SP: Tensor, host_SP: Tensor) -> tuple[Tensor, Tensor]:
    """Of both buffers, the slot of each run; the last one for what is not there."""
    here, there = pages_SP.shape[0] - 1, host_SP.shape[0] - 1
    on_host_M = record_M >= here
    return (torch.where(on_host_M | (record_M < 0), here, record_M),
            torch.where(on_host_M, record_M - here, there))


@op
def transpose_chunks(x: Tensor, outer: int, inner: int) -> Tensor:
    """Equal chunks of dimension 0 from [outer, inner] order to [inner, outer] order.

    x: [outer * inner * c, ...] of any dtype; the result has its shape and dtype. 2DH (Tutel):
    chunks by destination rank (node, local) become chunks by (local, node), so that the exchange
    inside the node sends one contiguous piece to each neighbour; and back with the factors swapped.
    """
    if x.shape[0] % (outer * inner):
        raise ValueError(
            f"{x.shape[0]} rows do not make {outer} x {inner} equal chunks: must be a multiple of "
            f"{outer * inner}; pad them"
        )
    chunks = x.reshape(outer, inner, -1).transpose(0, 1)
    return chunks.reshape(x.shape)


@op
def tile_table(lengths_L: Tensor, height: int, total: int,
               least: int) -> tuple[Tensor, Tensor, Tensor]:
    """(group, first row, used): of each tile, int32 [M] each, and the number of tiles, int32 [1].

    No tile spans two groups.

    Args:
        lengths_L: int64 [L], rows of each group, which lie one after the other.
        height: rows of a tile.
        total: rows of all groups, or a bound.
        least: tiles that a group without rows has, 0 or 1. M = total // height + L, which no
            lengths exceed; what is unused, at the end, has group -1 and row 0. The host does
            not wait for the device.
    """
    groups, device = lengths_L.numel(), lengths_L.device
    if groups == 0:
        empty = torch.empty(0, dtype=torch.int32, device=device)
        return empty, empty.clone(), torch.zeros(1, dtype=torch.int32, device=device)
    tiles_L = torch.div(lengths_L + (height - 1), height, rounding_mode="floor").clamp_(min=least)
    last_L, end_L = tiles_L.cumsum(0), lengths_L.cumsum(0)
    tile_M = torch.arange(most_tiles(groups, height, total), device=device)
    group_M = torch.searchsorted(last_L, tile_M, right=True)
    used_M, at_M = group_M < groups, group_M.clamp(max=groups - 1)
    row_M = (end_L - lengths_L - (last_L - tiles_L) * height)[at_M] + tile_M * height
    return (torch.where(used_M, group_M, -1).to(torch.int32),
            torch.where(used_M, row_M, 0).to(torch.int32), last_L[-1:].to(torch.int32))


def most_tiles(groups: int, height: int, total: int) -> int:
    """M of `tile_table`: the most tiles of `height` rows that `total` rows in `groups` can make."""
    return total // height + groups if groups else 0


@dataclass(frozen=True)
class TileSchedule:
    """How a kernel's programs go through their tiles; each computes the same bits.

    Attributes:
        specialize: some warps load, some multiply, some store; of products of one matrix with rows
            that lie in order.
        split: parts in which a half of a tile's columns is stored, 1 or 2.
    """

    specialize: bool = False
    split: int = 1


# by what they are called where one is chosen; none: the one that all GPUs and versions can
SCHEDULES = {"": TileSchedule(), "split": TileSchedule(split=2),
             "specialized": TileSchedule(specialize=True)}


@dataclass(frozen=True)
class RowGroups:
    """Tables of row counts on one device; no copy from the device to the host.

    Rows after those of the last group (filler, see `DeviceCounts`) are in no group. beside: other
    kernels, those of an exchange, run at the same time as products over these rows. schedule: of
    these products where Triton computes them, one of `SCHEDULES` (a name, which graphs can hold).
    """

    counts: RowCounts
    device: torch.device
    beside: bool = False
    schedule: str = ""
    _tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False)
    _filled: dict[int, tuple[RowGroups, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False)

    @property
    def total(self) -> int:
        """R, rows of all groups and filler."""
        return self.counts.total

    @property
    def number(self) -> int:
        """L, groups."""
        return self.counts.number

    @cached_property
    def lengths_L(self) -> Tensor:
        """Rows of each group, int64 [L] on the device."""
        return self.counts.device(self.device)

    @cached_property
    def ends_L(self) -> Tensor:
        """Row after the last of each group, int32 [L] on the device."""
        return self.lengths_L.cumsum(0, dtype=torch.int32)

    @cached_property
    def group_R(self) -> Tensor:
        """Group of each row, int64 [R] on the device; filler counts as rows of the last."""
        if isinstance(self.counts, DeviceCounts):
            row_R = torch.arange(self.total, device=self.device)
            found_R = torch.searchsorted(self.lengths_L.cumsum(0), row_R, right=True)
            return found_R.clamp_(max=self.number - 1)
        return torch.repeat_interleave(self.lengths_L, output_size=self.total)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(group, its rows), empty groups included; reads lengths that only the device knows."""
        start = 0
        for group, count in enumerate(self.counts.lengths()):
            yield group, slice(start, start + count)
            start += count

    def tiles(self, height: int, least: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """(group, first row, used) of the tiles of `height` rows, see `tile_table`.

        Made once for all products that use this height and these groups.
        """
        if (height, least) not in self._tables:
            self._tables[height, least] = tile_table(self.lengths_L, height, self.total, least)
        return self._tables[height, least]

    def filled(self, step: int) -> tuple[RowGroups, Tensor]:
        """(groups, row_P): these filled up to a multiple of `step` rows, at least `step`, P rows
        together, and which row is in each place, int64 [P], -1: none.

        Made once for all products of blocks of rows. The host does not wait for the device.
        """
        if step not in self._filled:
            self._filled[step] = self._fill(step)
        return self._filled[step]

    def _fill(self, step: int) -> tuple[RowGroups, Tensor]:
        device, total, counts = self.device, self.total, self.counts
        if isinstance(counts, DeviceCounts):
            steps_L = torch.div(self.lengths_L + (step - 1), step, rounding_mode="floor")
            places = -(-total // step) * step + step * self.number
            counts = DeviceCounts(steps_L.clamp_(min=1) * step, places)
        else:
            counts = RowCounts([max(1, -(-n // step)) * step for n in counts.host])
            places = counts.total
        filled = RowGroups(counts, device, self.beside, self.schedule)
        row_R = torch.arange(total, device=device)
        shift_L = (filled.lengths_L.cumsum(0) - filled.lengths_L
                   - self.lengths_L.cumsum(0) + self.lengths_L)
        at_R = torch.where(row_R < self.ends_L[-1], row_R + shift_L[self.group_R], places)
        row_P = torch.full((places + 1,), -1, device=device)
        return filled, row_P.index_copy_(0, at_R, row_R)[:places]
