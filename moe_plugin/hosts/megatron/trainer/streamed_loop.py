"""The training loop over a model whose weights stream, its segments and its checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint import checksums
from moe_plugin.hosts.megatron import checkpoint_files as files
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.trainer import checkpoint, streamed
from moe_plugin.hosts.megatron.trainer.checkpoint import Progress
from moe_plugin.hosts.megatron.trainer.loop import Loop
from moe_plugin.hosts.megatron.trainer.streamed import StreamedTraining
from moe_plugin.memory.weights.files import load_weights, save_weights
from moe_plugin.memory.weights.segments import plan_segments
from moe_plugin.messages import short
from moe_plugin.regular_files import check_input

logger = logging.getLogger("moe_plugin.megatron")
META = "streamed.json"


class StreamedLoop(Loop):
    """`Loop` with a `StreamedTraining`."""

    planned = False  # the segments

    def _losses(self, batches: list[Any]) -> torch.Tensor:
        return streamed.evaluate(self.training, iter(batches[0]), self.args.eval_iters,
                                 self.microbatches)

    def _update(self, batches: list[Any], rate: float) -> tuple[torch.Tensor, float | None]:
        training, kept = self.training, core.losses_so_far()
        for chunk in training.chunks:
            chunk.train()
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        norm = streamed.step(training, iter(batches[0]), self.microbatches)
        loss_2 = training.take_losses()
        if training.optimizer.prepare_grads():  # where the run's features look
            core.set_logged_losses(kept)
            return torch.zeros_like(loss_2), None
        self._plan()
        return loss_2, norm

    def _plan(self) -> None:
        """Cut the model into segments, once, from what its parts took in a step."""
        trainer = self.training.trainer
        if trainer.limit is None or self.planned:
            return
        self.planned = True
        plan = plan_segments(trainer, trainer.limit, self.microbatches)
        logger.info("segments of %s parts, planned for %.1f MiB: copies %s",
                    ", ".join(map(str, plan.counts)), trainer.limit / 2**20,
                    "hide" if plan.hides else "do not hide behind computation")

    def save(self, progress: Progress) -> str:
        """See `Loop`: `ROOT/iter_0000100` has a safetensors file for each part."""
        return save(self.args.save, self.training, progress)


def save(root: str, training: StreamedTraining, progress: Progress) -> str:
    """Write a checkpoint and return its folder.

    Raises:
        ValueError: it cannot be written; older ones are untouched.
        FloatingPointError: a weight or state of an optimizer is not finite; nothing is written.
    """
    folder = checkpoint.folder(root, progress.iteration)
    save_weights(training.trainer, folder, finite=True)
    files.write_text(os.path.join(folder, META), checksums.seal_json(
        {**dataclasses.asdict(progress), "settings": dict(training.settings),
         "optimizer": training.optimizer.kind}))
    files.write_text(os.path.join(root, checkpoint.LATEST), str(progress.iteration))
    return folder


def load(root: str, training: StreamedTraining) -> Progress:
    """Load the newest checkpoint that `save` wrote; without one, training starts from the
    beginning, with a warning, and an evaluation is refused.

    Raises: ValueError: it is of another model, damaged, or no checkpoint of streamed weights.
    """
    iteration = checkpoint.latest(root)
    if iteration is None:
        return checkpoint.nothing_found(root, training.evaluates)
    path = Path(checkpoint.folder(root, iteration)) / META
    if not path.exists():
        raise ValueError(f"{path.parent} has no {META}: it was not written with --weights-on host, "
                         "whose checkpoints are files of parts; give another folder to --load, or "
                         "use --weights-on device")
    check_input(path)
    try:
        meta, _ = checksums.open_json(path.read_text(encoding="utf-8"))
        progress = Progress(int(meta["iteration"]), int(meta["consumed_samples"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({short(error)}): write the number of another folder "
                         f"into {os.path.join(root, checkpoint.LATEST)}") from error
    folder, mine = str(path.parent), training.optimizer.kind
    checkpoint.check_settings(folder, meta.get("settings") or {}, training.settings)
    if not training.evaluates and meta.get("optimizer", mine) != mine:
        raise ValueError(checkpoint.differs(folder, "optimizer", meta["optimizer"], mine))
    load_weights(training.trainer, path.parent)
    return progress
