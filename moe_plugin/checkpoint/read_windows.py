"""Tensors in files that are read, not mapped: a file that somebody cuts short meanwhile is an
error, where a map of it would end the process (SIGBUS).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_plugin.utils.regular_files import read_at

SPAN = 1 << 20  # bytes that are read at once where they are not all wanted
GAP = 1 << 16  # bytes that take longer to read than another call for those behind them


def read_strided(file: int, start: int, shape: Sequence[int], stride: Sequence[int],
                 dtype: torch.dtype) -> Tensor:
    """A tensor of a file, with the file's order of axes, in memory of its own.

    Args:
        file: an open file's descriptor.
        start: byte of the first element.
        shape, stride: of the tensor, in elements; strides are not negative.
    Raises:
        EOFError: the file ends before the tensor does.
        OSError: it cannot be read.
    """
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    axis = max(range(len(shape)), key=lambda at: (shape[at] > 1, stride[at]), default=0)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    wanted, item = torch.Size(shape).numel(), dtype.itemsize
    step = stride[axis] if shape else 0
    inner = reach - (shape[axis] - 1) * step if shape else reach  # of one index of the axis
    apart = (step - inner) * item > GAP
    if reach <= wanted or (reach * item <= SPAN and not apart):
        return _read_span(file, start, reach, dtype).as_strided(tuple(shape), tuple(stride))
    made = _in_order(shape, stride, dtype)
    count = 1 if apart or not step else max(1, (SPAN // item - inner) // step + 1)
    for first in range(0, shape[axis], count):
        size = min(count, shape[axis] - first)
        part = (*shape[:axis], size, *shape[axis + 1:])
        made.narrow(axis, first, size).copy_(
            read_strided(file, start + first * step * item, part, stride, dtype))
    return made


def _in_order(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor whose axes follow each other as they do in the file."""
    order = sorted(range(len(shape)), key=lambda at: -stride[at])
    made = torch.empty([shape[at] for at in order], dtype=dtype)
    return made.permute([order.index(at) for at in range(len(shape))])


def _read_span(file: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """So many elements that follow each other."""
    # not torch.empty: of memory that it asks for in multiples of 64 bytes, glibc before 2.38 uses
    # little again, and a conversion holds three times as much
    memory = np.empty(count * dtype.itemsize, np.uint8)
    if missing := read_at(file, memoryview(memory), start):
        raise EOFError(f"it ends {missing} bytes before the end of a tensor: it was cut short while"
                       " it was read")
    return torch.from_numpy(memory).view(dtype)
