"""Rows in pages of one buffer: copies whose lengths only the device knows.

A buffer is [S + 1, P]: S slots of P elements, and one for what is not kept; `host` is another, in
memory of the host, whose slots have the numbers from S on. Which slots hold a tensor is its record,
int64 [M]: the slot of its i-th run of P elements, -1: none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.registry import op


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
