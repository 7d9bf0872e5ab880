"""Exchanges whose answer is known: every row says where it comes from, where it goes, and its
place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIDTH = 3


def rows_of(source: int, counts: Sequence[Sequence[int]],
            dtype: torch.dtype = torch.float32) -> Tensor:
    """What rank `source` sends, [sum, 3] (source, destination, index); counts[i][j]: rows from i to
    j.
    """
    rows = [(source, target, index) for target, n in enumerate(counts[source])
            for index in range(n)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, WIDTH).to(dtype)


def expected_of(target: int, counts: Sequence[Sequence[int]],
                dtype: torch.dtype = torch.float32) -> Tensor:
    """What rank `target` must get."""
    rows = [(source, target, index) for source, row in enumerate(counts)
            for index in range(row[target])]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, WIDTH).to(dtype)


def column(counts: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Rows that `rank` gets from each."""
    return [row[rank] for row in counts]


def random_counts(size: int, seed: int, high: int = 5, zeros: float = 0.4) -> list[list[int]]:
    """A matrix with many zeros."""
    g = torch.Generator().manual_seed(seed)
    keep = torch.rand(size, size, generator=g) >= zeros
    return (torch.randint(0, high, (size, size), generator=g) * keep).tolist()
