"""Checkpoint files of a run whose ranks each store some experts: `checkpoint_last-rank-N.pt`.

Saving has two phases, so that a killed run always leaves one step that every rank has: each rank
writes `NAME.new`; when all have, each renames it to `NAME`. Loading looks at both names and takes
the newest step that all ranks have.
"""

from __future__ import annotations

import glob
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.checkpoint import merge, split

MANIFEST, VERSION, PENDING = "moe_plugin", 1, ".new"
_RANK = re.compile(r"-rank-(\d+)(?=\.pt$)")
# what torch.load raises for a damaged file
_UNREADABLE = (RuntimeError, OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError,
               AttributeError)


def with_rank_suffix(suffix: str, rank: int) -> str:
    """fairseq's checkpoint suffix with the rank's at its end."""
    return suffix if suffix.endswith(f"-rank-{rank}") else f"{suffix}-rank-{rank}"


def with_rank(filename: str, rank: int) -> str:
    """`dir/checkpoint_last.pt` as the name of that rank's file."""
    if _RANK.search(filename):
        return _RANK.sub(f"-rank-{rank}", filename)
    return re.sub(r"\.pt$", f"-rank-{rank}.pt", filename)


def without_rank(filename: str) -> str:
    """The name that stands for all ranks' files."""
    return _RANK.sub("", filename)


def has_rank(filename: str) -> bool:
    """Whether the name is one rank's."""
    return _RANK.search(filename) is not None


def is_crash_dump(filename: str) -> bool:
    """fairseq's dump of a failing step, which not every rank writes."""
    return os.path.basename(filename).startswith("crash")


def commit(filename: str, group: Any) -> None:
    """Second phase: wait until every rank has written, then rename."""
    dist.barrier(group)
    os.replace(filename + PENDING, filename)


def copy(source: str, target: str, link: bool = False) -> None:
    """Copy a checkpoint so that `target` is whole at any time; files of ranks change names
    together.

    link: share the storage of `source` where the file system can.
    """
    together = has_rank(target) and dist.is_available() and dist.is_initialized()
    _duplicate(source, target + PENDING, link)
    if together:
        dist.barrier()
    os.replace(target + PENDING, target)


def _duplicate(source: str, target: str, link: bool) -> None:
    if link:
        try:
            if os.path.lexists(target):
                os.remove(target)  # of a run that was killed
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, or one without links
    shutil.copyfile(source, target)


def read(path: str) -> dict[str, Any]:
    """A checkpoint file, tensors mapped from disk. `ValueError` where it is truncated or not a
    checkpoint.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        size = os.path.getsize(path) if os.path.exists(path) else 0
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"checkpoint {path!r} ({size} bytes) is truncated or damaged: {reason}; give another "
            "one with --restore-file"
        ) from error


def agree(filename: str, wanted: Mapping[str, int], group: Any) -> None:
    """Make `filename` the newest step that all ranks have, or leave it absent on all of them.

    Args:
        filename: this rank's file. wanted: manifest entries that must match. group: data-parallel
            ranks; None: this rank alone.
    Raises:
        ValueError: on every rank, with the reason of the first rank that has one.
    """
    found = _survey(filename, wanted)
    everyone = [found]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)  # type: ignore[list-item]
        dist.all_gather_object(everyone, found, group=group)
    errors = [entry for entry in everyone if isinstance(entry, str)]
    if errors:
        raise ValueError(errors[0])
    step = newest_common(filename, everyone)
    if step is None:
        return
    chosen = found[step]  # type: ignore[index]
    if chosen != filename:
        os.replace(chosen, filename)


def newest_common(filename: str, everyone: Sequence[Mapping[int, str]]) -> int | None:
    """Newest step that is whole on every rank; None where no rank has any file.

    Args:
        everyone: for each rank, its complete files by step.
    Raises:
        ValueError: there are files, but no step is there for all ranks.
    """
    steps = set(everyone[0]).intersection(*everyone[1:])
    if not steps and any(everyone):
        seen = "; ".join(f"rank {rank}: {sorted(entry) or 'none'}"
                         for rank, entry in enumerate(everyone))
        raise ValueError(
            f"checkpoint {without_rank(filename)!r} is incomplete: no step is there for all ranks "
            f"({seen}); "
            "restore the missing files, or give another one with --restore-file")
    return max(steps, default=None)


def _survey(filename: str, wanted: Mapping[str, int]) -> dict[int, str] | str:
    """This rank's complete files by step, or what is wrong."""
    try:
        stray = None if os.path.exists(filename) or os.path.exists(filename +
                                                                   PENDING) else _other_world(
                                                                       filename, wanted)
        if stray:
            return stray
        found: dict[int, str] = {}
        if os.path.exists(filename + PENDING):
            try:
                found[_checked(filename + PENDING, wanted)] = filename + PENDING
            except ValueError:
                pass  # a kill during the first phase: the file under its final name counts
        if os.path.exists(filename):
            found[_checked(filename, wanted)] = filename
        return found
    except ValueError as error:
        return str(error)


