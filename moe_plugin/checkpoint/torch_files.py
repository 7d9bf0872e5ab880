"""Files of `torch.save`, tensor by tensor: their structure is read without their tensors, and
written before them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.file_workers import FileWorkers, read_strided
from moe_plugin.checkpoint.source import (
    CheckpointError,
    Derived,
    TensorEntry,
    Window,
    blocks,
    full_window,
    in_memory,
    refused_if_unreadable,
    window_shape,
)
from moe_plugin.utils import checksums
from moe_plugin.utils.checksums import FirstRead
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import begin_writing

BLOCK = 1 << 22  # bytes of a tensor in memory at a time, while it is written; fits in a cache
FLUSH = 1 << 26  # bytes after which the disk begins to write, while the next ones are read


class StoredTensor:
    """Where a tensor is in a file.

    Args:
        start: byte of its first element.
        stride: in elements; not negative.
        check: called before each read; see `checksums.FirstRead`.
    """

    def __init__(self, path: Path, start: int, shape: Sequence[int], stride: Sequence[int],
                 dtype: torch.dtype, check: Callable[[], None] = lambda: None) -> None:
        self.path, self.start, self.stride, self._check = path, start, tuple(stride), check
        self.entry = TensorEntry(tuple(shape), dtype)

    def read(self, window: Window) -> Tensor:
        """The values of a window, in memory of their own.

        Raises:
            CheckpointError: the file cannot be read, is damaged, or was cut short since it was
                opened.
        """
        first = self.start + self.entry.dtype.itemsize * sum(
            part.start * step for part, step in zip(window, self.stride, strict=True))
        try:
            self._check()
            with open(self.path, "rb", buffering=0) as file:
                return read_strided(file.fileno(), first, window_shape(window), self.stride,
                                    self.entry.dtype)
        except (OSError, EOFError, checksums.DamagedFile) as error:
            raise CheckpointError(f"checkpoint file {str(self.path)!r} cannot be read "
                                  f"({short(error)}); use another checkpoint") from error


def _place_of(path: Path, tensor: Tensor, part: tuple[int, int],
              check: Callable[[], None]) -> StoredTensor:
    """Where a tensor of `_structure` is in a file.

    Args:
        part: first byte and end of what `torch.save` wrote in the file.
    Raises:
        ValueError: it is not a dense tensor, or reaches beyond that.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"a tensor of {tensor.layout} in it is not dense")
    storage, item = tensor.untyped_storage(), tensor.dtype.itemsize
    ahead = tensor.storage_offset() * item
    start = part[0] + storage._checkpoint_offset + ahead  # see torch.load
    reach = sum((length - 1) * stride
                for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (reach + 1) * item if tensor.numel() else 0
    if ahead + nbytes > storage.nbytes() or start + nbytes > part[1]:
        raise ValueError("a tensor in it reaches beyond its end")
    if tensor.numel() * item > nbytes:  # a small file would fill a disk
        raise ValueError(f"a tensor in it has {tensor.numel()} elements in {nbytes} bytes")
    return StoredTensor(path, start, tensor.shape, tensor.stride(), tensor.dtype, check)


def _structure(load: Callable[..., Any]) -> Any:
    """What `load` gives, with tensors that know their places in the file instead of values."""
    if TorchVersion(torch.__version__) >= "2.13":
        return load(map_location="meta")
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode():  # slow to begin with, but all releases note places there
        return load()


def open_lazily(path: Path, allowed: Iterable[Any], what: str, trusted: bool = False,
                stream: Any = None, part: tuple[int, int] | None = None) -> Any:
    """What a file of `torch.save` holds, with a `Derived` in the place of every tensor; those of
    one storage and shape are read by one function.

    Args:
        trusted: unpickle classes of any kind.
        stream, part: where the file is one of several in another: its bytes, and where they begin
            and end there.
    Raises:
        ValueError: it has tensors that are not dense, or reach beyond the file. What `trust.load`
            raises.
    """
    def load(**options: Any) -> Any:
        file = path if stream is None else stream
        if trusted:
            return torch.load(file, weights_only=False, **options)
        return trust.load(file, allowed, what, **options)

    # a part of a file is verified with the file by who opened that
    check = FirstRead(path) if part is None else lambda: None
    return _lazily(path, _structure(load), part or (0, os.path.getsize(path)), check)


def open_mapping(path: Path, remedy: str, allowed: Iterable[Any] = (), trusted: bool = False,
                 check: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """`open_lazily` of a checkpoint file that holds a mapping.

    Args:
        remedy: what to do about a damaged file.
        check: raises `ValueError` where it is not what the format writes.
    Raises:
        CheckpointError: it is truncated, damaged or holds something else.
    """
    what = f"checkpoint file {str(path)!r}"
    with refused_if_unreadable(f"{what} cannot be read, it is truncated or damaged", remedy):
        state = open_lazily(path, allowed, what, trusted)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}, not a mapping")
        check(state)
    return state


def _lazily(path: Path, state: Any, part: tuple[int, int], check: Callable[[], None]) -> Any:
    known: dict[Any, StoredTensor] = {}

    def stored(tensor: Tensor) -> Derived:
        one = _place_of(path, tensor.detach(), part, check)
        one = known.setdefault((one.start, one.entry, one.stride), one)
        return Derived(("", ""), one.entry, one.read)

    return _each(state, Tensor, stored)


def read_all(value: Any) -> Any:
    """A copy of nested mappings, lists and tuples with the values of `Derived` tensors, in memory
    of their own.
    """
    def read(one: Derived) -> Tensor:
        return one.read(full_window(one.entry.shape)).contiguous()

    return _each(value, Derived, read)


def _each(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of nested mappings, lists and tuples in which values of a kind are changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each(entry, kind, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(entry, kind, change) for entry in value)
    return value


class SealedWriter:
    """Writes files as `torch.save` would, with `Derived` tensors read block by block; sealed.

    Two files are written at a time, where there are two cores. The disk takes what is written
    meanwhile: all are on it when the context ends. Tensors that are read by one function are stored
    once in a file.

    Args:
        advance: called with the number of bytes of tensors that were written, by several threads.
        at_once: files; None: see `FileWorkers`.
    """

    def __init__(self, advance: Callable[[int], None] = lambda _: None,
                 at_once: int | None = None) -> None:
        self._advance, self._workers = advance, FileWorkers(at_once)
        self._readers = ThreadPoolExecutor(self._workers.at_once)

    def write(self, path: Path, state: Any, done: Callable[[], None] = lambda: None) -> None:
        """Begin to write one file.

        Args:
            done: called when it is on the disk, by another thread.
        Raises:
            OSError: the disk is full, for example; also where a file before could not be written.
            CheckpointError: a file before could not be written, since its tensors cannot be read.
        """
        tensors: dict[Any, tuple[Derived, Tensor]] = {}

        def empty(one: Derived) -> Tensor:  # memory that is never touched
            if one.read not in tensors:
                tensors[one.read] = one, torch.empty(one.entry.shape, dtype=one.entry.dtype)
            return tensors[one.read][1]

        skeleton = _each(_each(state, Tensor, _in_memory()), Derived, empty)
        with torch.serialization.skip_data():
            torch.save(skeleton, path)
        written = _structure(lambda **options: trust.torch_load(path, weights_only=False,
                                                                **options))
        placed = _places(written, skeleton)
        order = sorted(((placed[id(fake)], one) for one, fake in tensors.values()),
                       key=lambda pair: pair[0])
        self.fill(path, order, done)

    def fill(self, path: Path, order: Sequence[tuple[int, Derived]],
             done: Callable[[], None] = lambda: None) -> None:
        """Begin to write tensors into a file that is there; `checksums.seal` is its end.

        Args:
            order: first byte of each, ascending.
        """
        self._workers.start(partial(self._make, path, order, done))

    def _make(self, path: Path, order: Sequence[tuple[int, Derived]],
              done: Callable[[], None]) -> Iterator[None]:
        with (open(path, "r+b", buffering=0) as file,
              ThreadPoolExecutor(1) as disk):  # ends before the file is closed
            checksums.seal(path, self._fill(file, _blocks(order, self._readers), disk))
            yield
            os.fsync(file.fileno())
        done()

    def _fill(self, file: io.FileIO, pieces: Iterator[tuple[int | None, memoryview]],
              disk: Executor) -> int:
        """Returns the checksum of the whole file."""
        size, at, crc, begun = os.path.getsize(file.name), 0, 0, 0
        for start, data in pieces:
            self._workers.check()
            if start is not None:
                at, crc = _keep(file, at, start, crc)
            file.seek(at)
            _write_all(file, data)
            at, crc = at + len(data), checksums.crc32(data, crc)
            self._advance(len(data))
            if at - begun >= FLUSH:  # the disk begins to take it, without a wait
                disk.submit(begin_writing, file.fileno(), begun, at - begun)
                begun = at
        return _keep(file, at, size, crc)[1]

    def __enter__(self) -> SealedWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._readers:
            self._workers.__exit__(*error)


def _blocks(order: Iterable[tuple[int, Derived]],
            reader: Executor) -> Iterator[tuple[int | None, memoryview]]:
    """The bytes of all tensors, with the place of each one's first; the next ones are read by
    another thread, while the caller sums and writes these.
    """
    ahead = None
    for start, one in order:
        for window in blocks(one.entry, BLOCK):
            reading = reader.submit(_bytes_of, one, window)
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead, start = (start, reading), None
    if ahead is not None:
        yield ahead[0], ahead[1].result()


def _in_memory() -> Callable[[Tensor], Derived]:
    """Gives tensors in memory as those in files are; one that comes again the same way."""
    known: dict[int, Derived] = {}

    def stored(tensor: Tensor) -> Derived:
        return known.setdefault(id(tensor), in_memory(("", ""), tensor))

    return stored


def _write_all(file: io.FileIO, data: memoryview) -> None:
    # a full disk may take a part, and says so only when the rest is written
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def _bytes_of(one: Derived, window: Window) -> memoryview:
    values = one.read(window).contiguous()
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())


def _keep(file: io.FileIO, at: int, until: int, crc: int) -> tuple[int, int]:
    """Sum what is between tensors, and there already; the new place and sum."""
    while at < until:
        file.seek(at)
        data = file.read(min(until - at, BLOCK))
        at, crc = at + len(data), checksums.crc32(data, crc)
    return at, crc


def _places(written: Any, skeleton: Any) -> dict[int, int]:
    """Where each tensor of a skeleton is in the file, by the tensor's id."""
    return {id(fake): there.untyped_storage()._checkpoint_offset
            for there, fake in zip(_tensors(written), _tensors(skeleton), strict=True)}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif type(value) in (list, tuple):
        for entry in value:
            yield from _tensors(entry)
