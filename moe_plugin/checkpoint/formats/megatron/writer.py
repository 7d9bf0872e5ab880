"""Write Megatron's distributed checkpoints from a single process, without running Megatron.

    PATH/iter_0000100/__0_0.distcp ...         tensors, several hundred MB in each file
    PATH/iter_0000100/.metadata, common.pt, metadata.json, moe_plugin.json
    PATH/latest_checkpointed_iteration.txt

Tensors are read from the source and written one chunk at a time. Megatron can load the checkpoint
with any parallel sizes.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_plugin.checkpoint.formats.base import CheckpointSizes, WriteProgress
from moe_plugin.checkpoint.formats.megatron import common
from moe_plugin.checkpoint.formats.megatron.common import (
    BACKEND,
    COMMON,
    LATEST,
    META,
    METADATA,
    NATIVE,
)
from moe_plugin.checkpoint.source import (
    MODEL,
    MODEL_ONLY,
    CheckpointError,
    Key,
    Source,
    TensorEntry,
    Window,
    blocks,
    window_shape,
)
from moe_plugin.utils import checksums
from moe_plugin.utils.regular_files import write_whole

CHUNK_BYTES, FILE_BYTES = 1 << 25, 1 << 29
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
            "common_backend": "torch", "common_backend_version": 1}


@dataclass(frozen=True)
class _Piece:
    """A chunk of a tensor to be written. The chunk is a window of the tensor `key` of the source.
    In the checkpoint, the chunk is stored at the position `offsets` of the tensor `name`, whose
    shape is `shape`.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    key: Key
    window: Window
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, ...]:
        ahead = len(self.offsets) - len(self.window)
        return (1,) * ahead + window_shape(self.window)

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def write(source: Source, path: Path, layout: CheckpointSizes, progress: WriteProgress) -> Path:
    """Write a source that has Megatron's names, and return the folder of the written checkpoint.

    Args:
        source: a source with the format `megatron` or `megatron_native`.
        path: an existing folder.
        layout: parallel sizes. If `ep` is larger than 1, Megatron's own experts are assigned to a
            separate optimizer. All other sizes have no effect.
        progress: object to which the writer reports its progress.
    Raises:
        CheckpointError: If tensors with the same name in different layers have different shapes or
            data types.
        OSError: If a file cannot be written, for example because the disk is full.
    """
    kept = source.values.get("megatron") or {}
    iteration = int(source.values.get("step") or 0)
    folder = path / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    stacked = kept.get("stacked", _uniform(source.entries))
    master = kept.get("master") or common.MASTERS[1]
    pieces = list(_pieces(source.entries, stacked, master))
    objects = _objects(source, kept, stacked)
    _write_tensors(source, folder, pieces, objects, progress)
    state = _common(source, kept, layout)
    write_whole(folder / COMMON, lambda stream: torch.save(state, stream))
    write_whole(folder / BACKEND, json.dumps(_BACKEND))
    _write_meta(folder, source, kept, layout)
    write_whole(path / LATEST, str(iteration))
    for name in (COMMON, BACKEND, META):
        progress.wrote(f"{folder.name}/{name}")
    progress.wrote(LATEST)
    return folder


def _uniform(entries: Mapping[Key, TensorEntry]) -> bool:
    """Return true if all layers have the same tensors, so that Megatron stacks them."""
    kinds: dict[int, set[tuple[str, str, tuple[int, ...]]]] = {}
    for (field, name), entry in entries.items():
        rest, number = common.without_number(name)
        if number is not None:
            kinds.setdefault(number, set()).add((field, rest, entry.shape))
    found = list(kinds.values())
    return bool(found) and all(one == found[0] for one in found)


def _pieces(entries: Mapping[Key, TensorEntry], stacked: bool, master: str) -> Iterator[_Piece]:
    layers = len(common.layer_numbers(name for field, name in entries if field == MODEL))
    shapes: dict[str, tuple[Any, ...]] = {}
    ahead: tuple[int, ...]
    shape: tuple[int, ...]
    for key, entry in entries.items():
        rest, number = common.without_number(key[1])
        if stacked and number is not None:
            name, ahead = common.stored_name((key[0], rest), master), (number,)
            shape = (layers, *entry.shape)
        else:
            name, ahead, shape = common.stored_name(key, master), (), entry.shape
        if shapes.setdefault(name, (shape, entry.dtype)) != (shape, entry.dtype):
            raise CheckpointError(f"{key[1]!r} has shape {entry.shape} and {entry.dtype}, but "
                                  f"other layers have {shapes[name]}: a Megatron checkpoint needs "
                                  "the same shape and data type in all layers")
        for window in blocks(entry, CHUNK_BYTES):
            offsets = (*ahead, *(part.start for part in window))
            yield _Piece(name, shape, offsets, key, window, entry.dtype)


def _objects(source: Source, kept: Mapping[str, Any], stacked: bool) -> dict[str, bytes]:
    numbers = common.layer_numbers(name for field, name in source.entries if field == MODEL)
    native = source.format == NATIVE
    contents: dict[str, bytes] = {}
    if "objects" in kept:
        contents.update({name: read() for name, read in kept["objects"].items()
                         if (native or "mlp.experts." not in name) and not (
                          source.values.get(MODEL_ONLY) and name.startswith("optimizer."))})
    else:
        moe = common.layer_numbers(source.layers)
        tensors = (name for _, name in source.entries)
        contents.update(dict.fromkeys(common.module_objects(numbers, moe, tensors, stacked),
                                      common.object_bytes()))
    if native:
        empty = common.object_bytes()
        for name in common.expert_objects(source.layers, len(numbers), stacked):
            contents.setdefault(name, empty)
    return contents


