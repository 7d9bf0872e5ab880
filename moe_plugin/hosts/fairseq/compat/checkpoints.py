"""Changes to fairseq's checkpoints: they get checksums, are never left incomplete, and can consist
of one file per rank.

This module also adds the checkpoint flags of fairseq's `moe` branch.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.hosts.fairseq.compat.patching import Overlay, add_field, patch, replaces
from moe_plugin.training.resilience.stopping import RUN
from moe_plugin.utils.messages import did_you_mean, short, similar_names
from moe_plugin.utils.replaced import replaced

logger = logging.getLogger(__name__)
_LAST = "checkpoint_last.pt"  # fairseq's default, in the run's folder
FLAGS = {
    "no_best_checkpoints": "don't store best checkpoints (fairseq moe)",
    "symlink_best_and_last_checkpoints":
        "let checkpoint_best and checkpoint_last share the storage of the checkpoint that they "
        "equal (fairseq moe); uses hard links, which survive the removal of old checkpoints",
    "no_save_optimizer_state_on_training_finished":
        "don't save optimizer state in the checkpoint of the last step (fairseq moe)",
}


@patch
def saving_flags() -> None:
    """Add the flags in `FLAGS`, which come from fairseq's `moe` branch. fairseq <= 0.12.3 does not
    define these flags.
    """
    from fairseq.dataclass.configs import CheckpointConfig

    for name, text in FLAGS.items():
        add_field(CheckpointConfig, name, bool, False, text)


@replaces("checkpoint_utils.save_checkpoint")
def whole_copies(original: Callable[..., None], cfg: Any, trainer: Any, epoch_itr: Any,
                 val_loss: float | None) -> None:
    """Make fairseq write `checkpoint_last.pt` atomically. Also implement the flags in `FLAGS`.

    fairseq <= 0.12.3 copies the file in place. If the process is killed during the copy, a
    truncated file remains.
    """
    from fairseq import checkpoint_utils

    if cfg.get("no_best_checkpoints", False) and val_loss is not None:
        # the original saves if there is a validation loss, and reads `best` from this function
        better, known = (max if cfg.maximize_best_checkpoint_metric else min,
                         checkpoint_utils.save_checkpoint)
        known.best = better(val_loss, getattr(known, "best", val_loss))
        val_loss = None
    bare = cfg.get("no_save_optimizer_state_on_training_finished", False) and _is_last(
        trainer, epoch_itr)
    settings, paths = trainer.cfg.checkpoint, checkpoint_utils.PathManager
    before = settings.no_save_optimizer_state
    settings.no_save_optimizer_state = before or bare
    checkpoint_utils.PathManager = Overlay(
        paths, copy=_copying(paths, cfg.get("symlink_best_and_last_checkpoints", False)))
    try:
        original(cfg, trainer, epoch_itr, val_loss)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_kept()}") from error
    finally:
        checkpoint_utils.PathManager, settings.no_save_optimizer_state = paths, before
    if not cfg.no_save:
        RUN.saved = trainer.get_num_updates()


def _kept() -> str:
    if RUN.saved is None:
        return "no complete checkpoint exists"
    return f"the newest complete checkpoint is that of update {RUN.saved}"


def _copying(paths: Any, link: bool) -> Callable[..., bool]:
    from moe_plugin.checkpoint.formats.fairseq import files

    def copy(source: str, target: str, overwrite: bool = False) -> bool:
        if paths.path_requires_pathmanager(source) or paths.path_requires_pathmanager(target):
            return bool(paths.copy(source, target, overwrite=overwrite))
        files.copy(source, target, link=link)
        return True

    return copy


def _is_last(trainer: Any, epoch_itr: Any) -> bool:
    limits = trainer.cfg.optimization
    if trainer.get_num_updates() >= (limits.max_update or math.inf):
        return True
    if epoch_itr.end_of_epoch() and epoch_itr.epoch >= (limits.max_epoch or math.inf):
        return True
    hours = limits.stop_time_hours
    return hours > 0 and trainer.cumulative_training_time() / 3600 > hours


@replaces("checkpoint_utils.load_checkpoint")
def runs_say_where_they_are(original: Callable[..., Any], cfg: Any, trainer: Any,
                            **kwargs: Any) -> Any:
    """If a run is already finished, report this instead of training another step. Also record the
    update from which a stopped run can resume.

    If a finished run is started again, fairseq <= 0.12.3 trains one more step. If a run is stopped,
    every rank of fairseq <= 0.12.3 prints a traceback.
    """
    extra_state, epoch_itr = original(cfg, trainer, **kwargs)
    done, limits = trainer.get_num_updates(), trainer.cfg.optimization
    newest = cfg.restore_file == _LAST and not cfg.no_last_checkpoints
    RUN.resume(trainer.get_num_updates, done if newest and done else None,
               None if cfg.no_save else cfg.save_dir,
               "the same command" if newest else "the command with --restore-file FILE")
    for flag, so_far, limit in (("--max-update", done, limits.max_update),
                                ("--max-epoch", epoch_itr.next_epoch_idx - 1, limits.max_epoch)):
        if done and 0 < limit <= so_far:
            logger.info("the run of %s is finished: it has done %d of %s %d. Use a larger number "
                        "to continue", cfg.save_dir, so_far, flag, limit)
            limits.max_epoch = -1  # ends training at once; 0 would mean no limit
    return extra_state, epoch_itr


@replaces("checkpoint_utils.torch_persistent_save")
def checksums(original: Callable[..., None], obj: Any, filename: str,
              async_write: bool = False) -> None:
    """Make fairseq store checksums in its checkpoints.

    fairseq <= 0.12.3 writes files without checksums. After an error, fairseq <= 0.12.3 writes to
    the same incomplete file again.
    """
    from fairseq.file_io import PathManager

    from moe_plugin.checkpoint.formats.fairseq import files

    if async_write or PathManager.path_requires_pathmanager(filename):
        original(obj, filename, async_write=async_write)
    else:
        files.write(obj, filename)


@replaces("checkpoint_utils.load_checkpoint")
def training_from_rank_files(original: Callable[..., Any], cfg: Any, trainer: Any,
                             **kwargs: Any) -> Any:
    """Make every training flag that names a checkpoint accept either `X.pt` or one of the files
    `X-rank-0.pt`, `X-rank-1.pt`, ...

    fairseq <= 0.12.3 inserts the rank only into the path of `--restore-file`. In fairseq <= 0.12.3,
    each rank checks whether its own `checkpoint_last` exists to decide whether the run is new. If a
    different number of ranks wrote the files, the ranks could come to different decisions.
    """
    names = _names(cfg)
    wanted = names.get("restore_file", cfg.restore_file)
    if wanted != _LAST and _existing(wanted) is None and trainer.data_parallel_rank == 0:
        logger.warning("--restore-file %s does not exist: training begins at step 0", wanted)
    before = {name: cfg[name] for name in names}
    cfg.update(names)
    try:
        return original(cfg, trainer, **kwargs)
    finally:
        cfg.update(before)


def _names(cfg: Any) -> dict[str, str | None]:
    """Return the settings that contain checkpoint names, with each name converted to the form that
    fairseq requires.

    Raises:
        ValueError: If a named checkpoint does not exist.
    """
    from moe_plugin.checkpoint.formats.fairseq import files

    names: dict[str, str | None] = {}
    if files.has_rank(cfg.restore_file):
        folder, name = os.path.split(files.without_rank(cfg.restore_file))
        names["restore_file"] = os.path.join(folder or ".", name)
    resets = (cfg.reset_optimizer or cfg.reset_lr_scheduler or cfg.reset_meters
              or cfg.reset_dataloader)  # fairseq refuses these with --finetune-from-model
    begun = (cfg.restore_file == _LAST and not resets
             and _existing(os.path.join(cfg.save_dir, _LAST)) is not None)
    for flag in ("finetune_from_model", "continue_once"):
        given = cfg.get(flag)
        if given is not None:
            names[flag] = None if begun else _existing(given)
            if not begun and names[flag] is None:
                raise _missing(f"--{flag.replace('_', '-')}", given)
    return names


def _existing(path: str) -> str | None:
    """Return the path of a checkpoint file, or the path of the first rank's file. Return None if
    neither file exists. Remote files are assumed to exist.
    """
    from fairseq.file_io import PathManager

    from moe_plugin.checkpoint.formats.fairseq import files

    if PathManager.path_requires_pathmanager(path):
        return path
    return next((name for name in (path, files.with_rank(path, 0)) if os.path.exists(name)), None)


def _missing(flag: str, path: str) -> ValueError:
    from moe_plugin.checkpoint.formats.fairseq import files

    return ValueError(f"{flag} {short(path)} does not exist, nor does {files.with_rank(path, 0)}. "
                      "Pass the path of a checkpoint, with or without a rank suffix")


@replaces("checkpoint_utils.load_model_ensemble_and_task")
def evaluation_from_rank_files(original: Callable[..., Any], filenames: Any,
                               arg_overrides: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Make `--path X.pt` also accept a checkpoint that consists of the files `X-rank-0.pt`,
    `X-rank-1.pt`, ... in evaluation.

    fairseq <= 0.12.3 can evaluate only a checkpoint that consists of a single file. With this
    patch, each process reads only its own share of the experts (see `Evaluation`). A single process
    reads all experts.
    """
    from moe_plugin.hosts.fairseq.groups import evaluating

    with evaluating() as evaluation:
        evaluation.asked = int((arg_overrides or {}).get("moe_expert_parallel_size") or 0)
        return original(filenames, arg_overrides, *args, **kwargs)


