"""The format "plain": the checkpoint folder of a run in plain PyTorch. The folder contains an index
and one file ("part") for each rank.

    part-00000-of-00004.pt ...   each rank's model state and optimizer state by parameter name
    index.json                   format version, number of parts, their sizes in bytes and their
                                 checksums, the caller's `extra` values
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moe_plugin.checkpoint.formats.base import (
    CheckpointSizes,
    Format,
    WriteProgress,
    formats,
    write_files,
)
from moe_plugin.checkpoint.formats.huggingface import format as huggingface
from moe_plugin.checkpoint.neutral import NEUTRAL, check_names
from moe_plugin.checkpoint.reshard import (
    GROUPS,
    bytes_of_ranks,
    columns_of_rank,
    moe_layers,
    ranked_source,
    sizes_of,
)
from moe_plugin.checkpoint.source import (
    MODEL,
    MODEL_ONLY,
    CheckpointError,
    Source,
    View,
    refused_if_unreadable,
)
from moe_plugin.checkpoint.torch_files import open_mapping
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import check_input, write_whole

VERSION = 1
INDEX = "index.json"
_NEUTRAL = ("model", "optimizer")  # values of a neutral source that are stored in `extra`


def part_name(rank: int, size: int) -> str:
    """Return the file name of a rank's part."""
    return f"part-{rank:05d}-of-{size:05d}.pt"


def write_index(folder: Path, parts: int, extra: Mapping[str, Any]) -> None:
    """Write the index of a checkpoint after all parts are complete."""
    paths = [folder / part_name(rank, parts) for rank in range(parts)]
    write_whole(folder / INDEX, checksums.seal_json({
        "version": VERSION, "parts": parts, "bytes": [path.stat().st_size for path in paths],
        "seals": [checksums.seal_of(path) for path in paths], "extra": dict(extra)}))


def read_index(source: Path) -> tuple[dict[str, Any], bool]:
    """Return the index of a checkpoint, and whether the index contains its own checksum.

    Raises:
        CheckpointError: If the index is missing, is damaged, or has an unsupported version.
    """
    try:
        check_input(source / INDEX)
        index, sealed = checksums.open_json((source / INDEX).read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError(f"it contains a {type(index).__name__}, but a mapping was expected")
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint at {str(source)!r}: index.json cannot be read ({error.strerror}); use "
            "the directory that save() wrote"
        ) from error
    except ValueError as error:  # not JSON, or not text
        raise CheckpointError(
            f"checkpoint {str(source)!r}: index.json is damaged ({short(error)}); use an older "
            "checkpoint") from error
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {str(source)!r} has version {short(index.get('version'))}, but this "
            f"release reads only version {VERSION}; convert it with the release that wrote it"
        )
    return _checked_index(source, index), sealed


def _checked_index(source: Path, index: dict[str, Any]) -> dict[str, Any]:
    parts, sizes = index.get("parts"), index.get("bytes")
    if type(parts) is not int or not isinstance(sizes, list) or len(sizes) != parts or parts < 1 \
            or not all(type(size) is int and size >= 0 for size in sizes) or "extra" not in index:
        raise CheckpointError(
            f"checkpoint {str(source)!r}: index.json is damaged (parts={short(parts)}, "
            f"bytes={short(sizes)}): it must contain 'parts', 'extra' and, in 'bytes', one size "
            "for each part; use an older checkpoint")
    seals = index.get("seals", [None] * parts)  # older checkpoints have no seals
    if not isinstance(seals, list) or len(seals) != parts:
        raise CheckpointError(f"checkpoint {str(source)!r}: index.json is damaged "
                              f"(seals={short(seals)}): 'seals' must contain one entry per part; "
                              "use an older checkpoint")
    return {**index, "seals": seals}


def check_part(folder: Path, index: Mapping[str, Any], rank: int) -> bool:
    """Verify the size and the checksum of a rank's part. Return true if the part has a checksum.

    Raises:
        CheckpointError: If the part is missing, truncated or damaged, or belongs to a different
            rank or checkpoint.
    """
    path, seal = _part_of_size(folder, index, rank), index["seals"][rank]
    with refused_if_unreadable(f"checkpoint file {str(path)!r} cannot be read",
                               "use an older checkpoint"):
        sealed = checksums.verify(path)
        if sealed and seal is not None and seal != checksums.seal_of(path):
            raise ValueError("the file belongs to a different rank or checkpoint than its index; "
                             "copy all files of the checkpoint again")
    return sealed


def _part_of_size(folder: Path, index: Mapping[str, Any], rank: int) -> Path:
    """Check the file size of a rank's part, and return the path of the file. Raise
    `CheckpointError` if the size differs from the size in the index.
    """
    path, size = folder / part_name(rank, index["parts"]), index["bytes"][rank]
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise CheckpointError(
            f"checkpoint file {str(path)!r} has {'no' if found is None else found} bytes, but its "
            f"index lists {short(size)} bytes: the file is truncated or missing; use an older "
            "checkpoint")
    return path