def _write_tensors(source: Source, folder: Path, pieces: list[_Piece], objects: dict[str, bytes],
                   progress: WriteProgress) -> None:
    """Write tensors and objects in the format of `torch.distributed`'s `FileSystemWriter`."""
    places: dict[MetadataIndex, _StorageInfo] = {}
    indexes: list[Path] = []
    for number, content in enumerate(_files(pieces, objects)):
        file, index = folder / f"__{number}_0.distcp", folder / f"__{number}_0.json"
        common = [f"{folder.name}/{path.name}" for path in (file, index)]
        indexes.append(index)
        if not all(map(progress.keeps, common)):
            _write_file(file, index, content, source, objects, progress)
            for name in common:
                progress.wrote(name)
        places |= {MetadataIndex(name, offsets): _StorageInfo(written, at, length)
                   for name, offsets, written, at, length in json.loads(index.read_text())}
    metadata = metadata_of(pieces, objects)
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta(checkpoint_id=folder.name)
    metadata.version = "1.0.0"  # version of torch's format
    write_whole(folder / METADATA, lambda stream: pickle.dump(metadata, stream))
    progress.wrote(f"{folder.name}/{METADATA}")
    for index in indexes:
        index.unlink()


def _files(pieces: list[_Piece], objects: Mapping[str, bytes]) -> Iterator[list[str | _Piece]]:
    """For each file, yield its contents: names of objects, and chunks of tensors."""
    content: list[str | _Piece] = [*objects]
    size = sum(map(len, objects.values()))
    for piece in pieces:
        if content and size + piece.nbytes > FILE_BYTES:
            yield content
            content, size = [], 0
        content.append(piece)
        size += piece.nbytes
    if content:
        yield content


def _write_file(path: Path, index: Path, content: Iterable[str | _Piece], source: Source,
                objects: Mapping[str, bytes], progress: WriteProgress) -> None:
    """Write a file, and an index file with the positions of the objects and chunks in it."""
    rows: list[tuple[Any, ...]] = []
    with open(path, "wb") as stream:
        for one in content:
            start = stream.tell()
            if isinstance(one, str):
                stream.write(objects[one])
                progress.advance(len(objects[one]))
                rows.append((one, None, path.name, start, stream.tell() - start))
            else:
                value = source.read(one.key, one.window)
                torch.save(value.reshape(one.sizes).contiguous(), stream)
                progress.advance(one.nbytes)
                rows.append((one.name, one.offsets, path.name, start, stream.tell() - start))
        stream.flush()
        os.fsync(stream.fileno())
    write_whole(index, json.dumps(rows))


def metadata_of(pieces: list[_Piece], objects: Mapping[str, bytes]) -> Metadata:
    """Return torch's metadata for a checkpoint, that is, the position of each chunk and object."""
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in objects}
    for piece in pieces:
        stored = entries.setdefault(piece.name, TensorStorageMetadata(
            TensorProperties(piece.dtype), torch.Size(piece.shape), []))
        stored.chunks.append(ChunkStorageMetadata(torch.Size(piece.offsets),
                                                  torch.Size(piece.sizes)))
    return Metadata(entries)


def _common(source: Source, kept: Mapping[str, Any], layout: CheckpointSizes) -> dict[str, Any]:
    step = int(source.values.get("step") or 0)
    state = dict(kept.get("common") or {
        "iteration": step, "progress": {
            "iteration": step, "consumed_samples": int(source.values.get("consumed_samples", 0))
        }
    })
    if source.values.get(MODEL_ONLY):
        state.pop("optimizer", None)
    elif "common" not in kept and any(field != MODEL for field, _ in source.entries):
        mixed = any(field == common.MASTER for field, _ in source.entries)
        state["optimizer"] = common.new_optimizer(source.values.get("optimizer") or {}, mixed)
    if "optimizer" in state and source.layers:
        experts = [name for _, name in source.entries if "experts." in name]
        ep = layout.ep or (kept.get("layout") or {}).get("expert", 1)
        native = source.format == NATIVE
        state["optimizer"] = common.regrouped(
            state["optimizer"], own_optimizer=not native or ep > 1,
            biases=any(name.endswith(".bias") and ".experts.experts." in name
                       or name.rpartition(".")[2].startswith("b_") for name in experts))
    return state


def _write_meta(folder: Path, source: Source, kept: Mapping[str, Any],
                layout: CheckpointSizes) -> None:
    settings = source.values.get("settings") or {}
    meta = dict(kept.get("meta") or {})
    sizes = {name.name: name.stat().st_size for name in sorted(folder.iterdir())
             if name.name != META}
    sums = {name: f"{checksums.crc_of(folder / name):08x}" for name in sizes}
    values = {
        "model": meta.get("model") or _shape(settings), "settings": settings,
        "layout": meta.get("layout") or {}, "iteration": int(source.values.get("step") or 0),
        "consumed_samples": int(source.values.get("consumed_samples", 0)),
        "megatron_core": meta.get("megatron_core", ""), "files": sizes, "checksums": sums
    }
    write_whole(folder / META, checksums.seal_json(values))


def _shape(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known model settings that the training script compares with its own settings."""
    theirs = {"num_moe_experts": "num_experts", "gated_linear_unit": "swiglu"}
    same = ("num_layers", "hidden_size", "num_attention_heads", "moe_ffn_hidden_size",
            "add_bias_linear", "normalization")
    pairs = {**{name: name for name in same}, **theirs}
    return {name: settings[given] for name, given in pairs.items() if given in settings}
