"""Rows in groups, one per expert, and the tiles that a grouped matmul is divided into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_plugin.kernels.tiles import tile_table
from moe_plugin.row_counts import DeviceCounts, RowCounts


@dataclass(frozen=True)
class RowGroups:
    """Tables of row counts on one device; no copy from the device to the host.

    Rows after those of the last group (filler, see `DeviceCounts`) are in no group.
    """

    counts: RowCounts
    device: torch.device
    _tables: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = field(
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
        return self.lengths_L.cumsum(0).to(torch.int32)

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
