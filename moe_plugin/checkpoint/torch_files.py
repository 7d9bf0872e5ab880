"""Reading and writing `torch.save` files tensor by tensor.

The structure of a file is read or written before the values of its tensors.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.derived import in_memory
from moe_plugin.checkpoint.file_workers import FileWorkers, read_strided
from moe_plugin.checkpoint.source import (
    CheckpointError,
    Derived,
    TensorEntry,
    Window,
    blocks,
    full_window,
    refused_if_unreadable,
    window_shape,
)
from moe_plugin.utils import checksums
from moe_plugin.utils.checksums import FirstRead
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import begin_writing

BLOCK = 1 << 22  # bytes of a tensor that are in memory at a time during a write; fits in a cache
FLUSH = 1 << 26  # after this many bytes the disk starts to write, while the next blocks are read


class StoredTensor:
    """The location of a tensor in a file.

    Args:
        path: path of the file.
        start: position of the tensor's first element in the file, in bytes.
        shape, stride: shape and strides of the tensor, in elements. Strides must not be negative.
        dtype: data type of the elements.
        check: function that is called before each read. See `checksums.FirstRead`.
    """

    def __init__(self, path: Path, start: int, shape: Sequence[int], stride: Sequence[int],
                 dtype: torch.dtype, check: Callable[[], None] = lambda: None) -> None:
        self.path, self.start, self.stride, self._check = path, start, tuple(stride), check
        self.entry = TensorEntry(tuple(shape), dtype)

    def read(self, window: Window) -> Tensor:
        """Read the values of a window of the tensor into new memory.

        Raises:
            CheckpointError: If the file cannot be read, is damaged, or was truncated while it was
                open.
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


