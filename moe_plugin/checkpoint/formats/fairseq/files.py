"""Checkpoint files of a run in which each rank stores some of the experts:
`checkpoint_last-rank-N.pt`.

Files are saved in two phases, so that even after a crash, there is a step for which all ranks have
complete files. In the first phase, each rank writes `NAME.new`. When all ranks have finished
writing, each rank renames its file to `NAME`. Loading accepts both names and uses the newest step
for which all ranks have a file. Every file has a checksum.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
import torch.distributed as dist

from moe_plugin.checkpoint import CheckpointError, trust
from moe_plugin.checkpoint.formats.fairseq.entries import renamed
from moe_plugin.checkpoint.source import UNREADABLE
from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import is_full, write_remedy

logger = logging.getLogger(__name__)
MANIFEST, VERSION, PENDING = "moe_plugin", 1, ".new"
# classes in fairseq's checkpoints: arguments, numbers of numpy
ALLOWED = (argparse.Namespace, numpy.dtype, type(numpy.dtype("float64")),
           type(numpy.dtype("float32")), type(numpy.dtype("int64")),
           (numpy.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
           numpy.float64(0).__reduce__()[0])
_MANIFEST_KEYS = ("num_experts", "world_size", "expert_parallel_size", "rank", "num_updates")
RANK_SUFFIX = re.compile(r"-rank-(\d+)(?=\.pt$)")
# parameter names of fairseq's `moe` branch
_OF_BRANCH = re.compile(r"\.moe_layer\.(experts\.\d+|gate\.wg)\.")


def with_rank_suffix(suffix: str, rank: int) -> str:
    """Append the rank's suffix to fairseq's checkpoint suffix."""
    return suffix if suffix.endswith(f"-rank-{rank}") else f"{suffix}-rank-{rank}"


def with_rank(filename: str, rank: int) -> str:
    """Convert a name such as `dir/checkpoint_last.pt` to the name of this rank's file."""
    if RANK_SUFFIX.search(filename):
        return RANK_SUFFIX.sub(f"-rank-{rank}", filename)
    return re.sub(r"\.pt$", f"-rank-{rank}.pt", filename)


def without_rank(filename: str) -> str:
    """Remove the rank's suffix from a file name. The result is the same on all ranks."""
    return RANK_SUFFIX.sub("", filename)


def has_rank(filename: str) -> bool:
    """Return true if a file name ends with the suffix of a rank."""
    return RANK_SUFFIX.search(filename) is not None


def rank_files(filename: str, end: str = "") -> dict[int, str]:
    """Return the files of all ranks, given a file name with or without a rank suffix. `end` is the
    suffix that follows `.pt`.
    """
    paths = glob.glob(f"{glob.escape(without_rank(filename).removesuffix('.pt'))}-rank-*.pt{end}")
    return {int(number): path for path in sorted(paths)
            for number in RANK_SUFFIX.findall(path.removesuffix(end))}


def is_crash_dump(filename: str) -> bool:
    """Return true if the file is fairseq's dump of a failed step. Not every rank writes a dump."""
    return os.path.basename(filename).startswith("crash")


def save(filename: str, write: Callable[[str], None], group: Any) -> None:
    """Write the file of this rank with `write(name)`, wait for all ranks, and then rename the file.

    Raises: CheckpointError: If any rank could not write its file. All ranks raise this error. Old
    files remain.
    """
    error: Exception | None = None
    try:
        write(filename + PENDING)
    except Exception as caught:  # noqa: BLE001 - the other ranks must be informed of any error
        error = caught
    texts = [text for text in gather(error and short(error, 1000), group) if text]
    if texts:
        _discard(filename + PENDING)
    if error is not None:
        raise error
    if texts:
        raise CheckpointError(f"an error on another rank prevented the save: {texts[0]}")
    os.replace(filename + PENDING, filename)


def write(state: Mapping[str, Any], path: str) -> None:
    """Write a checkpoint file with a checksum. The file receives its final name only when it is
    complete.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    try:
        checksums.write_sealed(path + ".tmp", lambda stream: torch.save(state, stream))
        os.replace(path + ".tmp", path)
    except OSError as error:
        _discard(path + ".tmp")
        raise _not_written(path, error) from error


def _discard(path: str) -> None:
    """Remove an incomplete file, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _not_written(path: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path.removesuffix(PENDING)!r} cannot be written ({error.strerror}); older "
        f"checkpoints are unchanged; {write_remedy(error, os.path.dirname(path) or '.')} "
        "(--save-dir)")


