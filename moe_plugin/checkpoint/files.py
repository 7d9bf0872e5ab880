"""Checkpoints of plain PyTorch training: a directory, written completely or not at all, read at any
number of ranks.

    part-00000-of-00004.pt ...   each rank's model state and optimizer state by parameter name
    index.json                   format version, number of parts, their sizes in bytes, the caller's
    `extra` values

Every file has a checksum (`moe_plugin.checkpoint.checksums`), verified before anything is loaded.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint import checksums
from moe_plugin.checkpoint.reshard import merge, moe_layers, split
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.comm.base import Comm
from moe_plugin.comm.local import LocalComm
from moe_plugin.messages import short
from moe_plugin.regular_files import check_input, write_remedy

logger = logging.getLogger(__name__)

VERSION = 1
# what torch.load raises for a damaged file
_UNREADABLE = (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError, LookupError,
               AttributeError, AssertionError, TypeError, ImportError, ArithmeticError)


def save(directory: str | os.PathLike[str], model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None, comm: Comm | None = None,
         extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint; all ranks of `comm` (the expert-parallel group) call it.

    Everything is written next to the target and moved into place at the end, so that a killed run
    leaves either the old or the new checkpoint complete.

    Args:
        extra: JSON values of the caller (step, seed, ...), equal on all ranks.
    Raises:
        CheckpointError: a rank could not write; on every rank.
    """
    comm = comm or LocalComm()
    target = Path(directory)
    scratch = target.with_name(target.name + ".writing")
    with _together(comm, target):
        if comm.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
    with _together(comm, target):
        state = {"model": model.state_dict(), "optimizer": _optimizer_state(model, optimizer)}
        checksums.write_sealed(scratch / _part(comm.rank, comm.size),
                               lambda stream: torch.save(state, stream))
    with _together(comm, target):
        if comm.rank == 0:
            sizes = [(scratch / _part(rank, comm.size)).stat().st_size for rank in range(comm.size)]
            index = {
                "version": VERSION, "parts": comm.size, "bytes": sizes, "extra": dict(extra or {})
            }
            _write_text(scratch / "index.json", checksums.seal_json(index))
            _move_into_place(scratch, target)


@contextmanager
def _together(comm: Comm, target: Path) -> Iterator[None]:
    """A step that ends alike on all ranks: a failure of one is an error on all that names it."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # of any kind: the other ranks must know
        error = caught
    failed = [
        rank for rank, bad in enumerate(
            comm.agree_max(
                [float(error is not None and rank == comm.rank) for rank in range(comm.size)]))
        if bad
    ]
    if error is not None:
        raise CheckpointError(
            f"checkpoint {str(target)!r}: rank {comm.rank} could not write its part: "
            f"{type(error).__name__}: {error}; an older checkpoint there is untouched; "
            f"{write_remedy(error, target.parent)}") from error
    if failed:
        raise CheckpointError(
            f"checkpoint {str(target)!r}: not written, because of an error on rank(s) "
            f"{', '.join(map(str, failed))}; see their logs")


def load(directory: str | os.PathLike[str], model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None,
         comm: Comm | None = None) -> dict[str, Any]:
    """Read a checkpoint into this rank's model and optimizer; returns `extra`.

    Any number of ranks may have written it.

    Nothing is changed unless everything could be read.

    Raises:
        CheckpointError: missing, truncated, or of another model or expert count.
    """
    comm = comm or LocalComm()
    source, index, parts = _read(Path(directory))
    with _as_saved(source):
        layers = moe_layers(parts[0]["model"])
        mine = moe_layers(model.state_dict())
        _check_layers(source, layers, mine)
        shards = {prefix: origin["shards"] for prefix, origin in mine.items() if "shards" in origin}
        state = split(merge([part["model"] for part in parts]), comm.rank, comm.size, shards=shards)
        _check_tensors(source, state, model.state_dict())
        if optimizer is not None:
            restored = _split_optimizer([part["optimizer"] for part in parts], layers, comm, shards)
            _check_optimizer(source, restored, model, optimizer)
            _load_optimizer(restored, model, optimizer)
        model.load_state_dict(state)
    return index["extra"]


@contextmanager
def _as_saved(source: Path) -> Iterator[None]:
    """Values of other types or shapes than `save` writes are a `CheckpointError`."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"checkpoint {str(source)!r}: {short(error, 500)}") from error
    except _UNREADABLE as error:
        raise CheckpointError(
            f"checkpoint {str(source)!r} holds something else than save() writes "
            f"({type(error).__name__}: {short(error)}); use another checkpoint") from error


