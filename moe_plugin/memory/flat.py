"""Several tensors in one flat buffer, so that one copy moves all of them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.utils.machine import pinned_buffer

ALIGNMENT = 256  # bytes; products of matrices may round otherwise at other alignments


@dataclass(frozen=True)
class FlatLayout:
    """Where tensors lie in a buffer of bytes.

    Attributes:
        shapes, dtypes: of the tensors.
        offsets: first byte of each.
        nbytes: of the buffer.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> FlatLayout:
        """The layout of tensors in their order."""
        offsets, end = [], 0
        for x in tensors:
            offsets.append(end)
            end += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        return cls(tuple(x.shape for x in tensors), tuple(x.dtype for x in tensors),
                   tuple(offsets), end)

    def views(self, flat_N: Tensor) -> list[Tensor]:
        """The tensors, as parts of a buffer [nbytes] of uint8 that starts at an aligned byte."""
        views = []
        for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True):
            part_N = flat_N[offset:offset + shape.numel() * dtype.itemsize]
            views.append(part_N.view(dtype).view(shape))
        return views

    def fill(self, flat_N: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to their places in a buffer."""
        with torch.no_grad():
            for view, x in zip(self.views(flat_N), tensors, strict=True):
                view.copy_(x)


def aligned_buffer(nbytes: int, device: torch.device | str,
                   pinned_for: torch.device | None = None) -> Tensor:
    """[nbytes] of uint8, not initialised, whose first byte is aligned.

    pinned_for: a GPU that reaches this host memory; None: none does.
    """
    if pinned_for is not None:
        return pinned_buffer((nbytes,), torch.uint8, pinned_for)
    if torch.device(device).type == "cpu" and nbytes:
        # not from the heap, where a small neighbour would keep a large buffer's memory
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)
    raw_N = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -raw_N.data_ptr() % ALIGNMENT
    return raw_N[skip:skip + nbytes]


def give_back_free_memory() -> None:
    """Let the C library return to the system what it keeps for later, where it can (glibc): it
    keeps freed gradients between small blocks that live.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def absent(like: Tensor) -> Tensor:
    """A tensor of this shape that takes no memory: one value, not a number where there is such."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)
