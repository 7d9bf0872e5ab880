"""Rows of a rank's experts: how many each has, known on the host or on a device alone, of which
tokens they are, and how they come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.machine import exporting, to_device


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
        lengths_L: int64 [L], rows of each expert.
        rows: R, rows of the buffer.
    """

    lengths_L: Tensor
    rows: int
    _host: list[int] | None

    def __init__(self, lengths_L: Tensor, rows: int) -> None:
        object.__setattr__(self, "lengths_L", lengths_L)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "_host", None)

    @property
    def host(self) -> list[int]:  # type: ignore[override]
        """Rows of each expert, filler included in the last; waits for the device, once."""
        if self._host is None:
            before = self.lengths()[:-1]
            counts = [*before, self.rows - sum(before)]
            for count in counts if exporting() else ():
                torch._check(count >= 0)  # the program is to hold for any load
            object.__setattr__(self, "_host", counts)
        return self._host

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


@dataclass(frozen=True)
class RowPlan:
    """Rows that experts take out of tokens, and where their results belong.

    Without an exchange the tokens are this rank's own; after one they are the rows as they arrived.

    Attributes:
        source_R, position_TK: see `kernels.rows`; rows lie expert after expert.
        weights_TK: [T, K] gate weights, differentiable; None: all are 1.
        counts: rows by expert; with fixed slots also the empty ones.
        complete: every choice has a row and no slot is empty; False: perhaps not.
    """

    source_R: Tensor
    position_TK: Tensor
    weights_TK: Tensor | None
    counts: RowCounts
    complete: bool = False

    @property
    def token_R(self) -> Tensor:
        """Token of each row, int64 [R]; 0 for an empty slot."""
        choice_R = self.source_R if self.complete else self.source_R.clamp(min=0)
        choices = self.position_TK.shape[1]
        return choice_R if choices == 1 else choice_R // max(1, choices)


@dataclass(frozen=True)
class ExpertRows:
    """Work for this rank's experts.

    Attributes:
        x: [R, D] rows, expert after expert, or, with a `RowPlan`, [T, D] tokens.
        rows: rows by expert; or a `RowPlan`: the result then is [T, D], each token's rows weighted
            and summed.
        parameters: `FFNParameters` to compute with, e.g. gathered ones; None: those that the
            experts store.
        strategy: a `kernels.expert_ffn.Strategy`, how to compute; None: as configured.
        started: experts outside the device call it when all that they need is there, before they
            compute: what comes next can be fetched meanwhile.
    """

    x: Tensor
    rows: RowCounts | RowPlan
    parameters: Any = None
    strategy: Callable[..., Tensor] | None = None
    started: Callable[[], object] | None = None


class Sent:
    """The rows of one call: on their way to their experts, and back.

    Iterating gives work for this rank's experts, piece by piece, each when it has arrived. The
    results of a piece are put back before the next one is taken.

    Args:
        arriving: see above.
        anchor: as given to `Dispatcher.dispatch`.

    Attributes:
        results: of the pieces that were put back, in order, or what stands for them on their way.
    """

    def __init__(self, arriving: Iterable[ExpertRows], anchor: Tensor | None = None) -> None:
        self.arriving, self.anchor = arriving, anchor
        self.results: list[Tensor] = []

    def __iter__(self) -> Iterator[ExpertRows]:
        return iter(self.arriving)

    def put_back(self, result: Tensor) -> None:
        """Results [R, D] of the piece that was taken last, which may start to travel now; of a
        `RowPlan`'s tokens [T, D].
        """
        self.results.append(result)