def _part(rank: int, size: int) -> str:
    return f"part-{rank:05d}-of-{size:05d}.pt"


def _write_text(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _move_into_place(scratch: Path, target: Path) -> None:
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(scratch, target)
    shutil.rmtree(old, ignore_errors=True)


def _read(target: Path) -> tuple[Path, dict[str, Any], list[dict[str, Any]]]:
    """Folder, index and parts of the checkpoint; of its predecessor where a save was killed before
    it removed that one, and the checkpoint is missing or damaged.
    """
    old = target.with_name(target.name + ".old")
    if not old.exists():
        return target, *_read_folder(target)
    if not target.exists():
        return old, *_read_folder(old)
    try:
        return target, *_read_folder(target)
    except CheckpointError as error:
        found = old, *_read_folder(old)
        logger.warning("%s; the older one in %s is loaded", error, old)
        return found


def _read_folder(source: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    index, sealed = _read_index(source)
    parts = []
    for rank, size in enumerate(index["bytes"]):
        part, part_sealed = _read_part(source / _part(rank, index["parts"]), size)
        parts.append(part)
        sealed = sealed and part_sealed
    if not sealed:
        logger.warning("checkpoint %s was written without checksums: damage may go unnoticed; the "
                       "next save adds them", source)
    return index, parts


def _read_index(source: Path) -> tuple[dict[str, Any], bool]:
    try:
        check_input(source / "index.json")
        index, sealed = checksums.open_json((source / "index.json").read_text(encoding="utf-8"))
        if not isinstance(index, dict):
            raise ValueError(f"a {type(index).__name__}, not a mapping")
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint at {str(source)!r}: index.json cannot be read ({error.strerror}); give "
            "the directory that save() wrote"
        ) from error
    except ValueError as error:  # not JSON, or not text
        raise CheckpointError(
            f"checkpoint {str(source)!r}: index.json is damaged ({short(error)}); use an older "
            "checkpoint") from error
    if index.get("version") != VERSION:
        raise CheckpointError(
            f"checkpoint {str(source)!r} has version {short(index.get('version'))}, this release "
            f"reads {VERSION}"
        )
    return _checked_index(source, index), sealed


def _checked_index(source: Path, index: dict[str, Any]) -> dict[str, Any]:
    parts, sizes = index.get("parts"), index.get("bytes")
    if type(parts) is not int or not isinstance(sizes, list) or len(sizes) != parts or parts < 1 \
            or not all(type(size) is int and size >= 0 for size in sizes) or "extra" not in index:
        raise CheckpointError(
            f"checkpoint {str(source)!r}: index.json is damaged (parts={short(parts)}, "
            f"bytes={short(sizes)} and extra must be there, with one size for each part); use an "
            "older checkpoint")
    return index


def _read_part(path: Path, size: int) -> tuple[dict[str, Any], bool]:
    """Content of a part, and whether the file is sealed."""
    found = path.stat().st_size if path.exists() else None
    if found != size:
        raise CheckpointError(
            f"checkpoint file {str(path)!r} has {'no' if found is None else found} bytes, its "
            f"index says {size}: it is truncated or "
            "missing; use an older checkpoint")
    try:
        sealed = checksums.verify(path)
        part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(part, dict) or not {"model", "optimizer"} <= set(part):
            raise ValueError("it has no model and optimizer")
        return part, sealed
    except _UNREADABLE as error:
        raise CheckpointError(
            f"checkpoint file {str(path)!r} cannot be read: {short(error)}; use an older checkpoint"
        ) from error


def _check_layers(source: Path, theirs: Mapping[str, Mapping[str, int]],
                  mine: Mapping[str, Mapping[str, int]]) -> None:
    for prefix, origin in mine.items():
        if prefix not in theirs:
            raise CheckpointError(
                f"checkpoint {str(source)!r} has no MoE layer {prefix!r}; it has "
                f"{', '.join(theirs) or 'none'}"
            )
        if theirs[prefix]["num_experts"] != origin["num_experts"]:
            raise CheckpointError(
                f"checkpoint {str(source)!r} has num_experts={theirs[prefix]['num_experts']} in "
                f"layer {prefix!r}, the model has "
                f"{origin['num_experts']}; build the model with the checkpoint's number")


def _check_tensors(source: Path, state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    for key in [*mine, *state]:
        if key not in state or key not in mine:
            where = "checkpoint" if key not in state else "model"
            raise CheckpointError(
                f"{key!r} is not in the {where}: checkpoint {str(source)!r} is of another model")
        theirs = state[key]
        if isinstance(mine[key], Tensor) and (not isinstance(theirs, Tensor)
                                              or mine[key].shape != theirs.shape):
            found = tuple(theirs.shape) if isinstance(theirs, Tensor) else type(theirs).__name__
            raise CheckpointError(f"{key!r} has shape {found} in checkpoint {str(source)!r}, "
                                  f"{tuple(mine[key].shape)} in the model")


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]
    ]


