"""Checkpoint shims: checksums, and evaluation from the files of several ranks."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moe_plugin.hosts.fairseq.compat.overlay import Overlay
from moe_plugin.messages import short

logger = logging.getLogger(__name__)
_LAST = "checkpoint_last.pt"  # fairseq's default, in the run's folder


def checksums() -> None:
    """fairseq <= 0.12.3 writes files without checksums, and after an error again into the same
    half-written file.
    """
    from fairseq import checkpoint_utils

    from moe_plugin.checkpoint.formats.fairseq import files

    original = checkpoint_utils.torch_persistent_save
    manager = checkpoint_utils.PathManager

    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or manager.path_requires_pathmanager(filename):
            original(obj, filename, async_write=async_write)
        else:
            files.write(obj, filename)

    checkpoint_utils.torch_persistent_save = torch_persistent_save


def training_from_rank_files() -> None:
    """Let every flag of training that names a checkpoint take `X.pt` for `X-rank-0.pt`, ..., and
    one of these for all of them.

    fairseq <= 0.12.3 adds the rank to `--restore-file` alone, and looks for this rank's
    `checkpoint_last` to tell whether a run begins: ranks would differ where others wrote it.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        names = _names(cfg)
        wanted = names.get("restore_file", cfg.restore_file)
        if wanted != _LAST and _existing(wanted) is None and trainer.data_parallel_rank == 0:
            logger.warning("--restore-file %s is not there: training begins at step 0", wanted)
        before = {name: cfg[name] for name in names}
        cfg.update(names)
        try:
            return original(cfg, trainer, **kwargs)
        finally:
            cfg.update(before)

    checkpoint_utils.load_checkpoint = load_checkpoint


def _names(cfg: Any) -> dict[str, str | None]:
    """What settings that name checkpoints are for fairseq. `ValueError`: there is none."""
    from moe_plugin.checkpoint.formats.fairseq import files

    names: dict[str, str | None] = {}
    if files.has_rank(cfg.restore_file):
        folder, name = os.path.split(files.without_rank(cfg.restore_file))
        names["restore_file"] = os.path.join(folder or ".", name)
    resets = (cfg.reset_optimizer or cfg.reset_lr_scheduler or cfg.reset_meters
              or cfg.reset_dataloader)  # fairseq refuses them with --finetune-from-model
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
    """The file, or its first rank's; remote files are taken to be there."""
    from fairseq.file_io import PathManager

    from moe_plugin.checkpoint.formats.fairseq import files

    if PathManager.path_requires_pathmanager(path):
        return path
    return next((name for name in (path, files.with_rank(path, 0)) if os.path.exists(name)), None)


def _missing(flag: str, path: str) -> ValueError:
    from moe_plugin.checkpoint.formats.fairseq import files

    return ValueError(f"{flag} {short(path)} does not exist, nor does {files.with_rank(path, 0)}; "
                      "give the path of a checkpoint, with or without the number of a rank")


def evaluation_from_rank_files() -> None:
    """Let `--path X.pt` also stand for `X-rank-0.pt`, `X-rank-1.pt`, ... in evaluation.

    fairseq <= 0.12.3 evaluates from one file. A process gets the experts that are its part of the
    `Evaluation`: all of them, where it evaluates alone.
    """
    from fairseq import checkpoint_utils

    from moe_plugin.checkpoint.formats.fairseq import files
    from moe_plugin.checkpoint.formats.fairseq.resume import part_state
    from moe_plugin.hosts.fairseq.compat.flags import place_experts
    from moe_plugin.hosts.fairseq.groups import current_evaluation, evaluating

    build, name_of, load = (checkpoint_utils.load_model_ensemble_and_task,
                            checkpoint_utils.get_maybe_sharded_checkpoint_filename,
                            checkpoint_utils.load_checkpoint_to_cpu)

    def load_model_ensemble_and_task(filenames: Any, arg_overrides: Any = None, *args: Any,
                                     **kwargs: Any) -> Any:
        with evaluating() as evaluation:
            evaluation.asked = int((arg_overrides or {}).get("moe_expert_parallel_size") or 0)
            return build(filenames, arg_overrides, *args, **kwargs)

    def get_maybe_sharded_checkpoint_filename(filename: str, *args: Any, **kwargs: Any) -> str:
        name = name_of(filename, *args, **kwargs)
        found = _existing(name)
        if found is None:
            raise _missing("--path", name)
        return found

    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> Any:
        if os.path.exists(path):
            # its errors name the file and the remedy
            files.refuse_branch(path, files.read(path))
        state, evaluation = load(path, *args, **kwargs), current_evaluation()
        if evaluation is not None:  # its model is built by the settings in the checkpoint
            _refuse_imports(path, state, (args[0] if args else kwargs.get("arg_overrides")) or {})
            on_disk = place_experts(state) == "disk"
            if files.MANIFEST in state:
                size = evaluation.expert_ranks(state[files.MANIFEST]["num_experts"])
                state["model"] = part_state(path, evaluation.rank % size, size, on_disk)
        return state

    checkpoint_utils.load_model_ensemble_and_task = load_model_ensemble_and_task
    checkpoint_utils.get_maybe_sharded_checkpoint_filename = get_maybe_sharded_checkpoint_filename
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu


@contextmanager
def giving(state: dict[str, Any]) -> Iterator[None]:
    """fairseq <= 0.12.3 gives `Trainer.load_checkpoint` what is in a file; inside, this state."""
    import torch
    from fairseq import checkpoint_utils

    before = checkpoint_utils.torch
    checkpoint_utils.torch = Overlay(torch, load=lambda *_, **__: state)
    try:
        yield
    finally:
        checkpoint_utils.torch = before


def _refuse_imports(path: str, state: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """`UntrustedFile` where a checkpoint names modules that building its model would import."""
    from moe_plugin.checkpoint import trust

    settings = (state.get("cfg") or {}).get("model") or state.get("args")
    named = {name: value for name in ("moe_import", "moe_trust_imports")
             if name not in overrides and (value := _value(settings, name)) is not None}
    if named and trust.FLAG not in sys.argv:
        raise trust.UntrustedFile(f"checkpoint {path!r}, in its settings,",
                                  (f"{name}={value}" for name, value in named.items()))


def _value(settings: Any, name: str) -> Any:
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None)  # a namespace of fairseq's, of any release


SHIMS: tuple[Callable[[], None], ...] = (checksums, training_from_rank_files,
                                          evaluation_from_rank_files)
