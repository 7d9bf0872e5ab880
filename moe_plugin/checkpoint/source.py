"""Checkpoints as lazy sources of tensors.

Everything that reads a checkpoint is a `Source`: it knows names, shapes and data types of all
tensors and reads any slice of one of them. Everything that converts is a `View` of another source.
Everything that writes takes a source. So a conversion holds one slice in memory at a time.
"""

from __future__ import annotations

import itertools
import math
import pickle
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.trust import UntrustedFile
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short

# (field, name): field "model", or an optimizer field such as "exp_avg", "exp_avg_sq", "master"
Key = tuple[str, str]
Window = tuple[slice, ...]
MODEL = "model"
WEIGHTS = (MODEL, "criterion", "ema", "ema_fp32")  # fields that are no optimizer state
MODEL_ONLY = "model_only"  # of `Source.values`: optimizer state is left out on purpose
# what torch, pickle and zipfile raise for damaged files, and readers for values of other types
UNREADABLE = (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError, LookupError,
              AttributeError, AssertionError, TypeError, ImportError, ArithmeticError, MemoryError,
              struct.error, zipfile.BadZipFile, zlib.error)


class CheckpointError(ValueError):
    """A checkpoint is missing, truncated or of another model: the message names file and remedy."""


@contextmanager
def refused_if_unreadable(what: str, remedy: str) -> Iterator[None]:
    """What a reader stumbles over, in files that may hold anything, is a `CheckpointError`.

    what: the file and what is wrong with it.
    """
    try:
        yield
    except (CheckpointError, UntrustedFile):
        raise
    except UNREADABLE as error:
        kind = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{what} ({kind}{short(error, 500)}); {remedy}") from error


def refuse_damaged(paths: Iterable[Path]) -> None:
    """`CheckpointError` that names the first of these files that is not what was written; files
    without a checksum, and those that are missing, are not verified.
    """
    for path in filter(Path.is_file, paths):
        with refused_if_unreadable(f"checkpoint file {str(path)!r} is damaged",
                                   "use another checkpoint"):
            checksums.verify(path)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor without its values.

    Attributes:
        shape: of the whole tensor; experts have all E on axis 0, whatever the files hold.
        dtype: as stored.
        keeps_float32: `cast` leaves it in float32 at least, see `checkpoint.precision`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    keeps_float32: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the values."""
        return self.numel * self.dtype.itemsize


def is_code(dtype: torch.dtype) -> bool:
    """Whether a data type holds codes of a quantization, which are numbers only together with their
    scales: floating point in a byte.
    """
    return dtype.is_floating_point and dtype.itemsize == 1


def full_window(shape: Sequence[int]) -> Window:
    """The slices that are the whole tensor."""
    return tuple(slice(0, size) for size in shape)


def check_window(window: Window | None, shape: Sequence[int]) -> Window:
    """The window with a start and a stop on every axis; axes that are missing at the end are whole.

    Raises:
        ValueError: it has more axes than the tensor, a step, or leaves the tensor.
    """
    given = window or ()
    if len(given) > len(shape):
        raise ValueError(f"a window of {len(given)} axes does not fit shape {tuple(shape)}")
    full = []
    for axis, size in enumerate(shape):
        part = given[axis] if axis < len(given) else slice(None)
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"window {part} does not fit axis {axis} of shape {tuple(shape)}: "
                             "must be within it, in steps of 1")
        full.append(slice(start, stop))
    return tuple(full)


def blocks(entry: TensorEntry, limit: int) -> Iterator[Window]:
    """Windows of at most `limit` bytes (one element at least) that give the whole tensor in the
    order of memory.
    """
    row, axis = entry.dtype.itemsize, len(entry.shape)
    while axis > 0 and row * entry.shape[axis - 1] <= limit:
        axis -= 1
        row *= entry.shape[axis]
    if axis == 0 or entry.numel == 0:
        yield full_window(entry.shape)
        return
    step, inner = max(1, limit // row), full_window(entry.shape[axis:])
    length = entry.shape[axis - 1]
    for outer in itertools.product(*map(range, entry.shape[:axis - 1])):
        ahead = tuple(slice(index, index + 1) for index in outer)
        for start in range(0, length, step):
            yield (*ahead, slice(start, min(start + step, length)), *inner)


def window_shape(window: Window) -> tuple[int, ...]:
    """The shape of what a window with starts and stops selects."""
    return tuple(part.stop - part.start for part in window)


class Source(ABC):
    """A checkpoint that is open for reading, by several threads where they want.

    Attributes:
        format: name of its format, as registered in `moe_plugin.checkpoint.formats.base`.
        entries: all tensors by key, as whole tensors.
        values: what is not a tensor, JSON-like where possible: "step", "settings", schedules,
            random states, optimizer groups.
        layers: prefix of the name of each MoE layer -> {"num_experts": E, ...}, as
            `reshard.moe_layers`; the experts' names start with the prefix and "experts.".
    """

    format: str
    entries: Mapping[Key, TensorEntry]
    values: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, int]]

    def read(self, key: Key, window: tuple[slice, ...] | None = None) -> Tensor:
        """The values of a tensor, or of a window of it; only they are read from the files.

        Args:
            window: one slice per axis; missing ones at the end, and None, are whole axes.
        Raises:
            CheckpointError: there is no such tensor, or its file is damaged.
            ValueError: the window does not fit.
        """
        if key not in self.entries:
            refuse_damaged(self.files())  # which may have another name for it
            raise CheckpointError(f"the {self.format} checkpoint has no tensor {key[1]!r} in "
                                  f"{key[0]!r}")
        entry = self.entries[key]
        checked = check_window(window, entry.shape)
        value = self._read(key, checked)
        if tuple(value.shape) != window_shape(checked) or value.dtype != entry.dtype:
            raise CheckpointError(
                f"{key[1]!r} in {key[0]!r} of the {self.format} checkpoint is {value.dtype} of "
                f"shape {tuple(value.shape)}, not {entry.dtype} of {window_shape(checked)}: the "
                "files are not of one checkpoint")
        return value

    @abstractmethod
    def _read(self, key: Key, window: Window) -> Tensor:
        """`read` of a known key and a checked window."""

    def tensor(self, key: Key) -> Derived:
        """A tensor that is not read yet."""
        return Derived(key, self.entries[key], lambda window: self.read(key, window))

    def decoded(self, dtype: torch.dtype) -> Source:
        """This source with weights that are computed as they are read (of quantized files) in
        another data type, without a rounding in between; everything else as it is.
        """
        return self

    def describe(self) -> Mapping[str, Any]:
        """For `moe-plugin inspect`: layout of the files (ranks, EP, TP, shards), step, settings."""
        return {}

    def files(self) -> Sequence[Path]:
        """The files of tensors; sealed ones are verified before a conversion."""
        return ()

    def unsealed(self) -> Sequence[Path]:
        """The files of tensors that have no checksum, so that damage in them goes unnoticed."""
        return [path for path in self.files() if checksums.seal_of(path) is None]

    def close(self) -> None:
        """Give files back that a reader keeps open."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Derived:
    """A tensor of a view: what it is called, what it is, and how a window of it is read.

    Attributes:
        read: takes a window with a start and a stop on every axis, returns the values.
    """

    key: Key
    entry: TensorEntry
    read: Callable[[Window], Tensor]

    def renamed(self, name: str) -> Derived:
        """The same tensor under another name of the same field."""
        return replace(self, key=(self.key[0], name))


