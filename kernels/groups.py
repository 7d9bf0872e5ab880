"""Rows in groups: rows of expert after expert, and the tiles that a grouped product is cut in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """host: rows of each group. Nothing here copies from the device to the host."""

    host: list[int]
    device: torch.device

    @property
    def total(self) -> int:
        """R, rows of all groups."""
        return sum(self.host)

    @property
    def even(self) -> bool:
        """All groups alike (fixed slots): then every table is made on the device, with no copy from
        the host.
        """
        return len(set(self.host)) == 1

    @cached_property
    def lengths_L(self) -> Tensor:
        """int64 [L] on the device."""
        if self.even:
            return torch.full((len(self.host),), self.host[0], dtype=torch.int64,
                              device=self.device)
        return self._copy(torch.tensor(self.host, dtype=torch.int64))

    @cached_property
    def ends_L(self) -> Tensor:
        """int32 [L]: row after the last of each group."""
        return self.lengths_L.cumsum(0).to(torch.int32)

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(group, its rows), empty groups included."""
        start = 0
        for group, count in enumerate(self.host):
            yield group, slice(start, start + count)
            start += count

    def tiles(self, height: int) -> tuple[Tensor, Tensor]:
        """(group, first row) of each tile of `height` rows, int32; no tile spans two groups."""
        if self.even:
            per_group = -(-self.host[0] // height)
            tile_M = torch.arange(len(self.host) * per_group, dtype=torch.int32, device=self.device)
            group_M = torch.div(tile_M, max(1, per_group), rounding_mode="floor")
            return group_M, group_M * self.host[0] + (tile_M - group_M * per_group) * height
        starts = [(g, row) for g, span in self.spans()
                  for row in range(span.start, span.stop, height)]
        both_2M = self._copy(
            torch.tensor(starts, dtype=torch.int32).reshape(-1, 2).t().contiguous())
        return both_2M[0], both_2M[1]

    def _copy(self, table: Tensor) -> Tensor:
        # from pinned memory the copy does not wait for the device
        return table.pin_memory().to(self.device,
                                     non_blocking=True) if self.device.type == "cuda" else table
