"""Files of `torch.save`, tensor by tensor: their structure is read without their tensors, and
written before them.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion

from moe_plugin.checkpoint import checksums, trust
from moe_plugin.checkpoint.source import Derived, Entry, Window, blocks, full_window

BLOCK = 1 << 25  # bytes of a tensor in memory at a time, while it is written
FLUSH = 1 << 26  # bytes after which the disk begins to write, while the next ones are read


class Stored:
    """Where a tensor is in a file.

    Args:
        path: the file.
        tensor: its shape, strides and place, without values.
        size: bytes of the file.
    Raises:
        ValueError: it is not a dense tensor, or reaches beyond the file.
    """

    def __init__(self, path: Path, tensor: Tensor, size: int) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ValueError(f"a tensor of {tensor.layout} in it is not dense")
        storage = tensor.untyped_storage()
        self.path, self.entry = path, Entry(tuple(tensor.shape), tensor.dtype)
        self.stride, item = tensor.stride(), tensor.dtype.itemsize
        self.start = storage._checkpoint_offset + tensor.storage_offset() * item  # see torch.load
        reach = sum((length - 1) * stride
                    for length, stride in zip(self.entry.shape, self.stride, strict=True))
        self.nbytes = (reach + 1) * item if self.entry.numel else 0
        within = tensor.storage_offset() * item + self.nbytes <= storage.nbytes()
        if not within or self.start + self.nbytes > size:
            raise ValueError("a tensor in it reaches beyond its end")

    def read(self, window: Window) -> Tensor:
        """The values of a window; the file's pages stay mapped while the result lives."""
        if not self.nbytes:
            return torch.empty([part.stop - part.start for part in window], dtype=self.entry.dtype)
        first, last = self._span(window)
        ahead = (self.start + first) % mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            # a private mapping: nothing that is done to the result reaches the file
            pages = mmap.mmap(file.fileno(), ahead + last - first, access=mmap.ACCESS_COPY,
                              offset=self.start + first - ahead)
        flat = torch.frombuffer(pages, dtype=torch.uint8, offset=ahead, count=last - first)
        if (self.start + first) % self.entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(self.entry.dtype).as_strided(
            [part.stop - part.start for part in window], self.stride)

    def _span(self, window: Window) -> tuple[int, int]:
        """First byte of a window and the byte behind its last, from the tensor's start."""
        item, first, last = self.entry.dtype.itemsize, 0, 1
        for part, stride in zip(window, self.stride, strict=True):
            first, last = first + part.start * stride, last + max(part.stop - 1, 0) * stride
        return first * item, max(first + 1, last) * item


def _structure(load: Callable[..., Any]) -> Any:
    """What `load` gives, with tensors that know their places in the file instead of values."""
    if TorchVersion(torch.__version__) >= "2.13":
        return load(map_location="meta")
    with FakeTensorMode():  # slow to begin with, but all releases note places there
        return load()


def open_lazily(path: Path, allowed: Iterable[Any], what: str, trusted: bool = False) -> Any:
    """What a file of `torch.save` holds, with a `Derived` in the place of every tensor; those of
    one storage and shape are read by one function.

    Args:
        allowed, what: see `trust.load`.
        trusted: unpickle classes of any kind.
    Raises:
        ValueError: it has tensors that are not dense, or reach beyond the file. What `trust.load`
            raises.
    """
    def load(**options: Any) -> Any:
        if trusted:
            return torch.load(path, weights_only=False, **options)
        return trust.load(path, allowed, what, **options)

    return _lazily(path, _structure(load))


def read_lazily(path: Path, load: Callable[[Path], Any]) -> Any:
    """`open_lazily` of a file that is read by another function: `load(path)`."""
    with FakeTensorMode():
        state = load(path)
    return _lazily(path, state)


def _lazily(path: Path, state: Any) -> Any:
    size, known = os.path.getsize(path), {}

    def stored(tensor: Tensor) -> Derived:
        one = Stored(path, tensor.detach(), size)
        one = known.setdefault((one.start, one.entry, one.stride), one)
        return Derived(("", ""), one.entry, one.read)

    return _each(state, Tensor, stored)


def read_all(value: Any, copy: bool = True) -> Any:
    """A copy of nested mappings, lists and tuples with the values of `Derived` tensors.

    Args:
        copy: in memory of their own; False: files may stay mapped while the values live.
    """
    def read(one: Derived) -> Tensor:
        found = one.read(full_window(one.entry.shape))
        return found.clone(memory_format=torch.contiguous_format) if copy else found

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


def write_sealed(path: Path, state: Any, advance: Callable[[int], None] = lambda _: None) -> None:
    """Write what `torch.save` would, with `Derived` tensors read block by block; sealed, flushed
    to disk. Tensors that are read by one function are stored once.

    Args:
        advance: called with the number of bytes of tensors that were written.
    """
    tensors: dict[Any, tuple[Derived, Tensor]] = {}

    def empty(one: Derived) -> Tensor:  # memory that is never touched
        if one.read not in tensors:
            tensors[one.read] = one, torch.empty(one.entry.shape, dtype=one.entry.dtype)
        return tensors[one.read][1]

    skeleton = _each(state, Derived, empty)
    with torch.serialization.skip_data():
        torch.save(skeleton, path)
    written = _structure(lambda **options: torch.load(path, weights_only=False, **options))
    placed = _places(written, skeleton)
    order = sorted(((placed[id(fake)], one) for one, fake in tensors.values()),
                   key=lambda pair: pair[0])
    _fill(path, order, advance)


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


def _fill(path: Path, order: list[tuple[int, Derived]], advance: Callable[[int], None]) -> None:
    size, at, crc = os.path.getsize(path), 0, 0
    with open(path, "r+b", buffering=0) as file, _Flusher(file.fileno()) as flusher:

        def keep(until: int) -> None:
            nonlocal at, crc
            while at < until:  # what is between tensors is there already
                file.seek(at)
                data = file.read(min(until - at, BLOCK))
                at, crc = at + len(data), zlib.crc32(data, crc)

        for start, one in order:
            keep(start)
            for window in blocks(one.entry, BLOCK):
                data = memoryview(one.read(window).contiguous().reshape(-1).view(torch.uint8)
                                  .numpy())
                file.seek(at)
                written = 0
                while written < len(data):
                    written += file.write(data[written:])
                at, crc = at + len(data), zlib.crc32(data, crc)
                flusher.wrote(len(data))
                advance(len(data))
        keep(size)
        file.seek(size)
        file.write(checksums.trailer(crc))


class _Flusher:
    """Lets the disk write in the background, and waits for all of it at the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._waiting = descriptor, 0
        self._pool, self._running = ThreadPoolExecutor(1), None

    def wrote(self, nbytes: int) -> None:
        """So many bytes are in the file."""
        self._waiting += nbytes
        if self._waiting >= FLUSH and (self._running is None or self._running.done()):
            self._waiting, self._running = 0, self._pool.submit(os.fsync, self._descriptor)

    def __enter__(self) -> _Flusher:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._pool:
            if kind is None:
                if self._running is not None:
                    self._running.result()  # raises what the disk said
                os.fsync(self._descriptor)
