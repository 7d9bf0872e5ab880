"""Reading the files of `torch.distributed.checkpoint` by window.

    .metadata       a pickle: shape, data type and chunks of every tensor, and where each chunk is
    *.distcp        chunk after chunk, each a zip file of `torch.save`

A read takes the rows of the chunks that it needs from the files; nothing else is unpickled than
listed classes.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import RLock
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from moe_plugin.checkpoint import checksums, trust
from moe_plugin.checkpoint.formats.megatron.folders import METADATA
from moe_plugin.checkpoint.formats.megatron.trust import ALLOWED
from moe_plugin.checkpoint.read_windows import read_strided
from moe_plugin.checkpoint.source import (
    UNREADABLE,
    CheckpointError,
    TensorEntry,
    Window,
    window_shape,
)
from moe_plugin.messages import short
from moe_plugin.regular_files import check_input

_LOCAL_HEADER = 30  # bytes ahead of a zip member's name; the lengths of name and extra end it


class DistributedFiles:
    """The tensors and objects in a folder of `torch.distributed.checkpoint`.

    Args:
        folder: with `.metadata`.
        checksums_by_name: of its files, hexadecimal CRC-32; a file that has one is verified before
            its first read.
        trusted: unpickle any class in `.metadata`, which can run code.
    Raises:
        CheckpointError: a file is missing or damaged.
        UntrustedFile: `.metadata` names other classes than torch's own.
    """

    def __init__(self, folder: Path, checksums_by_name: Mapping[str, str] | None = None,
                 trusted: bool = False) -> None:
        self.folder = folder
        self._sums = dict(checksums_by_name or {})
        self._streams: dict[str, BinaryIO] = {}
        metadata = _read_metadata(folder / METADATA, trusted)
        self._metadata, self._places = metadata.state_dict_metadata, metadata.storage_data
        self._layouts: dict[Any, _Layout] = {}
        self._lock = RLock()  # of the streams' places, and what is known of files

    def tensors(self) -> dict[str, TensorEntry]:
        """All tensors by name."""
        return {name: TensorEntry(tuple(one.size), one.properties.dtype)
                for name, one in self._metadata.items() if isinstance(one, TensorStorageMetadata)}

    def objects(self) -> list[str]:
        """Names of what is not a tensor."""
        return [name for name, one in self._metadata.items()
                if isinstance(one, BytesStorageMetadata)]

    def file_names(self) -> list[str]:
        """Names of the files with tensors and objects."""
        return sorted({place.relative_path for place in self._places.values()})

    def chunks(self, name: str) -> int:
        """Number of chunks that a tensor is stored in."""
        return len(self._metadata[name].chunks)

    def read(self, name: str, window: Window) -> Tensor:
        """A window (with a start and a stop on every axis) of a tensor.

        Raises:
            CheckpointError: its chunks do not cover the window, or a file is damaged.
        """
        stored, shape = self._metadata[name], window_shape(window)
        found, out = 0, torch.empty(shape, dtype=stored.properties.dtype)
        for chunk in stored.chunks:
            inside = [slice(max(want.start, at), min(want.stop, at + size))
                      for want, at, size in zip(window, chunk.offsets, chunk.sizes, strict=True)]
            if any(part.start >= part.stop for part in inside):
                continue
            value = self._chunk(name, chunk, tuple(
                slice(part.start - at, part.stop - at)
                for part, at in zip(inside, chunk.offsets, strict=True)), out.dtype)
            out[tuple(slice(part.start - want.start, part.stop - want.start)
                      for part, want in zip(inside, window, strict=True))] = value
            found += value.numel()
        if found != math.prod(shape):
            raise CheckpointError(
                f"checkpoint {str(self.folder)!r}: the chunks of {name!r} have {found} of the "
                f"{math.prod(shape)} elements of {window}; it is incomplete, use another one")
        return out

    def read_object(self, name: str) -> bytes:
        """The bytes of an object, as `torch.save` wrote them."""
        place = self._places.get(MetadataIndex(name))
        if place is None:
            raise CheckpointError(f"checkpoint {str(self.folder)!r}: no file has the object "
                                  f"{name!r}; use another checkpoint")
        with self._lock:
            return self._object(name, place)

    def _object(self, name: str, place: Any) -> bytes:
        stream = self._open(place.relative_path)
        if place.offset + place.length > os.fstat(stream.fileno()).st_size:
            path = self.folder / place.relative_path
            raise CheckpointError(f"checkpoint file {str(path)!r} ends before the object {name!r}; "
                                  "use another checkpoint")
        stream.seek(place.offset)
        return stream.read(place.length)

    def close(self) -> None:
        """Close all files."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _chunk(self, name: str, chunk: Any, window: Window, dtype: torch.dtype) -> Tensor:
        place = self._places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise CheckpointError(f"checkpoint {str(self.folder)!r}: no file has the chunk of "
                                  f"{name!r} at {tuple(chunk.offsets)}; use another checkpoint")
        path = self.folder / place.relative_path
        try:
            with self._lock:
                stream = self._open(place.relative_path)
                key = (place.relative_path, place.offset)
                if key not in self._layouts:
                    self._layouts[key] = _layout(stream, place)
                layout = self._layouts[key]
            if layout.shape != tuple(chunk.sizes):
                raise ValueError(f"shape {layout.shape}, not {tuple(chunk.sizes)}")
            return layout.read(stream, window, dtype)
        except UNREADABLE as error:
            if isinstance(error, CheckpointError | trust.UntrustedFile):
                raise
            raise CheckpointError(f"checkpoint file {str(path)!r} is damaged at {name!r} "
                                  f"({short(error)}); use another checkpoint") from error

    def _open(self, name: str) -> BinaryIO:
        if name not in self._streams:
            path = self.folder / name
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise CheckpointError(f"checkpoint {str(self.folder)!r} names a file outside of "
                                      f"it: {short(name)}; use another checkpoint")
            try:
                check_input(path)
                wanted = self._sums.get(name)
                if wanted is not None and wanted != f"{checksums.crc_of(path):08x}":
                    raise CheckpointError(
                        f"checkpoint file {str(path)!r} has another checksum than when it was "
                        "written; restore the file or use another checkpoint")
                self._streams[name] = open(path, "rb", buffering=0)
            except OSError as error:
                raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read "
                                      f"({error.strerror or error}); use another checkpoint"
                                      ) from error
        return self._streams[name]


