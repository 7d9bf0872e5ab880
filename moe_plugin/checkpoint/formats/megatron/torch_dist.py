"""Read windows of tensors from `torch.distributed.checkpoint` files.

    .metadata       a pickle: shape, data type and chunks of every tensor, and where each chunk is
    *.distcp        chunk after chunk, each a zip file of `torch.save`

Of each chunk, only the rows that overlap the window are read. Only classes in a list of allowed
classes are unpickled.
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

# modules of classes that the pickles of a checkpoint may contain
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
    # subclasses of torch's dataclasses with more fields, which Megatron-core 0.15 writes
    *("megatron.core.dist_checkpointing.strategies.torch." + name
      for name in ("MCoreMetadata", "MCoreSavePlan")),
}


class DistributedFiles:
    """The tensors and objects in a folder that `torch.distributed.checkpoint` wrote.

    Args:
        folder: folder that contains the file `.metadata`.
        checksums_by_name: CRC-32 checksums of the files in the folder as hexadecimal strings, by
            file name. If a file has a checksum, the checksum is verified before the file is first
            read.
        trusted: whether to unpickle arbitrary classes in `.metadata`. Unpickling can run code that
            is stored in the file.
    Raises:
        CheckpointError: If a file is missing or damaged.
        UntrustedFile: If `.metadata` contains classes that are not from torch, and `trusted` is
            False.
    """

    def __init__(self, folder: Path, checksums_by_name: Mapping[str, str] | None = None,
                 trusted: bool = False) -> None:
        self.folder = folder
        # guards the state of the files below
        self._sums, self._lock = dict(checksums_by_name or {}), RLock()
        self._verified: set[str] = set()
        for name in {METADATA, COMMON} & set(self._sums):
            self.verify(name)
        metadata = _read_metadata(folder / METADATA, trusted)
        self._metadata, self._places = metadata.state_dict_metadata, metadata.storage_data
        self._chunks: dict[Any, Derived] = {}  # by file and position

    def tensors(self) -> dict[str, Derived]:
        """Return all tensors, keyed by name."""
        return {name: Derived((MODEL, name), TensorEntry(tuple(one.size), one.properties.dtype),
                              partial(self.read, name))
                for name, one in self._metadata.items() if isinstance(one, TensorStorageMetadata)}

    def objects(self) -> list[str]:
        """Return the names of all entries that are not tensors."""
        return [name for name, one in self._metadata.items()
                if isinstance(one, BytesStorageMetadata)]

    def file_names(self) -> list[str]:
        """Return the names of all files that contain tensors or objects."""
        return sorted({place.relative_path for place in self._places.values()})

    def unsealed(self) -> list[Path]:
        """Return the files without a checksum."""
        return [self.folder / name for name in self.file_names() if name not in self._sums]

    def read(self, name: str, window: Window) -> Tensor:
        """Read a window of a tensor. The window has a start and a stop for each axis.

        Raises:
            CheckpointError: If the chunks do not cover the whole window, or if a file is damaged.
        """
        stored, shape = self._metadata[name], window_shape(window)
        assert isinstance(stored, TensorStorageMetadata)
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
                f"checkpoint {str(self.folder)!r}: the chunks of {name!r} contain only {found} of "
                f"the {math.prod(shape)} elements of {window}; the checkpoint is incomplete, use "
                "another checkpoint")
        return out

    def read_object(self, name: str) -> bytes:
        """Return the bytes of an object. These bytes were written by `torch.save`."""
        path, place = self._locate(name, f"the object {name!r}")
        with open(path, "rb", buffering=0) as stream:
            stream.seek(place.offset)
            content = stream.read(place.length)
        if len(content) != place.length:
            raise CheckpointError(f"checkpoint file {str(path)!r} ends before the object {name!r}; "
                                  "use another checkpoint")
        return content

    def _chunk(self, name: str, offsets: Any, entry: TensorEntry) -> Derived:
        path, place = self._locate(name, f"the chunk of {name!r} at {tuple(offsets)}", offsets)
        key = (path, place.offset)
        with refused_if_unreadable(f"checkpoint file {str(path)!r} is damaged at {name!r}",
                                   "use another checkpoint"):
            with self._lock:
                if key not in self._chunks:
                    self._chunks[key] = _open_chunk(path, place)
                tensor = self._chunks[key]
            if tensor.entry != entry:
                raise ValueError(f"it contains {tensor.entry.dtype} of shape {tensor.entry.shape} "
                                 f"instead of {entry.dtype} of shape {entry.shape}")
        return tensor

    def _locate(self, name: str, what: str, offsets: Any = None) -> tuple[Path, Any]:
        """Verify the file with a chunk or an object, and return the file and the position in it."""
        place = self._places.get(MetadataIndex(name, offsets))
        if place is None:
            raise CheckpointError(f"checkpoint {str(self.folder)!r}: no file contains {what}; use "
                                  "another checkpoint")
        with self._lock:
            if place.relative_path not in self._verified:
                self.verify(place.relative_path)
                self._verified.add(place.relative_path)
        return self.folder / place.relative_path, place

    def verify(self, name: str) -> None:
        """Raise `CheckpointError` if a file is missing, is damaged, or is not inside the folder."""
        path = self.folder / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise CheckpointError(f"checkpoint {str(self.folder)!r} refers to a file outside of "
                                  f"its folder: {short(name)}; use another checkpoint")
        try:
            check_input(path)
            wanted = self._sums.get(name)
            with open(path, "rb"):  # fails if the file is missing
                differs = wanted is not None and wanted != f"{checksums.crc_of(path):08x}"
        except OSError as error:
            raise CheckpointError(f"checkpoint file {str(path)!r} cannot be read "
                                  f"({error.strerror or error}); use another checkpoint"
                                  ) from error
        if differs:
            raise CheckpointError(
                f"checkpoint file {str(path)!r} has a different checksum than when it was written; "
                "restore the file or use another checkpoint")


def _open_chunk(path: Path, place: Any) -> Derived:
    with open(path, "rb") as stream:
        tensor = open_lazily(path, (), "a tensor of the checkpoint",
                             stream=_create_file_view(stream, place.offset, place.length),
                             part=(place.offset, place.offset + place.length))
    if not isinstance(tensor, Derived):
        raise ValueError(f"it contains a {type(tensor).__name__}, but a tensor was expected")
    return tensor


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
        raise ValueError("it does not list any tensors")
    for name, stored in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            raise ValueError("the name of a tensor is not a string")
        if isinstance(stored, TensorStorageMetadata):
            boxes = [stored.size, *(box for chunk in stored.chunks
                                    for box in (chunk.offsets, chunk.sizes))]
            if not isinstance(stored.properties.dtype, torch.dtype) or not all(
                    isinstance(box, tuple) and len(box) == len(stored.size)
                    and all(type(size) is int and size >= 0 for size in box) for box in boxes):
                raise ValueError(f"entry {short(name)} has no valid shape or data type")
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(
                place.relative_path, str) or not all(
                    type(size) is int and size >= 0 for size in (place.offset, place.length)):
            raise ValueError("it does not contain the locations of the tensors")
        if place.__dict__.get("transform_descriptors"):
            raise ValueError("the files are compressed or encrypted, which is not supported; save "
                             "the checkpoint without storage transforms")


def check_classes(folder: str) -> None:
    """Check the classes in all files of a checkpoint, including files that a run does not read.

    Raises:
        UntrustedFile: If a pickle contains classes that are neither in the list of allowed classes
            nor in Megatron's list (`megatron.core.safe_globals`).
        CheckpointError: If a file of the checkpoint is missing.
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