@replaces("checkpoint_utils.get_maybe_sharded_checkpoint_filename")
def existing_file(original: Callable[..., str], filename: str, *args: Any, **kwargs: Any) -> str:
    """Return the existing file of a checkpoint. See `evaluation_from_rank_files`."""
    name = original(filename, *args, **kwargs)
    existing = _existing(name)
    if existing is None:
        raise _missing("--path", name)
    return existing


@replaces("checkpoint_utils.load_checkpoint_to_cpu")
def part_of_experts(original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """Load a checkpoint with only this rank's experts. See `evaluation_from_rank_files`."""
    from moe_plugin.checkpoint.formats.fairseq import files
    from moe_plugin.hosts.fairseq.compat.flags import place_experts
    from moe_plugin.hosts.fairseq.groups import current_evaluation
    from moe_plugin.hosts.fairseq.resume import part_state

    overrides = (args[0] if args else kwargs.get("arg_overrides")) or {}
    if os.path.exists(path):
        written = files.read(path)  # raises errors that name the file and the remedy
        files.refuse_branch(path, written)
        _refuse_unknown(overrides, written)
    state, evaluation = original(path, *args, **kwargs), current_evaluation()
    if evaluation is not None:  # the model is built from the settings in the checkpoint
        _refuse_imports(path, state, overrides)
        _add_overrides(path, state, overrides)
        on_disk = place_experts(state) == "disk"
        if files.MANIFEST in state:
            size = evaluation.expert_ranks(state[files.MANIFEST]["num_experts"])
            state["model"] = part_state(path, evaluation.rank % size, size, on_disk)
    return state


def giving(state: dict[str, Any]) -> AbstractContextManager[None]:
    """Inside the block, make `Trainer.load_checkpoint` of fairseq <= 0.12.3 use `state` instead of
    reading a file.
    """
    import torch
    from fairseq import checkpoint_utils

    return replaced(checkpoint_utils, torch=Overlay(torch, load=lambda *_, **__: state))


def _refuse_imports(path: str, state: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise `UntrustedFile` if building the model would import modules that a checkpoint names."""
    from moe_plugin.checkpoint import trust

    settings = (state.get("cfg") or {}).get("model") or state.get("args")
    named = {name: value for name in ("moe_import", "moe_trust_imports")
             if name not in overrides and (value := _value(settings, name)) is not None}
    if named and trust.FLAG not in sys.argv:
        raise trust.UntrustedFile(f"checkpoint {path!r}, in its settings,",
                                  (f"{name}={value}" for name, value in named.items()))


def _names_of_settings() -> set[str]:
    from moe_plugin.hosts.fairseq.options import (
        GateLossFlags,
        MoELanguageModelConfig,
        MoETransformerFlags,
    )

    return {entry.name for cls in (GateLossFlags, MoELanguageModelConfig, MoETransformerFlags)
            for entry in dataclasses.fields(cls)}


def _refuse_unknown(overrides: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for `moe_...` settings unknown to this package and the checkpoint.

    fairseq <= 0.12.3 silently ignores such settings.
    """
    groups = [written.get("args"), *(dict(written.get("cfg") or {}).values())]
    known = _names_of_settings()
    for name in _names_in(overrides):
        if name.startswith("moe_") and name not in known and not any(
                name in (vars(group) if isinstance(group, Namespace) else group)
                for group in groups if isinstance(group, (Namespace, Mapping))):
            raise ValueError(f"--model-overrides: {short(name)} is not a setting; "
                             f"{did_you_mean(similar_names(name, known))}leave it out")


def _names_in(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield all names in a nested dict, including those inside groups."""
    for name, value in overrides.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from _names_in(value)


def _add_overrides(path: str, state: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Add settings that an older release of this package did not write to its checkpoints.

    fairseq <= 0.12.3 can override only settings that the checkpoint contains.
    """
    from omegaconf import open_dict

    settings = (state.get("cfg") or {}).get("model")
    if not isinstance(settings, MutableMapping) or not any(
            str(name).startswith("moe_") for name in settings):
        return
    for name in sorted((overrides.keys() & _names_of_settings()) - set(settings)):
        logger.info("%s lacks the setting %s of a newer release; --model-overrides sets it to %s",
                    path, name, overrides[name])
        container: Any = settings
        with open_dict(container):
            settings[name] = overrides[name]


def _value(settings: Any, name: str) -> Any:
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None)  # a fairseq namespace from any release
