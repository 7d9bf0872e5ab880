"""Choose the checkpoint from which a fairseq run resumes.

`agree` selects the newest training step for which all ranks have complete files. If a different
number of ranks wrote the checkpoint, every rank reads only the slices that it will store. Each rank
also reads only its own slices of the optimizer state.
"""

from __future__ import annotations

import glob
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_plugin.checkpoint import CheckpointError, torch_files, trust
from moe_plugin.checkpoint.conversion import without_optimizer
from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.checkpoint.formats.fairseq.files import without_rank
from moe_plugin.checkpoint.formats.fairseq.format import (
    Written,
    open_written,
    state_of_rank,
    survey,
)
from moe_plugin.checkpoint.reshard import columns_of_rank
from moe_plugin.checkpoint.source import MODEL, UNREADABLE
from moe_plugin.utils import checksums

logger = logging.getLogger(__name__)


def newest_of_other_size(filename: str, wanted: Mapping[str, int], group: Any) -> Written | None:
    """Return the newest complete checkpoint with this name, if a different number of ranks wrote
    this checkpoint.

    The return value is the same on all ranks. Return None if the newest checkpoint was written by
    the same number of ranks as this run has.

    Args:
        filename: path of the current rank's file.
        wanted: entries that the manifest of each file must have.
        group: process group of the data-parallel ranks, or None for a single rank.
    """
    written: Written | None = None
    if wanted["rank"] == 0:
        size = wanted["world_size"], wanted["expert_parallel_size"]
        steps = survey(filename, trust.FLAG in sys.argv)
        newest = max((other.step for other in steps), default=0)
        sizes = {(other.world, other.ep): other for other in steps if other.step == newest}
        if size not in sizes:
            written = next((other for other in sizes.values()
                            if other.experts == wanted["num_experts"]), None)
    return files.gather(written, group)[0]


def read_part(written: Written, wanted: Mapping[str, int], shards: Mapping[str, int],
              group: Any, model_only: bool = False) -> dict[str, Any]:
    """Read the state of the current rank from files that a different number of ranks wrote.

    Args:
        written: the files of the checkpoint.
        wanted: entries that the manifest of each file must have.
        shards: see `state_of_rank`.
        group: process group of the data-parallel ranks, or None for a single rank.
        model_only: True to leave out the optimizer state.
    Raises:
        CheckpointError: On all ranks, if a file is damaged.
    """
    rank, world, ep = (wanted[key] for key in ("rank", "world_size", "expert_parallel_size"))
    errors = files.gather(damage(written.paths[rank::world]), group)
    for error in filter(None, errors):
        raise CheckpointError(error)
    if rank == 0:
        logger.info("checkpoint %s was written by %d ranks and is read by %d ranks",
                    written.paths[0], written.world, world)
    with (checksums.verified(map(Path, written.paths)),
          open_written(written, trust.FLAG in sys.argv) as whole):
        source = without_optimizer(whole) if model_only else whole
        return torch_files.read_all(state_of_rank(source, rank, world, ep, shards))


def damage(paths: tuple[str, ...], flag: str = "--restore-file") -> str | None:
    """Return an error message about the first damaged file, or None if no file is damaged.

    flag: name of the flag that the error message recommends for selecting a different checkpoint.
    """
    for path in paths:
        try:
            checksums.verify(path)
        except (OSError, ValueError) as error:
            return f"checkpoint {path!r} is damaged: {error}; choose another checkpoint with {flag}"
    return None


def part_state(path: str, rank: int = 0, size: int = 1,
               leave_experts: bool = False) -> dict[str, Any]:
    """Return the state of the model on one of the `size` ranks that share the experts.

    The files of all ranks must be in the same folder. Any number of ranks may have written the
    files.

    Args:
        path: path of the file of any rank.
        rank, size: the rank within its expert-parallel group, and the size of this group.
        leave_experts: True to return experts as `Derived` tensors, which `StoredExperts` reads one
            at a time.
    Raises:
        CheckpointError: If a file is missing or belongs to a different step, or if one of the files
            checked by this rank is damaged.
        ValueError: If the experts cannot be divided among the ranks.
    """
    trusted = trust.FLAG in sys.argv
    left_out: list[str] = []
    steps = survey(path, trusted, left_out)
    if not steps:
        raise CheckpointError(
            f"checkpoint {without_rank(path)!r} is incomplete: "
            f"{'; '.join(left_out) or 'a file is missing or belongs to another step'}; restore "
            "the file, or choose another checkpoint with --path")
    if error := damage(steps[0].paths[rank::size], "--path"):
        raise CheckpointError(error)
    with open_written(steps[0], trusted) as source:
        state = columns_of_rank(source, rank, size)[MODEL]
        return {name: value if leave_experts and ".moe.experts." in name
                else torch_files.read_all(value) for name, value in state.items()}


@dataclass
class _Survey:
    """The checkpoint files of the current rank, and problems with these files.

    Attributes:
        steps: dict that maps each training step to the path of its complete file.
        damaged: error messages about the damaged files.
        refusal: reason why this run cannot use a file, or an empty string.
    """

    steps: dict[int, str] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    refusal: str = ""