def _stored_tensor(path: Path, tensor: Tensor, part: tuple[int, int],
                   check: Callable[[], None]) -> StoredTensor:
    """For a tensor that `_structure` returned, return its location in the file.

    Args:
        part: first and last position, in bytes from the start of the file, of the data that
            `torch.save` wrote.
    Raises:
        ValueError: If the tensor is not dense, or if it is not completely inside the range `part`
            of the file.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"it contains a tensor with the layout {tensor.layout}, which is not "
                         "dense")
    storage: Any = tensor.untyped_storage()
    item = tensor.dtype.itemsize
    ahead = int(tensor.storage_offset()) * item
    start = part[0] + storage._checkpoint_offset + ahead  # see torch.load
    reach = sum((length - 1) * stride
                for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    nbytes = (reach + 1) * item if tensor.numel() else 0
    if ahead + nbytes > storage.nbytes() or start + nbytes > part[1]:
        raise ValueError("it contains a tensor that extends beyond the end of the data")
    # expanding such a tensor could fill a disk from a small file
    if tensor.numel() * item > nbytes:
        raise ValueError(f"it contains a tensor with {tensor.numel()} elements in only {nbytes} "
                         "bytes")
    return StoredTensor(path, start, tensor.shape, tensor.stride(), tensor.dtype, check)


def _structure(load: Callable[..., Any]) -> Any:
    """Call `load` and return its result, with file positions instead of values in the tensors."""
    if TorchVersion(torch.__version__) >= "2.13":
        return load(map_location="meta")
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode():  # slow to enter, but works in all supported releases of torch
        return load()


def open_lazily(path: Path, allowed: Iterable[Any], what: str, trusted: bool = False,
                stream: Any = None, part: tuple[int, int] | None = None) -> Any:
    """Load a `torch.save` file without reading the values of its tensors. Each tensor is replaced
    by a `Derived`.

    Tensors with the same storage and shape have the same read function.

    Args:
        path: path of the file.
        allowed: classes that the file may contain. See `trust.load`.
        what: description of the file for error messages.
        trusted: whether to unpickle arbitrary classes.
        stream, part: for a file that is stored inside another file: a stream with its bytes, and
            the start and end of these bytes in the outer file.
    Raises:
        ValueError: If the file contains tensors that are not dense, or that extend beyond the end
            of the file.
        UntrustedFile: If the file contains classes that are not in `allowed` (see `trust.load`).
    """
    def load(**options: Any) -> Any:
        file = path if stream is None else stream
        if trusted:
            return torch.load(file, weights_only=False, **options)
        return trust.load(file, allowed, what, **options)

    # if the data is a part of a file, the function that opened the file has verified it
    check = FirstRead(path) if part is None else lambda: None
    return _with_stored_tensors(path, _structure(load), part or (0, os.path.getsize(path)), check)


def open_mapping(path: Path, remedy: str, allowed: Iterable[Any] = (), trusted: bool = False,
                 check: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """Load a checkpoint file that contains a mapping. See `open_lazily`.

    Args:
        path: path of the file.
        remedy: advice for the error message about a damaged file.
        allowed, trusted: see `open_lazily`.
        check: function that raises `ValueError` if the mapping is not valid in this format.
    Raises:
        CheckpointError: If the file is truncated, is damaged, or contains no valid mapping.
    """
    what = f"checkpoint file {str(path)!r}"
    with refused_if_unreadable(f"{what} cannot be read, it is truncated or damaged", remedy):
        state = open_lazily(path, allowed, what, trusted)
        if not isinstance(state, dict):
            raise ValueError(f"it contains a {type(state).__name__}, but a mapping was expected")
        check(state)
    return state


def _with_stored_tensors(path: Path, state: Any, part: tuple[int, int],
                         check: Callable[[], None]) -> Any:
    known: dict[Any, StoredTensor] = {}

    def stored(tensor: Tensor) -> Derived:
        location = _stored_tensor(path, tensor.detach(), part, check)
        location = known.setdefault((location.start, location.entry, location.stride), location)
        return Derived(("", ""), location.entry, location.read)

    return _map_values(state, Tensor, stored)


def read_all(value: Any) -> Any:
    """Copy nested mappings, lists and tuples, and read `Derived` tensors into new memory."""
    def read(tensor: Derived) -> Tensor:
        return tensor.read(full_window(tensor.entry.shape)).contiguous()

    return _map_values(value, Derived, read)


def _map_values(value: Any, type_: type, change: Callable[[Any], Any]) -> Any:
    """Copy nested mappings, lists and tuples, and apply `change` to values of type `type_`."""
    if isinstance(value, type_):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_values(entry, type_, change) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_values(entry, type_, change) for entry in value)
    return value


class SealedWriter:
    """A writer of `torch.save` files with checksums. `Derived` tensors are read one block at a
    time.

    Two files are written in parallel if two cores are available. Data is flushed to disk in the
    background. When the context ends, all files have been flushed to disk. If several tensors have
    the same read function, their values are stored only once in a file.

    Args:
        advance: function that is called with the number of tensor bytes that were just written.
            Several threads call this function.
        at_once: number of files that are written in parallel. Defaults to the number that
            `FileWorkers` chooses.
    """

    def __init__(self, advance: Callable[[int], None] = lambda _: None,
                 at_once: int | None = None) -> None:
        self._advance, self._workers = advance, FileWorkers(at_once)
        self._readers = ThreadPoolExecutor(self._workers.at_once)

    def write(self, path: Path, state: Any, done: Callable[[], None] = lambda: None) -> None:
        """Start writing one file.

        Args:
            path: path of the file.
            state: nested mappings, lists and tuples with tensors, `Derived` tensors and other
                values.
            done: function that another thread calls after the file has been flushed to disk.
        Raises:
            OSError: If this file or an earlier file could not be written, for example because the
                disk is full.
            CheckpointError: If an earlier file could not be written because its tensors cannot be
                read.
        """
        tensors: dict[Any, tuple[Derived, Tensor]] = {}

        def empty(one: Derived) -> Tensor:  # this memory is never touched
            if one.read not in tensors:
                tensors[one.read] = one, torch.empty(one.entry.shape, dtype=one.entry.dtype)
            return tensors[one.read][1]

        skeleton = _map_values(_map_values(state, Tensor, _in_memory()), Derived, empty)
        with torch.serialization.skip_data():
            torch.save(skeleton, path)
        written = _structure(lambda **options: trust.torch_load(path, weights_only=False,
                                                                **options))
        placed = _offsets_by_id(written, skeleton)
        order = sorted(((placed[id(fake)], one) for one, fake in tensors.values()),
                       key=lambda pair: pair[0])
        self.fill(path, order, done)

    def fill(self, path: Path, order: Sequence[tuple[int, Derived]],
             done: Callable[[], None] = lambda: None) -> None:
        """Start writing tensors into an existing file. The file is complete only after a call of
        `checksums.seal`.

        Args:
            path: path of the file.
            order: pairs (position in bytes, tensor to be written there), sorted by position.
            done: function that another thread calls after the file has been flushed to disk.
        """
        self._workers.start(partial(self._make, path, order, done))

    def _make(self, path: Path, order: Sequence[tuple[int, Derived]],
              done: Callable[[], None]) -> Iterator[None]:
        with (open(path, "r+b", buffering=0) as file,
              ThreadPoolExecutor(1) as disk):  # the thread ends before the file is closed
            checksums.seal(path, self._fill(file, _blocks(order, self._readers), disk))
            yield
            os.fsync(file.fileno())
        done()

    def _fill(self, file: io.FileIO, pieces: Iterator[tuple[int | None, memoryview]],
              disk: Executor) -> int:
        """Write blocks of data into a file, and return the checksum of the whole file."""
        size, at, crc, begun = os.path.getsize(file.name), 0, 0, 0
        for start, data in pieces:
            self._workers.check()
            if start is not None:
                at, crc = _sum_existing(file, at, start, crc)
            file.seek(at)
            _write_all(file, data)
            at, crc = at + len(data), checksums.crc32(data, crc)
            self._advance(len(data))
            if at - begun >= FLUSH:  # lets the disk start writing without waiting for it
                disk.submit(begin_writing, file.fileno(), begun, at - begun)
                begun = at
        return _sum_existing(file, at, size, crc)[1]

    def __enter__(self) -> SealedWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._readers:
            self._workers.__exit__(*error)


def _blocks(order: Iterable[tuple[int, Derived]],
            reader: Executor) -> Iterator[tuple[int | None, memoryview]]:
    """Yield the bytes of all tensors, one block at a time. The first block of each tensor is
    yielded together with the tensor's position in the file, all other blocks together with None.

    Another thread reads the next block while the caller processes the current block.
    """
    ahead: tuple[int | None, Future[memoryview]] | None = None
    for offset, tensor in order:
        start: int | None = offset
        for window in blocks(tensor.entry, BLOCK):
            reading = reader.submit(_bytes_of, tensor, window)
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead, start = (start, reading), None
    if ahead is not None:
        yield ahead[0], ahead[1].result()


def _in_memory() -> Callable[[Tensor], Derived]:
    """Return a function that wraps tensors in memory as `Derived` tensors. For the same tensor, the
    function always returns the same `Derived`.
    """
    known: dict[int, Derived] = {}

    def stored(tensor: Tensor) -> Derived:
        return known.setdefault(id(tensor), in_memory(("", ""), tensor))

    return stored


def _write_all(file: io.FileIO, data: memoryview) -> None:
    # On a full disk a write may store only a part; the error is raised by the next write.
    written = 0
    while written < len(data):
        written += file.write(data[written:])


def _bytes_of(tensor: Derived, window: Window) -> memoryview:
    values = tensor.read(window).contiguous()
    return values.reshape(-1).view(torch.uint8).numpy().data


def _sum_existing(file: io.FileIO, at: int, until: int, crc: int) -> tuple[int, int]:
    """Add the existing bytes between tensors to the checksum, and return (position, checksum)."""
    while at < until:
        file.seek(at)
        data = file.read(min(until - at, BLOCK))
        at, crc = at + len(data), checksums.crc32(data, crc)
    return at, crc


def _offsets_by_id(written: Any, skeleton: Any) -> dict[int, int]:
    """Return the file position of each tensor in a skeleton, keyed by the tensor's `id()`."""
    pairs: Any = zip(_tensors(written), _tensors(skeleton), strict=True)
    return {id(fake): stored.untyped_storage()._checkpoint_offset for stored, fake in pairs}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif type(value) in (list, tuple):
        for entry in value:
            yield from _tensors(entry)