class DerivedSource(Source):
    """A source made of tensors that can each be read by themselves.

    Args:
        derived: all tensors.
        format, values, layers: see `Source`.
        description, paths, unsealed: see `Source.describe`, `Source.files`, `Source.unsealed`.
    Raises:
        CheckpointError: two tensors have the same key.
    """

    def __init__(self, derived: Iterable[Derived], format: str, values: Mapping[str, Any],
                 layers: Mapping[str, Mapping[str, int]],
                 description: Mapping[str, Any] | None = None,
                 paths: Sequence[Path] = (), unsealed: Sequence[Path] | None = None) -> None:
        self.format, self.values, self.layers = format, values, layers
        self._description, self._paths, self._unsealed = description or {}, paths, unsealed
        self._derived: dict[Key, Derived] = {}
        for one in derived:
            if one.key in self._derived:
                raise CheckpointError(f"two tensors of the {format} checkpoint become "
                                      f"{one.key[1]!r} in {one.key[0]!r}")
            self._derived[one.key] = one
        self.entries = {key: one.entry for key, one in self._derived.items()}

    def _read(self, key: Key, window: Window) -> Tensor:
        return self._derived[key].read(window)

    def tensor(self, key: Key) -> Derived:
        return self._derived[key]

    def describe(self) -> Mapping[str, Any]:
        return self._description

    def files(self) -> Sequence[Path]:
        return self._paths

    def unsealed(self) -> Sequence[Path]:
        return super().unsealed() if self._unsealed is None else self._unsealed


class View(DerivedSource):
    """A source whose tensors are derived from another one's; a read asks its origin only for what
    it needs.

    Args:
        origin: closed with the view.
        derived: all tensors of the view.
        format, values, layers: None: the origin's.
    """

    def __init__(self, origin: Source, derived: Iterable[Derived], *, format: str | None = None,
                 values: Mapping[str, Any] | None = None,
                 layers: Mapping[str, Mapping[str, int]] | None = None) -> None:
        super().__init__(derived, origin.format if format is None else format,
                         origin.values if values is None else values,
                         origin.layers if layers is None else layers, origin.describe(),
                         origin.files())
        self.origin = origin

    def unsealed(self) -> Sequence[Path]:
        return self.origin.unsealed()

    def close(self) -> None:
        self.origin.close()


