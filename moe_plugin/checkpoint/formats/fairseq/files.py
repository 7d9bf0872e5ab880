"""Checkpoint files of a run whose ranks each store some experts: `checkpoint_last-rank-N.pt`.

Saving has two phases, so a killed run always leaves a step that is complete on every rank. Each
rank writes `NAME.new`. After all ranks are done, each rank renames its file to `NAME`. Loading
accepts both names and uses the newest step that all ranks have. Every file has a checksum.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
_RANK = re.compile(r"-rank-(\d+)(?=\.pt$)")
# parameter names of fairseq's `moe` branch
_OF_BRANCH = re.compile(r"\.moe_layer\.(experts\.\d+|gate\.wg)\.")


def with_rank_suffix(suffix: str, rank: int) -> str:
    """Return the checkpoint suffix of fairseq with the suffix of the rank appended."""
    return suffix if suffix.endswith(f"-rank-{rank}") else f"{suffix}-rank-{rank}"


def with_rank(filename: str, rank: int) -> str:
    """Convert a name such as `dir/checkpoint_last.pt` to the name of the rank's file."""
    if _RANK.search(filename):
        return _RANK.sub(f"-rank-{rank}", filename)
    return re.sub(r"\.pt$", f"-rank-{rank}.pt", filename)


def without_rank(filename: str) -> str:
    """Return a file name without the suffix of the rank, which is the same for all ranks."""
    return _RANK.sub("", filename)


def has_rank(filename: str) -> bool:
    """Return whether a file name has the suffix of a rank."""
    return _RANK.search(filename) is not None


def rank_files(filename: str, end: str = "") -> dict[int, str]:
    """Return all ranks' files for a name with or without rank. `end` is a suffix after `.pt`."""
    paths = glob.glob(f"{glob.escape(without_rank(filename).removesuffix('.pt'))}-rank-*.pt{end}")
    return {int(number): path for path in sorted(paths)
            for number in _RANK.findall(path.removesuffix(end))}


def is_crash_dump(filename: str) -> bool:
    """Return whether a file is fairseq's dump of a failed step, which not every rank writes."""
    return os.path.basename(filename).startswith("crash")


def save(filename: str, write: Callable[[str], None], group: Any) -> None:
    """Write the file of this rank by `write(name)`, wait for all ranks, and then rename the file.

    Raises: CheckpointError: If a rank could not write. All ranks raise the error. Old files remain.
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
    """Write a checkpoint file with a checksum. The file is renamed when it is complete.

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
    """Remove an incomplete file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _not_written(path: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path.removesuffix(PENDING)!r} cannot be written ({error.strerror}); older "
        f"checkpoints are unchanged; {write_remedy(error, os.path.dirname(path) or '.')} "
        "(--save-dir)")


def copy(source: str, target: str, link: bool = False) -> None:
    """Copy a checkpoint. The ranks rename their files together, so `target` is always complete.

    link: whether to share the storage of `source` if the file system supports this.
    Raises: CheckpointError: raised on every rank if a rank could not write its copy.
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
    """Read a checkpoint file. The tensors in the file are mapped from disk.

    Raises:
        CheckpointError: If the file is truncated, damaged or not a checkpoint.
    """
    try:
        if not checksums.verify(path) and (not dist.is_initialized() or dist.get_rank() == 0):
            logger.warning("checkpoint %r was written without checksums, so damage may go "
                           "undetected; the next save adds checksums", without_rank(path))
        return _load(path)
    except (FileNotFoundError, trust.UntrustedFile):
        raise
    except UNREADABLE as error:
        size = os.path.getsize(path) if os.path.exists(path) else 0
        raise CheckpointError(
            f"checkpoint {path!r} ({size} bytes) is truncated or damaged: {short(error)}; choose "
            "another checkpoint with --restore-file"
        ) from error


def _load(path: str) -> dict[str, Any]:
    state = load(path, map_location="cpu", mmap=True)
    if not isinstance(state, dict):
        raise ValueError(f"it contains a {type(state).__name__}, but a mapping was expected")
    check_manifest(state)
    return state


