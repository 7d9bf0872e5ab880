"""Files of a checkpoint folder: their sizes and checksums in `moe_plugin.json`, which has one
itself. Each rank sums and verifies its share of the files.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from moe_plugin.checkpoint import CheckpointError, checksums
from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.messages import short
from moe_plugin.regular_files import check_input, write_remedy

logger = logging.getLogger(__name__)
META = "moe_plugin.json"
_KEYS = {"files": dict, "model": dict, "layout": dict, "iteration": int, "consumed_samples": int}


def together(folder: str, work: Callable[[], None]) -> None:
    """Work on every rank that ends alike on all of them; a collective call.

    Raises:
        CheckpointError: it failed on a rank; with the reason and the remedy.
    """
    error: BaseException | None = None
    try:
        work()
    # of any kind: the other ranks must know; torch's own is not an `Exception`
    except (Exception, CheckpointException) as caught:
        error = caught
    failed = [text for text in gather("" if error is None else _not_written(folder, error)) if text]
    if failed:
        raise CheckpointError(failed[0]) from error


def cause(error: BaseException) -> tuple[int, BaseException]:
    """The rank that failed, and its error: torch's own is raised on all ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = min(error.failures.items())
        return rank, error
    return dist.get_rank(), error


def _not_written(folder: str, error: BaseException) -> str:
    rank, error = cause(error)
    return (f"checkpoint {folder!r} cannot be written on rank {rank}: {type(error).__name__}: "
            f"{short(error)}; older ones are untouched; "
            f"{write_remedy(error, os.path.dirname(folder))} (--save)")


def gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    return gather_objects(value, "the ranks' parts of a checkpoint")


def _share(names: list[str]) -> Iterator[str]:
    yield from sorted(names)[dist.get_rank() :: dist.get_world_size()]


def sums(folder: str) -> dict[str, str]:
    """Checksum of every file in a folder, by name; a collective call."""
    mine = {name: f"{checksums.crc_of(os.path.join(folder, name)):08x}"
            for name in _share(os.listdir(folder))}
    return {name: crc for part in gather(mine) for name, crc in part.items()}


def write_meta(folder: str, values: Mapping[str, Any], sums_by_name: Mapping[str, str]) -> None:
    """Write the description of a checkpoint with the sizes and checksums of its files."""
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in sorted(sums_by_name)}
    write_text(os.path.join(folder, META), checksums.seal_json(
        {**values, "files": sizes, "checksums": dict(sums_by_name)}))


def write_text(path: str, text: str) -> None:
    """Write a file whole or not at all, flushed to disk."""
    with open(path + ".part", "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(path + ".part", path)


def verified_meta(folder: str) -> dict[str, Any]:
    """The description of a checkpoint, once all its files are what was written; a collective call.

    Raises:
        CheckpointError: one is not; on every rank.
    """
    meta, sealed = _read_meta(folder)
    if not sealed and dist.get_rank() == 0:
        logger.warning("checkpoint %s was written without checksums: damage may go unnoticed; the "
                       "next save adds them", folder)
    try:
        text = next(filter(None, (_wrong(folder, name, meta) for name in _share([*meta["files"]]))),
                    "")
    except OSError as error:
        text = f"checkpoint {folder!r} cannot be read: {error}; use another checkpoint"
    for text in filter(None, gather(text)):
        raise CheckpointError(text)
    return meta


def _read_meta(folder: str) -> tuple[dict[str, Any], bool]:
    try:
        check_input(os.path.join(folder, META))
        with open(os.path.join(folder, META), encoding="utf-8") as stream:
            meta, sealed = checksums.open_json(stream.read())
        if not isinstance(meta, dict) or not all(
                isinstance(meta.get(key), kind) for key, kind in _KEYS.items()):
            raise ValueError("not a description of a checkpoint")
        if sealed and set(meta["checksums"]) != set(meta["files"]):
            raise ValueError("not a checksum for every file")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder!r} has no readable {META} ({short(error)}); it is incomplete or "
            "not of this script: use another one"
        ) from error
    return meta, sealed


def _wrong(folder: str, name: str, meta: Mapping[str, Any]) -> str:
    """What is wrong with a file; empty: nothing."""
    path, size = os.path.join(folder, name), meta["files"][name]
    found = os.path.getsize(path) if os.path.exists(path) else None
    if found != size:
        return (f"checkpoint {folder!r} is damaged: {name} "
                f"{'is missing' if found is None else f'has {found} bytes'}, must have {size} "
                "bytes; restore the file or use another checkpoint")
    wanted = meta.get("checksums", {}).get(name)
    if wanted is not None and wanted != f"{checksums.crc_of(path):08x}":
        return (f"checkpoint {folder!r} is damaged: {name} has another checksum than when it was "
                "written; restore the file or use another checkpoint")
    return ""


def older(root: str, iteration: int) -> list[int]:
    """Iterations of the other checkpoints before `iteration`, newest first; equal on all ranks."""
    names = os.listdir(root) if os.path.isdir(root) else []
    found = [int(name[1]) for name in map(re.compile(r"iter_(\d{7,})").fullmatch, names) if name]
    return gather(sorted((number for number in found if number < iteration), reverse=True))[0]