def filled(key: Key, shape: Sequence[int], dtype: torch.dtype, value: float = 0.0) -> Derived:
    """A tensor whose elements are all the same."""
    return Derived(key, TensorEntry(tuple(shape), dtype),
                   lambda window: torch.full(window_shape(window), value, dtype=dtype))


def in_memory(key: Key, tensor: Tensor) -> Derived:
    """A tensor in memory as one that is read."""
    values = tensor.detach()
    return Derived(key, TensorEntry(tuple(values.shape), values.dtype),
                   lambda window: values[window])


def transposed(one: Derived, order: Sequence[int]) -> Derived:
    """The tensor with its axes in another order, as `Tensor.permute`."""
    inverse = sorted(range(len(order)), key=lambda axis: order[axis])
    shape = tuple(one.entry.shape[axis] for axis in order)

    def read(window: Window) -> Tensor:
        return one.read(tuple(window[axis] for axis in inverse)).permute(*order)

    return Derived(one.key, replace(one.entry, shape=shape), read)


def part_of(one: Derived, window: Window) -> Derived:
    """A window of the tensor as a tensor of its own."""
    outer = check_window(window, one.entry.shape)

    def read(inner: Window) -> Tensor:
        return one.read(tuple(slice(at.start + part.start, at.start + part.stop)
                              for at, part in zip(outer, inner, strict=True)))

    return Derived(one.key, replace(one.entry, shape=window_shape(outer)), read)


def pieces_of(one: Derived, count: int, axis: int = 0) -> list[Derived]:
    """The tensor cut along an axis into `count` pieces of one size; a rest is left out."""
    size, before = one.entry.shape[axis] // count, (slice(None),) * axis
    return [part_of(one, (*before, slice(at * size, (at + 1) * size))) for at in range(count)]


def joined(parts: Sequence[Derived], axis: int) -> Derived:
    """Tensors joined along an axis, as `torch.cat`; named as the first.

    Raises:
        CheckpointError: their other axes or data types differ.
    """
    first, start, starts = parts[0], 0, []
    for one in parts:
        shapes = [part.entry.shape[:axis] + part.entry.shape[axis + 1:] for part in (first, one)]
        if shapes[0] != shapes[1] or one.entry.dtype != first.entry.dtype:
            raise CheckpointError(
                f"{one.key[1]!r} ({one.entry.dtype}, shape {one.entry.shape}) does not join "
                f"{first.key[1]!r} ({first.entry.dtype}, shape {first.entry.shape}) along axis "
                f"{axis}")
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


def every(one: Derived, first: int, step: int, axis: int) -> Derived:
    """Elements `first`, `first + step`, ... of the tensor along an axis; a rest is left out."""
    before, size = (slice(None),) * axis, one.entry.shape[axis] // step
    shape = (*one.entry.shape[:axis], size, *one.entry.shape[axis + 1:])

    def read(window: Window) -> Tensor:
        at = window[axis]
        wide = slice(at.start * step, at.stop * step)
        return one.read((*window[:axis], wide, *window[axis + 1:]))[(*before, slice(first, None,
                                                                                    step))]

    return Derived(one.key, replace(one.entry, shape=shape), read)


def interleaved(parts: Sequence[Derived], axis: int) -> Derived:
    """The reverse of `every`: elements of the parts, all of one shape, in turn along an axis; named
    as the first.
    """
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
    """Tensors of one shape on a new axis 0, as `torch.stack`; named as the first."""
    return joined([_with_axis(one) for one in parts], 0)


def _with_axis(one: Derived) -> Derived:
    entry = replace(one.entry, shape=(1, *one.entry.shape))

    def read(window: Window) -> Tensor:
        value = one.read(window[1:])
        return value[None] if window[0].stop > window[0].start else value[None][:0]

    return Derived(one.key, entry, read)


def item_of(one: Derived, index: int) -> Derived:
    """Element `index` of axis 0 as a tensor without that axis."""
    shape = one.entry.shape[1:]
    return Derived(one.key, replace(one.entry, shape=shape),
                   lambda window: one.read((slice(index, index + 1), *window))[0])


def cast(one: Derived, dtype: torch.dtype) -> Derived:
    """The tensor in another data type; in float32 at least where it stays there.

    Raises:
        CheckpointError: it has codes of a quantization, which no cast makes numbers of.
    """
    if is_code(one.entry.dtype):
        raise CheckpointError(
            f"tensor {one.key[1]!r} is {one.entry.dtype}: codes, which are numbers only together "
            f"with their scales, and do not become {dtype} by themselves; leave --dtype out, or "
            "write the checkpoint dequantized")
    kept = torch.promote_types(dtype, torch.float32) if one.entry.keeps_float32 else dtype
    return Derived(one.key, replace(one.entry, dtype=kept),
                   lambda window: one.read(window).to(kept))