def open_folder(folder: Path, trusted: bool = False) -> Source:
    """Open the checkpoint in a folder. The checksums of the parts are not verified.

    Args:
        folder: the folder.
        trusted: whether to unpickle arbitrary classes. Unpickling can run code that is stored in
            the files.
    Raises:
        CheckpointError: If a file is missing or damaged.
    """
    index, _ = read_index(folder)
    paths = [_part_of_size(folder, index, rank) for rank in range(index["parts"])]
    parts = [open_mapping(path, "use an older checkpoint", (), trusted, _check_content)
             for path in paths]
    with refused_if_unreadable(f"checkpoint {str(folder)!r}: its parts do not match the format of "
                               "save(), "
                               "or belong to different checkpoints", "use an older checkpoint"):
        layers, optimizer = moe_layers(parts[0]["model"]), parts[0]["optimizer"]
        extra = index["extra"]
        values = {"extra": extra, "step": extra.get("step") if isinstance(extra, Mapping) else None,
                  GROUPS: None if optimizer is None else optimizer["groups"]}
        description = {"ranks": index["parts"], **sizes_of(layers)}
        return ranked_source("plain", list(map(_columns, parts)), values, description, paths)


def _check_content(part: Mapping[str, Any]) -> None:
    if not {"model", "optimizer"} <= set(part):
        raise ValueError("it has no model and optimizer state")


def _columns(part: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    columns: dict[str, dict[str, Any]] = {MODEL: part["model"]}
    for name, state in (part["optimizer"] or {}).get("by_name", {}).items():
        for field, value in state.items():
            columns.setdefault(field, {})[name] = value
    return columns


def part_of_rank(source: Source, rank: int, size: int,
                 shards: int | Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the content of one rank's part: the tensors and values that this rank stores."""
    columns = columns_of_rank(source, rank, size, shards)
    by_name: dict[str, Any] = {}
    for field, column in columns.items():
        if field != MODEL:
            for name, value in column.items():
                by_name.setdefault(name, {})[field] = value
    groups = None if source.values.get(MODEL_ONLY) else source.values.get(GROUPS)
    if groups is None and by_name:
        raise CheckpointError(
            f"the {source.format} checkpoint has optimizer state without the optimizer's groups; "
            "use --model-only to leave the optimizer state out")
    optimizer = None if groups is None else {"by_name": by_name, "groups": groups}
    return {"model": columns[MODEL], "optimizer": optimizer}


def to_neutral(source: Source) -> Source:
    """Return a view that uses framework-independent names. The source must use either
    framework-independent names or the names of `transformers`.

    If `extra` contains the key "hf_config", the source is assumed to use the names of
    `transformers`.
    """
    extra = source.values.get("extra")
    if isinstance(extra, Mapping) and "hf_config" in extra:
        return huggingface.to_neutral(View(source, map(source.tensor, source.entries), values={
            **source.values, "config": extra["hf_config"]}))
    check_names(name for _, name in source.entries)
    settings = {name: extra[name] for name in _NEUTRAL if name in extra} if isinstance(
        extra, Mapping) else {}
    return View(source, map(source.tensor, source.entries), format=NEUTRAL,
                values={**source.values, **settings})


def from_neutral(source: Source) -> Source:
    """Return a view of a framework-independent source in the plain format. The tensors of a plain
    checkpoint may have any names.
    """
    extra = {name: source.values[name] for name in ("step", *_NEUTRAL) if name in source.values}
    values, optimizer = {**source.values, "extra": extra}, source.values.get("optimizer")
    if optimizer is not None:  # a neutral source has a single group
        values[GROUPS] = [{name: value for name, value in optimizer.items() if name != "step"}]
    return View(source, map(source.tensor, source.entries), format="plain", values=values)


@formats.register("plain")
class PlainFormat(Format):
    """Folders that `moe_plugin.checkpoint.save` writes, with one part per expert-parallel rank."""

    name = "plain"
    views_as, views_of = {NEUTRAL: to_neutral}, {NEUTRAL: from_neutral}
    sizes = frozenset({"world", "ep", "shards"})

    def detect(self, path: Path, trust: bool = False) -> bool:
        try:
            return path.is_dir() and "parts" in read_index(path)[0]
        except CheckpointError:
            return False

    def open(self, path: Path, trust: bool = False) -> Source:
        return open_folder(path, trust)

    def write(self, source: Source, path: Path, layout: CheckpointSizes,
              progress: WriteProgress = WriteProgress()) -> None:
        size = self._size(source, layout)
        write_files(path, {
            part_name(rank, size): partial(part_of_rank, source, rank, size, layout.shards)
            for rank in range(size)}, progress)
        write_index(path, size, source.values.get("extra") or {"step": source.values.get("step")})
        progress.wrote(INDEX)

    def nbytes(self, source: Source, layout: CheckpointSizes) -> int:
        size = self._size(source, layout)
        return bytes_of_ranks(source, size, size)

    def _size(self, source: Source, layout: CheckpointSizes) -> int:
        return layout.one_group(
            source.describe().get("ranks", 1) if source.format == self.name else 1)
