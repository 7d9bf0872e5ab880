"""What is saved, and how copies of a checkpoint are made: whole ones whatever happens, and the
flags of fairseq's `moe` branch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moe_plugin.hosts.fairseq.compat.fields import add_field
from moe_plugin.hosts.fairseq.compat.overlay import Overlay
from moe_plugin.resilience.stopping import RUN

logger = logging.getLogger(__name__)

FLAGS = {
    "no_best_checkpoints": "don't store best checkpoints (fairseq moe)",
    "symlink_best_and_last_checkpoints":
        "checkpoint_best and checkpoint_last share the storage of the checkpoint that they equal "
        "(fairseq moe); hard links, which outlive the removal of old checkpoints",
    "no_save_optimizer_state_on_training_finished":
        "don't save optimizer state in the checkpoint of the last step (fairseq moe)",
}


@dataclass
class _Copies:
    """How copies are made now."""

    link: bool = False


def saving_flags() -> None:
    """fairseq <= 0.12.3 copies `checkpoint_last.pt` in place, so that a kill during the copy leaves
    a truncated file; it does not have the branch's flags of `FLAGS`.
    """
    from fairseq import checkpoint_utils
    from fairseq.dataclass.configs import CheckpointConfig

    from moe_plugin.checkpoint.formats.fairseq import files

    for name, text in FLAGS.items():
        add_field(CheckpointConfig, name, bool, False, text)
    paths, save, copies = checkpoint_utils.PathManager, checkpoint_utils.save_checkpoint, _Copies()

    def copy(source: str, target: str, overwrite: bool = False) -> bool:
        if paths.path_requires_pathmanager(source) or paths.path_requires_pathmanager(target):
            return bool(paths.copy(source, target, overwrite=overwrite))
        files.copy(source, target, link=copies.link)
        return True

    def save_checkpoint(cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None) -> None:
        copies.link = cfg.get("symlink_best_and_last_checkpoints", False)
        if cfg.get("no_best_checkpoints", False) and val_loss is not None:
            # the original stores what has a validation loss; it reads `best` from this function
            better = max if cfg.maximize_best_checkpoint_metric else min
            save_checkpoint.best = better(  # type: ignore[attr-defined]
                val_loss, getattr(save_checkpoint, "best", val_loss))
            val_loss = None
        bare = cfg.get("no_save_optimizer_state_on_training_finished", False) and _is_last(
            trainer, epoch_itr)
        with _without_optimizer_state(trainer.cfg.checkpoint, bare):
            save(cfg, trainer, epoch_itr, val_loss)
        if not cfg.no_save:
            RUN.saved = trainer.get_num_updates()

    checkpoint_utils.PathManager = Overlay(paths, copy=copy)
    checkpoint_utils.save_checkpoint = save_checkpoint


def _is_last(trainer: Any, epoch_itr: Any) -> bool:
    limits = trainer.cfg.optimization
    if trainer.get_num_updates() >= (limits.max_update or math.inf):
        return True
    if epoch_itr.end_of_epoch() and epoch_itr.epoch >= (limits.max_epoch or math.inf):
        return True
    hours = limits.stop_time_hours
    return hours > 0 and trainer.cumulative_training_time() / 3600 > hours


@contextmanager
def _without_optimizer_state(cfg: Any, bare: bool) -> Iterator[None]:
    before = cfg.no_save_optimizer_state
    cfg.no_save_optimizer_state = before or bare
    try:
        yield
    finally:
        cfg.no_save_optimizer_state = before


def runs_say_where_they_are() -> None:
    """fairseq <= 0.12.3 trains a step beyond the last when a finished run is started again; when
    it is stopped, every rank ends in a traceback.
    """
    from fairseq import checkpoint_utils

    original = checkpoint_utils.load_checkpoint

    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        extra_state, epoch_itr = original(cfg, trainer, **kwargs)
        done, limits = trainer.get_num_updates(), trainer.cfg.optimization
        newest = cfg.restore_file == "checkpoint_last.pt" and not cfg.no_last_checkpoints
        RUN.resume(trainer.get_num_updates, done if newest and done else None,
                  None if cfg.no_save else cfg.save_dir,
                  "the same command" if newest else "the command with --restore-file FILE")
        for flag, so_far, limit in (("--max-update", done, limits.max_update),
                                    ("--max-epoch", epoch_itr.next_epoch_idx - 1,
                                     limits.max_epoch)):
            if done and 0 < limit <= so_far:
                logger.info("the run of %s is finished: it has %d of %s %d; a larger number goes "
                            "on", cfg.save_dir, so_far, flag, limit)
                limits.max_epoch = -1  # no epoch follows; 0 stands for any number of them
        return extra_state, epoch_itr

    checkpoint_utils.load_checkpoint = load_checkpoint


SHIMS: tuple[Callable[[], None], ...] = (saving_flags, runs_say_where_they_are)
