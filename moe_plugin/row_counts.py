"""How many rows each of a rank's experts has: known on the host, or on a device alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_plugin.machine import to_device


@dataclass(frozen=True)
class RowCounts:
    """Rows by local expert, on the host; made on a device when asked for."""

    host: list[int]

    @property
    def number(self) -> int:
        """L, local experts."""
        return len(self.host)

    @property
    def total(self) -> int:
        """R, rows of all local experts."""
        return sum(self.host)

    @property
    def even(self) -> bool:
        """Whether it is known that all experts have as many rows."""
        for count in self.host:
            if count != self.host[0]:
                return False
        return True

    @property
    def real(self) -> int | Tensor:
        """Rows that experts compute for tokens; a scalar tensor where a device alone knows it."""
        return sum(self.host)

    def lengths(self) -> list[int]:
        """Rows of each expert, filler left out."""
        return self.host

    def device(self, device: torch.device) -> Tensor:
        """Rows of each expert, filler left out, int64 [L]; the host does not wait for a GPU."""
        if torch.compiler.is_compiling():
            return torch.tensor(self.host, dtype=torch.int64, device=device)
        if device.type != "cpu" and len(set(self.host)) == 1:
            return torch.full((len(self.host),), self.host[0], dtype=torch.int64, device=device)
        return to_device(self.host, device)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class DeviceCounts(RowCounts):
    """Rows by local expert in a buffer of fixed length, known on the device alone.

    The experts' rows come first, expert after expert; the rest of the buffer is filler, of which no
    result is read. Kernels that take lengths from the device leave the filler out. `host` is for
    those that need lengths on the host: the host reads the device, and the filler counts as rows of
    the last expert.

    Attributes:
        lengths_L: int64 [L], rows of each expert. rows: R, rows of the buffer.
    """

    lengths_L: Tensor
    rows: int

    def __init__(self, lengths_L: Tensor, rows: int) -> None:
        object.__setattr__(self, "lengths_L", lengths_L)
        object.__setattr__(self, "rows", rows)

    @cached_property
    def host(self) -> list[int]:  # type: ignore[override]
        """Rows of each expert, filler included in the last; waits for the device."""
        *before, last = self.lengths()
        return [*before, last + self.rows - sum(before) - last]

    @property
    def number(self) -> int:
        """L, local experts."""
        return self.lengths_L.shape[0]

    @property
    def total(self) -> int:
        """R, rows of the buffer."""
        return self.rows

    @property
    def even(self) -> bool:
        """False: nothing is known."""
        return False

    @property
    def real(self) -> Tensor:
        """Rows of all experts, an int64 scalar on the device."""
        return self.lengths_L.sum()

    def lengths(self) -> list[int]:
        """Rows of each expert, filler left out; waits for the device if there are rows."""
        return self.lengths_L.tolist() if self.rows else [0] * self.number

    def device(self, device: torch.device) -> Tensor:
        """Rows of each expert, filler left out, int64 [L]."""
        return self.lengths_L