def copy(source: str, target: str, link: bool = False) -> None:
    """Copy a checkpoint. All ranks rename their copies together, so the files at `target` are
    always complete.

    link: whether the copy may share disk space with `source`, if the file system supports this.
    Raises: CheckpointError: If any rank could not write its copy. All ranks raise this error.
    """
    if has_rank(target) and dist.is_available() and dist.is_initialized():
        save(target, lambda pending: _duplicate(source, pending, link), dist.group.WORLD)
    else:
        _duplicate(source, target + PENDING, link)
        os.replace(target + PENDING, target)


def _duplicate(source: str, target: str, link: bool) -> None:
    if link:
        try:
            if os.path.lexists(target):
                os.remove(target)  # left behind by a killed run
            os.link(source, target)
            return
        except OSError:
            pass  # another file system, or a file system without links
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        _discard(target)
        if not is_full(error) or link:
            raise _not_written(target, error) from error
        logger.warning("the disk is full, so %s shares the storage of %s", target, source)
        _duplicate(source, target, link=True)


def read(path: str) -> dict[str, Any]:
    """Read a checkpoint file. The tensors are memory-mapped from the file.

    Raises:
        CheckpointError: If the file is truncated, damaged or not a checkpoint.
    """
    try:
        if not checksums.verify(path) and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("checkpoint %r was written without checksums, so damage may go "
                           "undetected; the next save adds checksums", without_rank(path))
        return read_unverified(path)
    except (FileNotFoundError, trust.UntrustedFile):
        raise
    except UNREADABLE as error:
        size = os.path.getsize(path) if os.path.exists(path) else 0
        raise CheckpointError(
            f"checkpoint {path!r} ({size} bytes) is truncated or damaged: {short(error)}; choose "
            "another checkpoint with --restore-file"
        ) from error


def read_unverified(path: str) -> dict[str, Any]:
    """Read a checkpoint file and verify its manifest, but not its checksum."""
    state = load(path, map_location="cpu", mmap=True)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, but a mapping was expected")
    check_manifest(state)
    return state


def check_manifest(state: Mapping[str, Any]) -> None:
    """Raise `ValueError` if `save` cannot have written this manifest."""
    manifest = state.get(MANIFEST)
    if manifest is not None and (not isinstance(manifest, dict) or not all(
            type(manifest.get(key)) is int for key in _MANIFEST_KEYS)):
        raise ValueError(f"its entry {MANIFEST} is {short(manifest)}, which no save writes")


def load(file: Any, **options: Any) -> Any:
    """Call `torch.load`, but accept only plain values, tensors, and the classes that fairseq saves.

    The option `--trust-checkpoint` allows any class. This option is read from the command line,
    because fairseq does not pass its settings to the functions that load files.

    Raises:
        UntrustedFile: If the file (a path or a stream) refers to classes that are not allowed.
    """
    if trust.FLAG in sys.argv:
        return renamed(torch.load(file, **{**options, "weights_only": False}))
    what = file if isinstance(file, str) else str(getattr(file, "name", file))
    return renamed(trust.load(file, ALLOWED, f"checkpoint {what!r}", **options))


def gather(value: Any, group: Any) -> list[Any]:
    """Gather a value from all ranks of `group`. Without a group, return this rank's value."""
    return [value] if group is None else gather_objects(value, "checkpoints found", group)


def of_branch(state: Mapping[str, Any]) -> list[str]:
    """Return those parameter names that are used only by fairseq's `moe` branch."""
    return [name for name in state.get("model") or {} if _OF_BRANCH.search(name)]


def refuse_branch(path: str, state: Mapping[str, Any]) -> None:
    """Raise `ValueError` with instructions if fairseq's `moe` branch wrote the checkpoint."""
    names = of_branch(state)
    if names and MANIFEST not in state:
        name = re.sub(r"-shared(?=\.pt$)", "", without_rank(path))
        raise ValueError(
            f"checkpoint {path!r} was written by fairseq's moe branch (it contains {names[0]!r}), "
            f"which stores experts in a different way: convert it with moe-plugin reshard {name} "
            "OUT --to fairseq and load OUT/checkpoint_last.pt, or run it in that branch, where "
            "--user-dir moe_plugin replaces the branch's own layer by this layer "
            "(docs/fairseq_training.md)")