def _optimizer_state(model: nn.Module,
                     optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    state, names = optimizer.state_dict(), _names(model, optimizer)
    return {
        "by_name": {names[index]: values for index, values in state["state"].items()},
        "groups": [{key: value for key, value in group.items() if key != "params"}
                   for group in state["param_groups"]]
    }


def _split_optimizer(parts: list[dict[str, Any] | None], layers: Mapping[str, Mapping[str, int]],
                     comm: Comm, shards: Mapping[str, int]) -> dict[str, Any] | None:
    if parts[0] is None:
        return None
    fields = sorted({field for values in parts[0]["by_name"].values() for field in values})
    by_name: dict[str, dict[str, Any]] = {}
    for field in fields:
        columns = [{
            name: values[field] for name, values in part["by_name"].items() if field in values
        } for part in parts]
        for name, value in split(merge(columns, layers), comm.rank, comm.size, layers,
                                 shards).items():
            by_name.setdefault(name, {})[field] = value
    return {"by_name": by_name, "groups": parts[0]["groups"]}


def _check_optimizer(source: Path, state: dict[str, Any] | None, model: nn.Module,
                     optimizer: torch.optim.Optimizer) -> None:
    if state is None:
        raise CheckpointError(
            f"checkpoint {str(source)!r} has no optimizer state; load it without an optimizer")
    if len(state["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"checkpoint {str(source)!r} has {len(state['groups'])} optimizer groups, this "
            f"optimizer has {len(optimizer.param_groups)}"
        )
    unknown = sorted(set(state["by_name"]) - set(_names(model, optimizer)))
    if unknown:
        raise CheckpointError(
            f"checkpoint {str(source)!r} has optimizer state for {unknown[0]!r}, which this "
            "optimizer does not train"
        )


def _load_optimizer(state: dict[str, Any], model: nn.Module,
                    optimizer: torch.optim.Optimizer) -> None:
    names = _names(model, optimizer)
    groups, start = [], 0
    for saved, group in zip(state["groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, "params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    by_index = {
        index: state["by_name"][name] for index, name in enumerate(names)
        if name in state["by_name"]
    }
    optimizer.load_state_dict({"state": by_index, "param_groups": groups})
