"""Checkpoints whose tensors are read lazily.

Every reader of a checkpoint is a `Source`. A source provides the name, shape and data type of each
tensor, and can read any slice of a tensor. A conversion is a `View` of another source. Every writer
accepts a source. A conversion therefore needs memory for only one slice at a time.
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
WEIGHTS = (MODEL, "criterion", "ema", "ema_fp32")  # fields that are not optimizer state
MODEL_ONLY = "model_only"  # key in `Source.values`: the optimizer state was left out on purpose
# raised by torch, pickle and zipfile for damaged files, and by readers for values of other types
UNREADABLE = (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError, LookupError,
              AttributeError, AssertionError, TypeError, ImportError, ArithmeticError, MemoryError,
              struct.error, zipfile.BadZipFile, zlib.error)


class CheckpointError(ValueError):
    """Raised if a checkpoint is unusable. The message names the file and states a remedy."""


@contextmanager
def refused_if_unreadable(what: str, remedy: str) -> Iterator[None]:
    """A context manager that converts errors from reading untrusted or damaged files to
    `CheckpointError`.

    what: beginning of the error message, with the file and the problem.
    """
    try:
        yield
    except (CheckpointError, UntrustedFile):
        raise
    except UNREADABLE as error:
        error_type = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
        raise CheckpointError(f"{what} ({error_type}{short(error, 500)}); {remedy}") from error


def refuse_damaged(paths: Iterable[Path]) -> None:
    """Raise `CheckpointError` if a file has a checksum and does not match it."""
    for path in filter(Path.is_file, paths):
        with refused_if_unreadable(f"checkpoint file {str(path)!r} is damaged",
                                   "use another checkpoint"):
            checksums.verify(path)


@dataclass(frozen=True)
class TensorEntry:
    """Shape and data type of a tensor.

    Attributes:
        shape: shape of the tensor with all experts. For expert tensors, axis 0 has the size E.
        dtype: data type in the checkpoint.
        keeps_float32: whether the tensor must stay in float32 (or a wider type) when `cast`
            converts it. See `name_table`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    keeps_float32: bool = False

    @property
    def numel(self) -> int:
        """Return the number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize


def is_code(dtype: torch.dtype) -> bool:
    """Return true for the data types of quantization codes: one-byte floats that require scales."""
    return dtype.is_floating_point and dtype.itemsize == 1


def full_window(shape: Sequence[int]) -> Window:
    """Return the window that selects a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def check_window(window: Window | None, shape: Sequence[int]) -> Window:
    """Complete a window, so that it has a start and a stop for every axis. Axes that the window
    omits are selected completely.

    Raises:
        ValueError: If the window has more axes than the tensor, has a step other than 1, or exceeds
            the tensor.
    """
    given = window or ()
    if len(given) > len(shape):
        raise ValueError(f"a window of {len(given)} axes is invalid for a tensor of shape "
                         f"{tuple(shape)}; use at most one slice per axis")
    full = []
    for axis, size in enumerate(shape):
        part = given[axis] if axis < len(given) else slice(None)
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(f"window {part} is invalid for axis {axis} of shape {tuple(shape)}: "
                             "it must lie within the axis and have step 1")
        full.append(slice(start, stop))
    return tuple(full)


def blocks(entry: TensorEntry, limit: int) -> Iterator[Window]:
    """Yield windows of at most `limit` bytes that together cover a tensor, in memory order."""
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
    """Return the shape of the values that a complete window selects."""
    return tuple(part.stop - part.start for part in window)


class Source(ABC):
    """A checkpoint that is open for reading. Several threads may read from a source at the same
    time.

    Attributes:
        format: name of the format, as registered in `moe_plugin.checkpoint.formats.base`.
        entries: shape and data type of each tensor. Each key consists of a field and a name.
        values: all values that are not tensors, such as "step", "settings", schedules, random
            states and parameter groups.
        layers: properties of each MoE layer, such as `{"num_experts": E}`, by the name prefix of
            the layer. The names of the expert tensors in a layer start with this prefix, followed
            by "experts.".
    """

    format: str
    entries: Mapping[Key, TensorEntry]
    values: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, int]]

    def read(self, key: Key, window: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor or a window of a tensor. Only these values are read from the files.

        Args:
            key: field and name of the tensor.
            window: one slice per axis. Trailing axes that are not listed are read completely.
                Defaults to the whole tensor.
        Raises:
            CheckpointError: If the tensor does not exist, or if a file is damaged.
            ValueError: If the window is not valid for the tensor.
        """
        if key not in self.entries:
            refuse_damaged(self.files())  # a damaged file may contain a wrong name
            raise CheckpointError(f"the {self.format} checkpoint has no tensor {key[1]!r} in "
                                  f"{key[0]!r}")
        entry = self.entries[key]
        checked = check_window(window, entry.shape)
        value = self._read(key, checked)
        if tuple(value.shape) != window_shape(checked) or value.dtype != entry.dtype:
            raise CheckpointError(
                f"{key[1]!r} in {key[0]!r} of the {self.format} checkpoint is {value.dtype} of "
                f"shape {tuple(value.shape)} instead of {entry.dtype} of {window_shape(checked)}: "
                "the files belong to different checkpoints")
        return value

    @abstractmethod
    def _read(self, key: Key, window: Window) -> Tensor:
        """Read the values of a window. The caller has checked that the tensor exists and that the
        window is valid. See `read`.
        """

    def tensor(self, key: Key) -> Derived:
        """Return a lazy tensor, whose values are read later."""
        return Derived(key, self.entries[key], lambda window: self.read(key, window))

    def decoded(self, dtype: torch.dtype) -> Source:
        """Return a view of this source that contains dequantized weights instead of quantized
        weights.

        When a quantized weight is read, it is converted directly to `dtype`. All other tensors are
        unchanged.
        """
        return self

    def describe(self) -> Mapping[str, Any]:
        """Return the parallel sizes, the step and the settings for `moe-plugin inspect`."""
        return {}

    def files(self) -> Sequence[Path]:
        """Return the files with tensors. A conversion verifies those that have checksums."""
        return ()

    def unsealed(self) -> Sequence[Path]:
        """Return the files that contain tensors but have no checksum. If such a file is damaged,
        the damage is not detected.
        """
        return [path for path in self.files() if checksums.seal_of(path) is None]

    def close(self) -> None:
        """Close all files that are open."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True)
class Derived:
    """A lazy tensor: a key, a shape, a data type, and a function that reads any window of it.

    Attributes:
        read: function that returns the values of a window. The window must have a start and a stop
            for every axis.
    """

    key: Key
    entry: TensorEntry
    read: Callable[[Window], Tensor]

    def renamed(self, name: str) -> Derived:
        """Return the same tensor with a different name in the same field."""
        return replace(self, key=(self.key[0], name))


class DerivedSource(Source):
    """A source that consists of lazy tensors that do not come from a common source.

    Args:
        derived: all tensors of the source.
        format, values, layers: attributes of the source, as described in `Source`.
        description, paths, unsealed: return values of the methods `describe`, `files` and
            `unsealed`.
    Raises:
        CheckpointError: If two tensors have the same key.
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
                raise CheckpointError(f"two tensors of the {format} checkpoint map to the same "
                                      f"name {one.key[1]!r} in {one.key[0]!r}")
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
    """A source whose tensors are derived from those of another source. Only the values that are
    needed are read from the other source.

    Args:
        origin: the source from which values are read. Closing the view also closes `origin`.
        derived: all tensors of the view.
        format, values, layers: attributes of the view. Each of these attributes defaults to the
            attribute of `origin`. Optional.
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
