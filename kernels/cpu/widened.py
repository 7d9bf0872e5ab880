"""Rows of 16 bits in float32, some at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_plugin.kernels.workspace import scratch

# Of one piece in float32, which stays in the cache; measured. A whole copy goes through memory
# twice, and where it is large through pages that the system clears first.
PIECE_BYTES = 2 << 20
PARTS = 4  # equal parts that a piece can be cut into, but for the last one


def widened(x_ND: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(span, x[span] in `dtype`), piece after piece of a CPU tensor, all in the same memory.

    x_ND: [N, D].
    """
    rows, width = x_ND.shape
    size = max(1, PIECE_BYTES // max(1, width * dtype.itemsize))
    if size > PARTS:
        size -= size % PARTS
    memory_MD = scratch("widened", (min(size, rows), width), x_ND, dtype)
    for start in range(0, rows, size):
        span = slice(start, min(rows, start + size))
        yield span, memory_MD[:span.stop - start].copy_(x_ND[span])
