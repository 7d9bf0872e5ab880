"""Several tensors in one exchange: rows and their scales cost one message per peer, not two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLayout:
    """The parts of a packed row: (dtype, shape of a row, bytes of a row) of each tensor."""

    parts: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> PackedLayout:
        """The layout of these tensors, [R, ...] each. Raises: ValueError: their lengths differ."""
        if len({len(x) for x in tensors}) != 1:
            raise ValueError(
                f"tensors of lengths {[len(x) for x in tensors]} cannot travel together; all must "
                "have one row for each row of the others"
            )
        return cls(
            tuple((x.dtype, tuple(x.shape[1:]), math.prod(x.shape[1:]) * x.element_size())
                  for x in tensors))


def pack(tensors: Sequence[Tensor]) -> tuple[Tensor, PackedLayout]:
    """Tensors [R, ...] of any dtypes as bytes, uint8 [R, B], and the layout for `unpack`."""
    layout = PackedLayout.of(tensors)
    return torch.cat(
        [_as_bytes(x, size) for x, (_, _, size) in zip(tensors, layout.parts, strict=True)],
        dim=1), layout


def unpack(packed: Tensor, layout: PackedLayout) -> list[Tensor]:
    """The inverse of `pack` for any number of rows: uint8 [R, B] to tensors [R, ...]."""
    columns = packed.split([size for _, _, size in layout.parts], dim=1)
    return [
        _from_bytes(column, dtype, shape)
        for column, (dtype, shape, _) in zip(columns, layout.parts, strict=True)
    ]


def _as_bytes(x: Tensor, size: int) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8).view(
        x.shape[0], size) if x.numel() else x.new_empty((x.shape[0], size), dtype=torch.uint8)


def _from_bytes(column: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not column.numel():
        return column.new_empty((column.shape[0], *shape), dtype=dtype)
    # clone: the column of a single row is contiguous already, at an offset that may be no multiple
    # of the element size
    return column.clone(memory_format=torch.contiguous_format).view(-1).view(dtype).view(
        column.shape[0], *shape)