def agree(filename: str, wanted: Mapping[str, int], group: Any) -> str:
    """Find the newest training step for which all ranks have files, and return the path of the
    current rank's file.

    If the `checkpoint_last` file of any rank is damaged, an older checkpoint in the same folder is
    used instead.

    Args:
        filename: path of the current rank's file.
        wanted: entries that the manifest of each file must have.
        group: process group of the data-parallel ranks, or None for a single rank.
    Raises:
        ValueError: If any rank rejects a file. All ranks raise the error of the first rank that
            rejects a file.
    """
    survey_of_rank = _survey(filename, wanted)
    everyone: list[_Survey] = files.gather(survey_of_rank, group)
    for other in everyone:
        if other.refusal:
            raise ValueError(other.refusal)
    damaged = [text for other in everyone for text in other.damaged]
    if damaged:
        return _fall_back(filename, wanted, group, damaged)
    steps = [other.steps for other in everyone]
    if _never_finished(steps):
        return _older_checkpoint(filename, wanted, group)
    step = newest_common(filename, steps)
    if step is not None and survey_of_rank.steps[step] != filename:
        # the save was interrupted after all ranks had written their pending files
        os.replace(survey_of_rank.steps[step], filename)
    return filename


def _fall_back(filename: str, wanted: Mapping[str, int], group: Any, damaged: list[str]) -> str:
    """Return the current rank's file of the newest step that is complete on all ranks."""
    paths = _older_files_by_step(filename, wanted)
    everyone = files.gather(set(paths), group)
    for step in sorted(set.intersection(*everyone), reverse=True):
        whole = _first_undamaged(paths[step])
        if all(files.gather(whole is not None, group)):
            logger.warning("%s. Training resumes from the older checkpoint %s (step %d)",
                           "; ".join(damaged), whole, step)
            return whole  # type: ignore[return-value]
    raise CheckpointError(damaged[0])


def _never_finished(everyone: Sequence[Mapping[int, str]]) -> bool:
    """Return True if the ranks were killed in the first phase of saving, when no earlier checkpoint
    with this name existed.
    """
    paths = [path for steps in everyone for path in steps.values()]
    return not all(everyone) and all(path.endswith(files.PENDING) for path in paths) and bool(paths)


def _older_checkpoint(filename: str, wanted: Mapping[str, int], group: Any) -> str:
    """Return the newest older checkpoint. If there is no checkpoint, return `filename`, even though
    this file does not exist.
    """
    text = f"checkpoint {without_rank(filename)!r} was not yet written by all ranks"
    try:
        return _fall_back(filename, wanted, group, [text])
    except CheckpointError:  # on every rank
        logger.warning("%s and no older checkpoint exists, so training starts at step 0", text)
        return filename


def _older_files_by_step(filename: str, wanted: Mapping[str, int]) -> dict[int, list[str]]:
    """Return the current rank's checkpoint files by training step, or {} if `filename` is not
    `checkpoint_last`. The files are not verified.
    """
    folder, name = os.path.split(without_rank(filename))
    if name != "checkpoint_last.pt":  # a checkpoint that was selected by name has no replacement
        return {}
    paths_by_step: dict[int, list[str]] = {}
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "checkpoint*.pt*"))):
        suffix, wanted_suffix = map(files.RANK_SUFFIX.findall,
                                    (path.removesuffix(files.PENDING), filename))
        if suffix != wanted_suffix:
            continue
        try:
            step = _step_of(path, files.read_unverified(path), wanted)
            paths_by_step.setdefault(step, []).append(path)
        except UNREADABLE:
            pass
    return paths_by_step


def _first_undamaged(paths: Sequence[str]) -> str | None:
    for path in paths:
        try:
            files.read(path)
            return path
        except CheckpointError as error:
            logger.warning("%s", error)
    return None


def newest_common(filename: str, everyone: Sequence[Mapping[int, str]]) -> int | None:
    """Return the newest step that is complete on every rank, or None if no rank has a file.

    Raises:
        ValueError: If there are files, but no training step is complete on all ranks.
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
    pending, survey = filename + files.PENDING, _Survey()
    try:
        if not os.path.exists(filename) and not os.path.exists(pending):
            survey.refusal = _other_world(filename, wanted) or ""
        if os.path.exists(pending):
            try:
                survey.steps[_step_of(pending, files.read(pending), wanted)] = pending
            except ValueError:
                pass  # a kill during the first phase, so the file under its final name is used
        if os.path.exists(filename):
            survey.steps[_step_of(filename, files.read(filename), wanted)] = filename
    except CheckpointError as error:
        survey.damaged.append(str(error))
    except ValueError as error:
        survey.refusal = str(error)
    return survey


def _step_of(path: str, state: Mapping[str, Any], wanted: Mapping[str, int]) -> int:
    files.refuse_branch(path, state)
    manifest = state.get(files.MANIFEST)
    if manifest is None:
        raise ValueError(
            f"checkpoint {path!r} has no experts, but the model has {wanted['num_experts']} per "
            "MoE layer. Use another --save-dir or --restore-file, or train the dense model with "
            "--moe-freq 0")
    for key, value in wanted.items():
        if manifest[key] != value:
            raise ValueError(
                f"checkpoint {path!r} has {key}={manifest[key]}, but this run has {key}={value}; "
                f"{_remedy(key, manifest[key])}")
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
    """Return an error message if files of other ranks, or of another number of ranks, exist."""
    whole = without_rank(filename)
    others = list(files.rank_files(whole).values())
    if files.has_rank(filename) and os.path.exists(whole):
        others.append(whole)
    if not others:
        return None
    state = files.read(others[0])
    files.refuse_branch(others[0], state)
    manifest = state.get(files.MANIFEST, {})
    theirs = manifest.get("world_size", 1)
    if theirs == wanted["world_size"]:
        return (
            f"checkpoint file {filename!r} is missing, but files of other ranks exist; restore it, "
            "or choose another checkpoint with --restore-file")
    return (
        f"checkpoint {whole!r} was written by {theirs} data-parallel ranks (world_size={theirs}), "
        f"but this run has world_size={wanted['world_size']}; {_remedy('world_size', theirs)}")
