"""What a run on Megatron's own loop tells: one JSON object and one line a logged iteration, with
the time that is left, a progress bar on a terminal, losses of validation, checkpoints, and where
a stopped run goes on.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.report import (
    RunLog,
    balance,
    layer_records,
    log_path,
    reduced,
    skipped,
    tell,
)
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.messages import progress
from moe_plugin.observe.features import LayerRecords
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.resilience.stopping import RUN
from moe_plugin.run import Run

logger = logging.getLogger("moe_plugin.megatron")


class ScriptReport:
    """See the module.

    Args:
        args: of the script; the loop changes them.
        changed: what the user gave otherwise than the defaults: (as written, default) by flag.
        run: its features.
        recorder: takes the statistics of the layers.

    Attributes:
        evaluates: how Megatron calls the evaluation that runs, and its iteration.
        done: steps.
    """

    def __init__(self, args: Mapping[str, Any], changed: Mapping[str, tuple[str, str]], run: Run,
                 recorder: StatsRecorder) -> None:
        self.args, self.run, self.recorder = args, run, recorder
        take_over = run_config(settings_from_flags(args)).observe.take_over_folder
        self.log = RunLog(log_path(args), take_over, dict(args), changed)
        self.total = args.get("train_iters") or 0
        self.evaluates, self.done, self._bar = ("", 0), 0, None  # type: tuple[str, int], int, Any
        self._timed = False
        self._forget(args.get("consumed_train_samples") or 0)

    def begin(self) -> None:
        """Say where the run begins, and tell what its user stops; after the model is loaded."""
        args, done = self.args, self.args.get("iteration") or 0
        self.done = done
        if args.get("skip_train"):
            return
        load, save = args.get("load"), args.get("save")
        same = load is not None and load == save
        RUN.resume(lambda: self.done, done if same and done else None,
                   save, "the same command" if same else f"the command with --load {save}")
        if self.total and done >= self.total:
            logger.info("the run of %s is finished: it has %d of --train-iters %d; a larger number "
                        "goes on", load, done, self.total)
        elif done:
            logger.info("goes on from iteration %d, of %s", done, load)
        if dist.get_rank() == 0:
            self._bar = progress(self.total or None, "training", stream=sys.stderr)
            self._bar.update(done)

    def _forget(self, samples: int) -> None:
        self._steps, self._loss, self._counted = 0, None, 0  # type: int, Any, int
        self._samples, self._since = samples, time.perf_counter()
        self._aux = dict[str, core.LoggedLoss]()

    def before_step(self) -> None:
        """The time of the first record begins here, after reading data."""
        if not self._timed:
            self._since = time.perf_counter()
            self._timed = True

    def after_step(self, number: int, losses: Mapping[str, torch.Tensor], counts: bool) -> None:
        """Take what a step logged, before Megatron's log empties its own.

        Args:
            number: of the step, from 1.
            losses: means of all ranks, on those of the last stage.
            counts: it was not skipped.
        """
        if self._bar is not None:
            self._bar.update(number - self.done)
        self._steps, self.done = self._steps + 1, number
        if counts and "lm loss" in losses:
            loss = losses["lm loss"].detach().double()
            self._loss = loss if self._loss is None else self._loss + loss
            self._counted += 1
        for name, entry in core.logged_losses().items() if counts else ():
            before = self._aux.get(name)
            values = entry.values.clone() if before is None else before.values + entry.values
            self._aux[name] = replace(entry, values=values)

    def after_log(self, iteration: int, rate: float | None, scale: float,
                  norm: float | None) -> None:
        """A record, every `--log-interval` iterations and at the end; a collective call."""
        args = self.args
        if iteration % args["log_interval"] and iteration != self.total:
            return
        samples, seconds = args["consumed_train_samples"], time.perf_counter() - self._since
        made, steps = samples - self._samples, max(1, self._steps)
        tokens = made * args["seq_length"]
        microbatches = made // (args["micro_batch_size"] * ps.get_data_parallel_world_size())
        record = {
            "iteration": iteration, "consumed_samples": samples, "lm_loss": self._mean_loss(),
            **skipped(self.run), "lr": rate, "loss_scale": float(scale),
            "grad_norm": None if norm is None else float(norm),
            "tokens_per_s": tokens / seconds, "seconds": seconds,
            "aux_losses": reduced(self._aux, max(1, microbatches)),
            "balance": balance(layer_records(
                self.recorder, iteration, finds=self.run.find(LayerRecords) is None)),
            **self.run.numbers(),
        }
        if self._bar is not None and record["lm_loss"] is not None:
            self._bar.set_postfix_str(f"loss {record['lm_loss']:.3f}")
        tell(record, self.log, self.run, self.total, max(0, self.total - iteration) * seconds
             / steps)
        self._forget(samples)

    def _mean_loss(self) -> float | None:
        mine = None if self._loss is None else float(self._loss) / self._counted
        return of_last_stage(mine)

    def after_evaluation(self, losses: Mapping[str, torch.Tensor]) -> None:
        """Say the loss of a validation or a test; a collective call.

        losses: means of all ranks, on those of the last stage.
        """
        loss, found = losses.get("lm loss"), self.run.evaluated()
        value = of_last_stage(None if loss is None else float(loss))
        if value is None:
            return
        prefix, step = self.evaluates
        kind = "test" if "test set" in prefix else "validation"
        if kind == "validation":
            self.log.write({"iteration": step, "valid_loss": value, **found})
        logger.info("iteration %d | %s loss %.4f", step, kind, value)

    def saved(self, iteration: int) -> None:
        """A checkpoint is complete."""
        RUN.saved = iteration
        logger.info("checkpoint: %s", os.path.join(self.args["save"], f"iter_{iteration:07d}"))

    def close(self) -> None:
        """Close the file and the bar."""
        self.log.close()
        if self._bar is not None:
            self._bar.close()


def of_last_stage(value: float | None) -> float | None:
    """A number that the ranks of the last stage alone have; None: none has it."""
    found = gather_objects(value, "the loss", ps.get_pipeline_model_parallel_group())
    return next((each for each in reversed(found) if each is not None), None)
