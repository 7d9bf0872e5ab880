"""Lazy tensors that are computed from other tensors of a checkpoint when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_plugin.checkpoint.source import (
    CheckpointError,
    Derived,
    Key,
    TensorEntry,
    Window,
    check_window,
    is_code,
    window_shape,
)


def filled(key: Key, shape: Sequence[int], dtype: torch.dtype, value: float = 0.0) -> Derived:
    """Create a tensor whose elements all have the same value."""
    return Derived(key, TensorEntry(tuple(shape), dtype),
                   lambda window: torch.full(window_shape(window), value, dtype=dtype))


def in_memory(key: Key, tensor: Tensor) -> Derived:
    """Wrap a tensor in memory as a `Derived` tensor."""
    values = tensor.detach()
    return Derived(key, TensorEntry(tuple(values.shape), values.dtype),
                   lambda window: values[window])


def transposed(tensor: Derived, order: Sequence[int]) -> Derived:
    """Return the tensor with permuted axes, as `Tensor.permute` does."""
    inverse = sorted(range(len(order)), key=lambda axis: order[axis])
    shape = tuple(tensor.entry.shape[axis] for axis in order)

    def read(window: Window) -> Tensor:
        return tensor.read(tuple(window[axis] for axis in inverse)).permute(*order)

    return Derived(tensor.key, replace(tensor.entry, shape=shape), read)


def part_of(tensor: Derived, window: Window) -> Derived:
    """Return a window of the tensor as a separate tensor."""
    outer = check_window(window, tensor.entry.shape)

    def read(inner: Window) -> Tensor:
        return tensor.read(tuple(slice(at.start + part.start, at.start + part.stop)
                                 for at, part in zip(outer, inner, strict=True)))

    return Derived(tensor.key, replace(tensor.entry, shape=window_shape(outer)), read)


def pieces_of(tensor: Derived, count: int, axis: int = 0) -> list[Derived]:
    """Split an axis of the tensor, whose size is a multiple of `count`, into equal pieces."""
    size, before = tensor.entry.shape[axis] // count, (slice(None),) * axis
    return [part_of(tensor, (*before, slice(at * size, (at + 1) * size))) for at in range(count)]


def joined(parts: Sequence[Derived], axis: int) -> Derived:
    """Join tensors along an axis, as `torch.cat` does. The result has the key of the first tensor.

    Raises:
        CheckpointError: If the sizes of other axes or the data types differ.
    """
    first, start, starts = parts[0], 0, []
    for one in parts:
        shapes = [part.entry.shape[:axis] + part.entry.shape[axis + 1:] for part in (first, one)]
        if shapes[0] != shapes[1] or one.entry.dtype != first.entry.dtype:
            raise CheckpointError(
                f"{one.key[1]!r} ({one.entry.dtype}, shape {one.entry.shape}) cannot be joined "
                f"with {first.key[1]!r} ({first.entry.dtype}, shape {first.entry.shape}) along "
                f"axis {axis}; their data types and all other axes must be equal")
        starts.append(start)
        start += one.entry.shape[axis]
    shape = (*first.entry.shape[:axis], start, *first.entry.shape[axis + 1:])

    def read(window: Window) -> Tensor:
        want, found = window[axis], []
        for one, at in zip(parts, starts, strict=True):
            here = slice(max(want.start - at, 0), min(want.stop - at, one.entry.shape[axis]))
            if here.start < here.stop:
                found.append(one.read((*window[:axis], here, *window[axis + 1:])))
        if not found:
            return torch.empty(window_shape(window), dtype=first.entry.dtype)
        return found[0] if len(found) == 1 else torch.cat(found, axis)

    kept = any(one.entry.keeps_float32 for one in parts)
    return Derived(first.key, TensorEntry(shape, first.entry.dtype, kept), read)


def every(tensor: Derived, first: int, step: int, axis: int) -> Derived:
    """Return every `step`-th element along an axis, whose size is a multiple of `step`."""
    before, size = (slice(None),) * axis, tensor.entry.shape[axis] // step
    shape = (*tensor.entry.shape[:axis], size, *tensor.entry.shape[axis + 1:])

    def read(window: Window) -> Tensor:
        at = window[axis]
        wide = slice(at.start * step, at.stop * step)
        return tensor.read((*window[:axis], wide, *window[axis + 1:]))[(*before, slice(first, None,
                                                                                       step))]

    return Derived(tensor.key, replace(tensor.entry, shape=shape), read)


def interleaved(parts: Sequence[Derived], axis: int) -> Derived:
    """Interleave tensors of equal shape along an axis. The result has the first tensor's key."""
    whole, count, before = joined(parts, axis), len(parts), (slice(None),) * axis

    def read(window: Window) -> Tensor:
        want = window[axis]
        low, high = want.start // count, -(-want.stop // count)
        inner = (*window[:axis], slice(low, max(low, high)), *window[axis + 1:])
        value = torch.stack([one.read(inner) for one in parts], axis + 1).flatten(axis, axis + 1)
        start = low * count
        return value[(*before, slice(want.start - start, want.stop - start))]

    return Derived(whole.key, whole.entry, read)


def stacked(parts: Sequence[Derived]) -> Derived:
    """Stack tensors of equal shape along a new axis 0, as `torch.stack` does. The result has the
    key of the first tensor.
    """
    return joined([_with_axis(tensor) for tensor in parts], 0)


def _with_axis(tensor: Derived) -> Derived:
    entry = replace(tensor.entry, shape=(1, *tensor.entry.shape))

    def read(window: Window) -> Tensor:
        value = tensor.read(window[1:])
        return value[None] if window[0].stop > window[0].start else value[None][:0]

    return Derived(tensor.key, entry, read)


def item_of(tensor: Derived, index: int) -> Derived:
    """Return the element `index` along axis 0, without that axis."""
    shape = tensor.entry.shape[1:]
    return Derived(tensor.key, replace(tensor.entry, shape=shape),
                   lambda window: tensor.read((slice(index, index + 1), *window))[0])


def cast(one: Derived, dtype: torch.dtype) -> Derived:
    """Convert the tensor to a different data type. If the tensor has `keeps_float32` set, the new
    data type is at least as wide as float32.

    Raises:
        CheckpointError: If the tensor contains quantization codes, which cannot be cast.
    """
    if is_code(one.entry.dtype):
        raise CheckpointError(
            f"tensor {one.key[1]!r} is {one.entry.dtype}: it contains quantization codes, which "
            f"cannot be cast to {dtype} without their scales; leave --dtype out, or write the "
            "checkpoint dequantized")
    kept = torch.promote_types(dtype, torch.float32) if one.entry.keeps_float32 else dtype
    return Derived(one.key, replace(one.entry, dtype=kept),
                   lambda window: one.read(window).to(kept))