def _read_metadata(path: Path, trusted: bool) -> Metadata:
    try:
        check_input(path)
        with open(path, "rb") as stream:
            metadata = (pickle.load(stream) if trusted
                        else trust.Unpickler(stream, ALLOWED, str(path)).load())
        _check_metadata(metadata)
        return metadata
    except (trust.UntrustedFile, CheckpointError):
        raise
    except OSError as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read "
                              f"({error.strerror or error}); use another checkpoint") from error
    except UNREADABLE as error:
        raise CheckpointError(f"checkpoint file {str(path)!r} is damaged ({short(error)}); use "
                              "another checkpoint") from error


def _check_metadata(metadata: Metadata) -> None:
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(
            metadata.storage_data, dict):
        raise ValueError("it has no tensors")
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise ValueError("a tensor's name is not text")
        if isinstance(stored, TensorStorageMetadata):
            boxes = [stored.size, *(box for chunk in stored.chunks
                                    for box in (chunk.offsets, chunk.sizes))]
            if not isinstance(stored.properties.dtype, torch.dtype) or not all(
                    isinstance(box, tuple) and len(box) == len(stored.size)
                    and all(type(size) is int and size >= 0 for size in box) for box in boxes):
                raise ValueError(f"{short(name)} has no shape")
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(
                place.relative_path, str) or not all(
                    type(size) is int and size >= 0 for size in (place.offset, place.length)):
            raise ValueError("it does not say where tensors are")
        if place.__dict__.get("transform_descriptors"):
            raise ValueError("its files are compressed or encrypted")


class _Layout:
    """Where the values of one chunk are in its file.

    Attributes:
        start: first byte of the storage. shape, strides, offset: of the tensor in it, in elements.
    """

    def __init__(self, start: int, nbytes: int, shape: tuple[int, ...], strides: tuple[int, ...],
                 offset: int) -> None:
        self.start, self.nbytes = start, nbytes
        self.shape, self.strides, self.offset = shape, strides, offset

    def read(self, stream: BinaryIO, window: Window, dtype: torch.dtype) -> Tensor:
        shape = window_shape(window)
        first = self.offset + sum(part.start * step
                                  for part, step in zip(window, self.strides, strict=True))
        count = 1 + sum((size - 1) * step for size, step in zip(shape, self.strides, strict=True))
        if min(self.strides, default=0) < 0 or (first + count) * dtype.itemsize > self.nbytes:
            raise ValueError("a tensor leaves its storage")
        return read_strided(stream.fileno(), self.start + first * dtype.itemsize, shape,
                            self.strides, dtype)


def _layout(stream: BinaryIO, place: Any) -> _Layout:
    section = _Section(stream, place.offset, place.length)
    with zipfile.ZipFile(section) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        pickled = _TensorUnpickler(io.BytesIO(archive.read(members["data.pkl"]))).load()
        storage, offset, shape, strides = pickled
        member = members[f"data/{storage}"]
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    section.seek(member.header_offset)
    header = section.read(_LOCAL_HEADER)
    name, extra = struct.unpack("<HH", header[-4:])
    start = place.offset + member.header_offset + _LOCAL_HEADER + name + extra
    return _Layout(start, member.file_size, shape, strides, offset)


class _TensorUnpickler(pickle.Unpickler):
    """Reads where a tensor of `torch.save` lies, without making it: (storage's name, offset, shape,
    strides).
    """

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins for what a tensor's pickle names."""
        known = f"{module}.{name}"
        if known in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return _rebuilt
        if known == "torch._utils._rebuild_parameter":
            return lambda tensor, *_: tensor
        if known == "collections.OrderedDict":
            return dict
        if module in ("torch", "torch.storage") and name.endswith("Storage") or isinstance(
                torch.__dict__.get(name) if module == "torch" else None, torch.dtype):
            return name
        raise trust.UntrustedFile("a tensor of the checkpoint", [known])

    def persistent_load(self, saved: Any) -> str:
        """The storage's name."""
        return str(saved[2])


def _rebuilt(storage: str, offset: int, shape: Any, strides: Any, *_: Any) -> tuple[Any, ...]:
    sizes, steps = tuple(shape), tuple(strides)
    if not all(type(value) is int and value >= 0 for value in (offset, *sizes, *steps)):
        raise ValueError("a tensor's shape is not of numbers")
    return storage, offset, sizes, steps


class _Section(io.RawIOBase):
    """A part of a stream as a stream of its own."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Position within the part."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move within the part."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at,
                                    os.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of the part."""
        size = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._start + self._at)
        done = self._stream.readinto(memoryview(buffer)[:size])
        self._at += done
        return done


class Objects(Mapping[str, bytes]):
    """Objects of a checkpoint by name, read when asked for."""

    def __init__(self, files: DistributedFiles) -> None:
        self._files, self._names = files, dict.fromkeys(files.objects())

    def __getitem__(self, name: str) -> bytes:
        if name not in self._names:
            raise KeyError(name)
        return self._files.read_object(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