def _checked(path: str, wanted: Mapping[str, int]) -> int:
    """The step of a file that fits."""
    state = read(path)
    manifest = state.get(MANIFEST)
    if manifest is None:
        raise ValueError(
            f"checkpoint {path!r} has no experts; the model has {wanted['num_experts']} an MoE "
            "layer. Use another --save-dir "
            "or --restore-file, or train the dense model with --moe-freq 0")
    for key, value in wanted.items():
        if manifest[key] != value:
            raise ValueError(
                f"checkpoint {path!r} has {key}={manifest[key]}, this run has {key}={value}; "
                f"{_remedy(key, manifest[key])}"
            )
    return int(manifest["num_updates"])


def _remedy(key: str, value: int) -> str:
    remedies = {
        "num_experts": f"use --moe-expert-count {value}",
        "world_size": f"start it with {value} data-parallel ranks, or use another --save-dir",
        "expert_parallel_size": f"use --moe-expert-parallel-size {value}",
        "rank": f"the file belongs to rank {value}: do not rename files",
    }
    return remedies[key]


def _other_world(filename: str, wanted: Mapping[str, int]) -> str | None:
    """What is wrong where this rank has no file but a run of another size left some."""
    whole = without_rank(filename)
    others = glob.glob(glob.escape(whole.removesuffix(".pt")) + "-rank-*.pt")
    if has_rank(filename) and os.path.exists(whole):
        others.append(whole)
    if not others:
        return None
    manifest = read(others[0]).get(MANIFEST, {})
    theirs = manifest.get("world_size", 1)
    if theirs == wanted["world_size"]:
        return (
            f"checkpoint file {filename!r} is missing, other ranks' files are there; restore it, "
            "or give another one with --restore-file"
        )
    return (
        f"checkpoint {whole!r} was written by {theirs} data-parallel ranks (world_size={theirs}), "
        "this run has "
        f"world_size={wanted['world_size']}; {_remedy('world_size', theirs)}")


def whole_state(path: str) -> dict[str, Any]:
    """One process's state, with all experts, from the file of any rank; the files of the other
    ranks are next to it.

    Raises:
        ValueError: a file is missing, truncated or of another step.
    """
    first = read(path)
    manifest = first.get(MANIFEST)
    if manifest is None or manifest["expert_parallel_size"] == 1:
        return first
    states = []
    for rank in range(manifest["expert_parallel_size"]):
        part = with_rank(path, rank)
        if not os.path.exists(part):
            raise ValueError(
                f"checkpoint file {part!r} is missing: the experts of rank {rank} of "
                f"{manifest['expert_parallel_size']} are in it"
            )
        state = read(part)
        if state[MANIFEST]["num_updates"] != manifest["num_updates"]:
            raise ValueError(
                f"checkpoint file {part!r} is of step {state[MANIFEST]['num_updates']}, {path!r} "
                f"of step {manifest['num_updates']}; "
                "use files of one step")
        states.append(state["model"])
    first["model"] = split(merge(states), 0, 1)
    return first
