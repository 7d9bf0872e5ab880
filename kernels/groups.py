"""Rows in groups, one per expert, and the tiles that a grouped matmul is divided into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_plugin.row_counts import DeviceCounts, RowCounts


@dataclass(frozen=True)
class Groups:
    """Tables of row counts on one device; no copy from the device to the host.

    Rows after those of the last group (filler, see `DeviceCounts`) are in no group.
    """

    counts: RowCounts
    device: torch.device

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

    def tiles(self, height: int) -> tuple[Tensor, Tensor]:
        """(group, first row) of each tile of `height` rows, int32 [M]; no tile spans two groups.

        Groups of one size (fixed slots) make the tables on the device: no copy from the host. So do
        lengths that only the device knows, for as many tiles as there may be; those left over begin
        after their group's last row.
        """
        if isinstance(self.counts, DeviceCounts):
            return self._tiles_of_device(height)
        rows = self.counts.host[0] if self.number else 0
        if self.counts.even:
            per_group = -(-rows // height)
            tile_M = torch.arange(self.number * per_group, dtype=torch.int32, device=self.device)
            group_M = torch.div(tile_M, max(1, per_group), rounding_mode="floor")
            return group_M, group_M * rows + (tile_M - group_M * per_group) * height
        starts = [(g, row) for g, span in self.spans()
                  for row in range(span.start, span.stop, height)]
        table_2M = torch.tensor(starts, dtype=torch.int32).reshape(-1, 2).t().contiguous()
        if self.device.type == "cuda":
            # from pinned memory the copy does not wait for the device
            table_2M = table_2M.pin_memory().to(self.device, non_blocking=True)
        return table_2M[0], table_2M[1]

    def _tiles_of_device(self, height: int) -> tuple[Tensor, Tensor]:
        tiles_L = torch.div(self.lengths_L + height - 1, height, rounding_mode="floor")
        tile_M = torch.arange(self.total // height + self.number, device=self.device)
        end_L = tiles_L.cumsum(0)
        group_M = torch.searchsorted(end_L, tile_M, right=True).clamp_(max=self.number - 1)
        first_row_L = self.lengths_L.cumsum(0) - self.lengths_L - (end_L - tiles_L) * height
        row_M = first_row_L[group_M] + tile_M * height
        return group_M.to(torch.int32), row_M.to(torch.int32)