def check_manifest(state: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the manifest of a file is not one that `save` can have written."""
    manifest = state.get(MANIFEST)
    if manifest is not None and (not isinstance(manifest, dict) or not all(
            type(manifest.get(key)) is int for key in _MANIFEST_KEYS)):
        raise ValueError(f"its entry {MANIFEST} is {short(manifest)}, which no save writes")


def load(file: Any, **options: Any) -> Any:
    """Call `torch.load`, but accept only plain values, tensors and classes that fairseq saves.

    The option `--trust-checkpoint` allows any class. The option is read from the command line,
    because fairseq does not pass settings to the functions that load files.

    Raises:
        UntrustedFile: If the file (a path or a stream) references classes that are not allowed.
    """
    if trust.FLAG in sys.argv:
        return renamed(torch.load(file, **{**options, "weights_only": False}))
    what = file if isinstance(file, str) else str(getattr(file, "name", file))
    return renamed(trust.load(file, ALLOWED, f"checkpoint {what!r}", **options))


@dataclass
class _Survey:
    """The checkpoint files of this rank and their problems.

    Attributes:
        steps: paths of the complete files, by training step.
        damaged: messages that describe the damaged files.
        refusal: reason why a file cannot be used in this run, or an empty string.
    """

    steps: dict[int, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    refusal: str = ""


def agree(filename: str, wanted: Mapping[str, int], group: Any) -> str:
    """Return the path of this rank's file of the newest step that all ranks have.

    If `checkpoint_last` of any rank is damaged, an older checkpoint in the same folder is used.

    Args:
        filename: path of this rank's file.
        wanted: manifest entries that the files must have.
        group: process group of the data-parallel ranks, or None for a single rank.
    Raises:
        ValueError: If a rank refuses a file. All ranks raise the error of the first such rank.
    """
    survey_of_rank = _survey(filename, wanted)
    everyone: list[_Survey] = gather(survey_of_rank, group)
    for survey in everyone:
        if survey.refusal:
            raise ValueError(survey.refusal)
    damaged = [text for survey in everyone for text in survey.damaged]
    if damaged:
        return _fall_back(filename, wanted, group, damaged)
    steps = [survey.steps for survey in everyone]
    if _never_finished(steps):
        return _older_checkpoint(filename, wanted, group)
    step = newest_common(filename, steps)
    if step is not None and survey_of_rank.steps[step] != filename:
        os.replace(survey_of_rank.steps[step], filename)
    return filename


def gather(value: Any, group: Any) -> list[Any]:
    """Gather a value from all ranks of the group, or only from this rank if `group` is None."""
    return [value] if group is None else gather_objects(value, "checkpoints found", group)


def _fall_back(filename: str, wanted: Mapping[str, int], group: Any, damaged: list[str]) -> str:
    """Return this rank's file of the newest step for which all ranks have complete files."""
    paths = _older_files_by_step(filename, wanted)
    everyone = gather(set(paths), group)
    for step in sorted(set.intersection(*everyone), reverse=True):
        whole = _first_undamaged(paths[step])
        if all(gather(whole is not None, group)):
            logger.warning("%s. Training resumes from the older checkpoint %s (step %d)",
                           "; ".join(damaged), whole, step)
            return whole  # type: ignore[return-value]
    raise CheckpointError(damaged[0])


def _never_finished(everyone: Sequence[Mapping[int, str]]) -> bool:
    """Return whether ranks were killed in the first phase of the first save with a name."""
    paths = [path for steps in everyone for path in steps.values()]
    return not all(everyone) and all(path.endswith(PENDING) for path in paths) and bool(paths)


def _older_checkpoint(filename: str, wanted: Mapping[str, int], group: Any) -> str:
    """Return the newest older checkpoint, or the missing `filename` if there is no checkpoint."""
    text = f"checkpoint {without_rank(filename)!r} was not yet written by all ranks"
    try:
        return _fall_back(filename, wanted, group, [text])
    except CheckpointError:  # on every rank
        logger.warning("%s and no older checkpoint exists, so training starts at step 0", text)
        return filename


def _older_files_by_step(filename: str, wanted: Mapping[str, int]) -> dict[int, list[str]]:
    """Return this rank's unverified files by step if `filename` is `checkpoint_last`."""
    folder, name = os.path.split(without_rank(filename))
    if name != "checkpoint_last.pt":  # a checkpoint that was selected by name has no replacement
        return {}
    paths_by_step: dict[int, list[str]] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "checkpoint*.pt*"))):
        if _RANK.findall(path.removesuffix(PENDING)) != _RANK.findall(filename):
            continue
        try:
            paths_by_step.setdefault(_step_of(path, _load(path), wanted), []).append(path)
        except UNREADABLE:
            pass
    return paths_by_step


def _first_undamaged(paths: Sequence[str]) -> str | None:
    for path in paths:
        try:
            read(path)
            return path
        except CheckpointError as error:
            logger.warning("%s", error)
    return None


