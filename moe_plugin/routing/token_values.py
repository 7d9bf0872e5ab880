"""Checks of what a call says of each of its tokens: vocabulary indices, sequences."""

from __future__ import annotations

import torch
from torch import Tensor


def check_integers(name: str, values_T: Tensor, tokens: int) -> None:
    """`ValueError` unless `values_T` is an integer tensor of shape [tokens]; name: in messages."""
    if tuple(values_T.shape) != (tokens,):
        raise ValueError(f"{name} of shape {tuple(values_T.shape)} does not fit: must be "
                         f"{(tokens,)}, one for each token")
    dtype = values_T.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"{name} of dtype {dtype} does not fit: must be integers; pass "
                         f"{name}.long()")


def check_range(values: Tensor, first: int, last: int, message: str) -> None:
    """`ValueError` unless all integers are in first..last, on a CPU: a GPU would be waited for, and
    finds it when they are used as indices.

    Args:
        values: int, any shape. first, last: the smallest and the largest allowed value.
        message: `message.format(low, high)` with the values that there are.
    """
    if values.device.type != "cpu" or not values.numel() or torch.compiler.is_compiling():
        return
    low, high = int(values.min()), int(values.max())
    if not first <= low <= high <= last:
        raise ValueError(message.format(low, high))
