"""Rows in groups, one per expert, and the tiles that a grouped matmul is divided into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_plugin.records import RowCounts


@dataclass(frozen=True)
class Groups:
    """Tables of row counts on one device; no copy from the device to the host."""

    counts: RowCounts
    device: torch.device

    @property
    def total(self) -> int:
        """R, rows of all groups."""
        return self.counts.total

    @property
    def number(self) -> int:
        """L, groups."""
        return len(self.counts.host)

    @cached_property
    def lengths_L(self) -> Tensor:
        """Rows of each group, int64 [L] on the device."""
        return self.counts.device(self.device)

    @cached_property
    def ends_L(self) -> Tensor:
        """Row after the last of each group, int32 [L] on the device."""
        return self.lengths_L.cumsum(0).to(torch.int32)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(group, its rows), empty groups included."""
        start = 0
        for group, count in enumerate(self.counts.host):
            yield group, slice(start, start + count)
            start += count

    def tiles(self, height: int) -> tuple[Tensor, Tensor]:
        """(group, first row) of each tile of `height` rows, int32 [M]; no tile spans two groups.

        Groups of one size (fixed slots) make the tables on the device: no copy from the host.
        """
        rows = self.counts.host[0] if self.number else 0
        if all(count == rows for count in self.counts.host):
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
