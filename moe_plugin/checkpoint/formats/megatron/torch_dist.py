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
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from moe_plugin.checkpoint import trust
from moe_plugin.checkpoint.formats.megatron.common import COMMON, METADATA
from moe_plugin.checkpoint.source import (
    MODEL,
    CheckpointError,
    Derived,
    TensorEntry,
    Window,
    refused_if_unreadable,
    window_shape,
)
from moe_plugin.checkpoint.torch_files import open_lazily
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input

# that the pickles of a checkpoint may name
_METADATA, _PLANNER = ("torch.distributed.checkpoint.metadata.",
                       "torch.distributed.checkpoint.planner.")
ALLOWED = {
    *(_METADATA + name
      for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
                   "StorageMeta", "TensorProperties", "TensorStorageMetadata",
                   "_MEM_FORMAT_ENCODING")),
    *(_PLANNER + name
      for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem",
                   "WriteItemType")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    "torch.serialization._get_layout", "torch.Size", "collections.OrderedDict",
    # dataclasses with what torch's own hold and more, which 0.15 writes
    *("megatron.core.dist_checkpointing.strategies.torch." + name
      for name in ("MCoreMetadata", "MCoreSavePlan")),
}


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
        self._sums, self._lock = dict(checksums_by_name or {}), RLock()  # of what is known of files
        self._verified: set[str] = set()
        for name in {METADATA, COMMON} & set(self._sums):
            self.verify(name)
        metadata = _read_metadata(folder / METADATA, trusted)
        self._metadata, self._places = metadata.state_dict_metadata, metadata.storage_data
        self._chunks: dict[Any, Derived] = {}  # by file and place

    def tensors(self) -> dict[str, Derived]:
        """All tensors by name."""
        return {name: Derived((MODEL, name), TensorEntry(tuple(one.size), one.properties.dtype),
                              partial(self.read, name))
                for name, one in self._metadata.items() if isinstance(one, TensorStorageMetadata)}

    def objects(self) -> list[str]:
        """Names of what is not a tensor."""
        return [name for name, one in self._metadata.items()
                if isinstance(one, BytesStorageMetadata)]

    def file_names(self) -> list[str]:
        """Names of the files with tensors and objects."""
        return sorted({place.relative_path for place in self._places.values()})

    def unsealed(self) -> list[Path]:
        """The files without a checksum."""
        return [self.folder / name for name in self.file_names() if name not in self._sums]

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
            entry = TensorEntry(tuple(chunk.sizes), out.dtype)
            value = self._chunk(name, chunk.offsets, entry).read(tuple(
                slice(part.start - at, part.stop - at)
                for part, at in zip(inside, chunk.offsets, strict=True)))
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
        path, place = self._place(name, f"the object {name!r}")
        with open(path, "rb", buffering=0) as stream:
            stream.seek(place.offset)
            found = stream.read(place.length)
        if len(found) != place.length:
            raise CheckpointError(f"checkpoint file {str(path)!r} ends before the object {name!r}; "
                                  "use another checkpoint")
        return found

    def _chunk(self, name: str, offsets: Any, entry: TensorEntry) -> Derived:
        path, place = self._place(name, f"the chunk of {name!r} at {tuple(offsets)}", offsets)
        key = (path, place.offset)
        with refused_if_unreadable(f"checkpoint file {str(path)!r} is damaged at {name!r}",
                                   "use another checkpoint"):
            with self._lock:
                if key not in self._chunks:
                    self._chunks[key] = _open_chunk(path, place)
                found = self._chunks[key]
            if found.entry != entry:
                raise ValueError(f"{found.entry.dtype} of shape {found.entry.shape}, not "
                                 f"{entry.dtype} of shape {entry.shape}")
        return found

    def _place(self, name: str, what: str, offsets: Any = None) -> tuple[Path, Any]:
        """File and place of a chunk or object; the file is what was written."""
        place = self._places.get(MetadataIndex(name, offsets))
        if place is None:
            raise CheckpointError(f"checkpoint {str(self.folder)!r}: no file has {what}; use "
                                  "another checkpoint")
        with self._lock:
            if place.relative_path not in self._verified:
                self.verify(place.relative_path)
                self._verified.add(place.relative_path)
        return self.folder / place.relative_path, place

    def verify(self, name: str) -> None:
        """Raise `CheckpointError` if a file is outside of the folder, missing or damaged."""
        path = self.folder / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise CheckpointError(f"checkpoint {str(self.folder)!r} names a file outside of "
                                  f"it: {short(name)}; use another checkpoint")
        try:
            check_input(path)
            wanted = self._sums.get(name)
            with open(path, "rb"):  # it is there
                differs = wanted is not None and wanted != f"{checksums.crc_of(path):08x}"
        except OSError as error:
            raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read "
                                  f"({error.strerror or error}); use another checkpoint"
                                  ) from error
        if differs:
            raise CheckpointError(
                f"checkpoint file {str(path)!r} has another checksum than when it was "
                "written; restore the file or use another checkpoint")


def _open_chunk(path: Path, place: Any) -> Derived:
    with open(path, "rb") as stream:
        found = open_lazily(path, (), "a tensor of the checkpoint",
                            stream=_create_file_view(stream, place.offset, place.length),
                            part=(place.offset, place.offset + place.length))
    if not isinstance(found, Derived):
        raise ValueError(f"a {type(found).__name__}, not a tensor")
    return found


def _read_metadata(path: Path, trusted: bool) -> Metadata:
    with refused_if_unreadable(f"checkpoint file {str(path)!r} cannot be read or is damaged",
                               "use another checkpoint"):
        check_input(path)
        with open(path, "rb") as stream:
            metadata = (pickle.load(stream) if trusted
                        else trust.Unpickler(stream, ALLOWED, str(path)).load())
        _check_metadata(metadata)
    return metadata


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


def check_classes(folder: str) -> None:
    """Raise `UntrustedFile` if a pickle of a checkpoint, also one that the run does not read, names
    other classes than the listed ones and Megatron's own (`megatron.core.safe_globals`), and
    `CheckpointError` if a file is missing.
    """
    common = os.path.join(folder, COMMON)
    if os.path.exists(common):
        trust.check(common, common)
    if os.path.exists(os.path.join(folder, METADATA)):
        files = DistributedFiles(Path(folder))
        for name in files.file_names():
            files.verify(name)
        for name in files.objects():
            trust.check(io.BytesIO(files.read_object(name)), f"entry {name!r} of {folder}")
