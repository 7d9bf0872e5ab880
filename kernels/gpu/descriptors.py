"""Tensors that the GPU copies by tile (TMA descriptors), where Triton and the tensor allow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None


def row_tiles(x_RI: Tensor, tile: Sequence[int]) -> Any:
    """Descriptor of rows [R, I] by tiles of `tile`, or None where there can be none."""
    return _made(x_RI, tile)


def weight_tiles(w_LIO: Tensor, depth: int, columns: int) -> tuple[Any, bool]:
    """(descriptor or None, transposed) of weights [L, I, O].

    Tiles of [1, depth, columns]; of a transposed view, whose memory is [L, O, I], tiles of
    [1, columns, depth].
    """
    if w_LIO.stride(2) == 1:
        return _made(w_LIO, (1, depth, columns)), False
    return _made(w_LIO.transpose(1, 2), (1, columns, depth)), True


def _made(x: Tensor, tile: Sequence[int]) -> Any:
    """TMA wants 16-byte addresses and strides, and a contiguous last dimension."""
    step = 16 // x.element_size()
    if TensorDescriptor is None or x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return None
    if any(stride % step or stride == 0 for stride in x.stride()[:-1]):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile))


def copies_tiles(tensor: Tensor, chip_copies: bool) -> bool:
    """Whether descriptors are worth making: the chip has TMA, and 2-byte or 4-byte values."""
    return chip_copies and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)