def newest_common(filename: str, everyone: Sequence[Mapping[int, str]]) -> int | None:
    """Return the newest step that is complete on every rank, or None if no rank has a file.

    Raises:
        ValueError: If files exist, but no step is complete on all ranks.
    """
    steps = set(everyone[0]).intersection(*everyone[1:])
    if not steps and any(everyone):
        seen = "; ".join(f"rank {rank}: {sorted(entry) or 'none'}"
                         for rank, entry in enumerate(everyone))
        raise ValueError(
            f"checkpoint {without_rank(filename)!r} is incomplete: no step is available on all "
            f"ranks ({seen}); restore the missing files, or choose another checkpoint with "
            "--restore-file")
    return max(steps, default=None)


def _survey(filename: str, wanted: Mapping[str, int]) -> _Survey:
    pending, survey = filename + PENDING, _Survey()
    try:
        if not os.path.exists(filename) and not os.path.exists(pending):
            survey.refusal = _other_world(filename, wanted) or ""
        if os.path.exists(pending):
            try:
                survey.steps[_step_of(pending, read(pending), wanted)] = pending
            except ValueError:
                pass  # a kill during the first phase, so the file under its final name is used
        if os.path.exists(filename):
            survey.steps[_step_of(filename, read(filename), wanted)] = filename
    except CheckpointError as error:
        survey.damaged.append(str(error))
    except ValueError as error:
        survey.refusal = str(error)
    return survey


def of_branch(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters that are named as in fairseq's `moe` branch."""
    return [name for name in state.get("model") or {} if _OF_BRANCH.search(name)]


def refuse_branch(path: str, state: Mapping[str, Any]) -> None:
    """Raise `ValueError` with instructions if a checkpoint is from fairseq's `moe` branch."""
    names = of_branch(state)
    if names and MANIFEST not in state:
        name = re.sub(r"-shared(?=\.pt$)", "", without_rank(path))
        raise ValueError(
            f"checkpoint {path!r} was written by fairseq's moe branch (it contains {names[0]!r}), "
            f"which stores experts in another way: convert it with moe-plugin reshard {name} OUT "
            "--to fairseq and load OUT/checkpoint_last.pt, or run it in that branch, where "
            "--user-dir moe_plugin replaces the branch's own layer by this layer "
            "(docs/fairseq_training.md)")


def _step_of(path: str, state: Mapping[str, Any], wanted: Mapping[str, int]) -> int:
    """Return the step of a file after checking that the file can be used in this run."""
    refuse_branch(path, state)
    manifest = state.get(MANIFEST)
    if manifest is None:
        raise ValueError(
            f"checkpoint {path!r} has no experts, but the model has {wanted['num_experts']} per "
            "MoE layer. Use another --save-dir or --restore-file, or train the dense model with "
            "--moe-freq 0")
    for key, value in wanted.items():
        if manifest[key] != value:
            raise ValueError(
                f"checkpoint {path!r} has {key}={manifest[key]}, but this run has {key}={value}; "
                f"{_remedy(key, manifest[key])}"
            )
    return int(manifest["num_updates"])


def _remedy(key: str, value: int) -> str:
    remedies = {
        "num_experts": f"use --moe-expert-count {value}",
        "world_size": f"restore the complete files of all {value} data-parallel ranks, or use "
                      "another --save-dir",
        "expert_parallel_size": f"use --moe-expert-parallel-size {value}",
        "rank": f"the file belongs to rank {value}, so restore the original file names",
    }
    return remedies[key]


def _other_world(filename: str, wanted: Mapping[str, int]) -> str | None:
    """Return an error message if files of other ranks or of a different run size exist."""
    whole = without_rank(filename)
    others = list(rank_files(whole).values())
    if has_rank(filename) and os.path.exists(whole):
        others.append(whole)
    if not others:
        return None
    state = read(others[0])
    refuse_branch(others[0], state)
    manifest = state.get(MANIFEST, {})
    theirs = manifest.get("world_size", 1)
    if theirs == wanted["world_size"]:
        return (
            f"checkpoint file {filename!r} is missing, but files of other ranks exist; restore it, "
            "or choose another checkpoint with --restore-file")
    return (
        f"checkpoint {whole!r} was written by {theirs} data-parallel ranks (world_size={theirs}), "
        f"but this run has world_size={wanted['world_size']}; {_remedy('world_size', theirs)}")
