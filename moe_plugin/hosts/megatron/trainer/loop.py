"""The training loop of the training script: steps, evaluation, records, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.config import GuardConfig
from moe_plugin.hosts.megatron.trainer.guards import StepVotes, TwinSteps, losses_so_far
from moe_plugin.hosts.megatron.trainer.passes import Passes
from moe_plugin.observe.drops import DropWarning
from moe_plugin.resilience.stopping import RUN
from moe_plugin.routing import finish_step_of_any

logger = logging.getLogger("moe_plugin.megatron")


def learning_rate(args: argparse.Namespace, iteration: int) -> float:
    """Rate of a 0-based iteration.

    Linear warm-up to `lr`, then constant, linear or cosine decay to `min_lr`.
    """
    if iteration < args.lr_warmup_iters:
        return args.lr * (iteration + 1) / args.lr_warmup_iters
    if args.lr_decay_style == "constant":
        return args.lr
    total = (args.lr_decay_iters or args.train_iters) - args.lr_warmup_iters
    done = min(1.0, (iteration - args.lr_warmup_iters) / max(1, total))
    left = 1 - done if args.lr_decay_style == "linear" else (1 + math.cos(math.pi * done)) / 2
    return args.min_lr + (args.lr - args.min_lr) * left


class Loop(Passes):
    """The training loop: steps, evaluation, records, checkpoints."""

    said_first = False

    def __init__(self, args: argparse.Namespace, training: Any, observer: Any, log: Any,
                 train_set: Any, valid_set: Any, elastic: Any = None,
                 guard: Any = GuardConfig()) -> None:
        from moe_plugin.hosts.megatron.compat.finite import FiniteSteps

        super().__init__(args, training, log, valid_set)
        self.observer, self.train_set, self.elastic = observer, train_set, elastic
        self.finite = FiniteSteps(training.optimizer, elastic and elastic.average)
        self.warn_of_drops = DropWarning()
        self.votes = StepVotes(guard, training, self.microbatches) if guard.votes else None
        self.twins = TwinSteps(guard, training) if guard.twins else None

    def run(self, progress: Any) -> dict[str, Any]:
        """Train from `progress` to `train_iters`; returns the last record."""
        from moe_plugin.observe import progress as progress_bar

        args, record, saved = self.args, {}, progress.iteration
        self._begin(progress.iteration, lambda: progress.iteration)
        batches = self._training_batches(progress)
        sums, since = self._nothing(), time.perf_counter()
        here = dist.get_rank() == 0
        shown = contextlib.nullcontext(sys.stderr) if here else open(os.devnull, "w")
        with shown as stream, progress_bar(args.train_iters, "training", stream=stream) as bar:
            bar.update(progress.iteration)
            while progress.iteration < args.train_iters:
                RUN.go_on()
                before, begun = progress, time.perf_counter()
                if self.twins is not None:
                    batches = [self.twins(before.iteration + 1, batches[0])]
                with self.observer.timeline.around(before.iteration + 1):
                    loss_2, norm = self.step(batches, learning_rate(args, before.iteration))
                progress, follows = self._after_step(before)
                if not follows:
                    batches = self._training_batches(progress)
                if self.elastic is not None and self.elastic.lost:
                    continue
                sums, done = sums + torch.cat([loss_2, self.errors]), progress.iteration
                self._say_first(loss_2, done, begun)
                if self.votes is not None:
                    self.votes.report(done)
                if done % args.log_interval == 0 or done == args.train_iters:
                    record = self._record(progress, sums, norm, time.perf_counter() - since)
                    bar.set_postfix_str(f"loss {record['lm_loss'] or math.nan:.3f}")
                    sums, since = self._nothing(), time.perf_counter()
                if args.eval_interval and done % args.eval_interval == 0:
                    self.evaluate(done)
                    if here:
                        self.warn_of_drops.validation(done, self.observer.validation.take())
                if args.save and args.save_interval and done % args.save_interval == 0:
                    self._save(progress)
                    saved = done
                bar.update(done - before.iteration)
                if args.exit_interval and done % args.exit_interval == 0:
                    break
        if args.save and saved != progress.iteration:
            self._save(progress)
        return record

    def _begin(self, done: int, step: Callable[[], int]) -> None:
        args = self.args
        same = args.load is not None and args.load == args.save
        RUN.begin(step, done if same and done else None, args.save,
                  "the same command" if same else f"the command with --load {args.save}")
        if done >= args.train_iters:
            logger.info("the run of %s is finished: it has %d of --train-iters %d; a larger number "
                        "goes on", args.load, done, args.train_iters)
        elif done:
            logger.info("goes on from iteration %d, of %s", done, args.load)

    def _save(self, progress: Any) -> None:
        logger.info("checkpoint: %s", self.save(progress))
        RUN.saved = progress.iteration

    def save(self, progress: Any) -> str:
        """Write a checkpoint and return its folder; a collective call."""
        from moe_plugin.hosts.megatron.trainer.checkpoint import save

        return save(self.args.save, self.training, progress)

    def _say_first(self, loss_2: torch.Tensor, done: int, begun: float) -> None:
        from moe_plugin.observe import first_step

        if self.said_first or not loss_2[1]:  # without tokens the step was skipped
            return
        self.said_first = True
        logger.info("%s", first_step(time.perf_counter() - begun, float(loss_2[1]),
                                     self.args.train_iters - done))

    def _nothing(self) -> torch.Tensor:
        # sums of losses, tokens and errors of an ensemble, before a first step
        return torch.zeros(2 + len(self.errors), dtype=torch.float64)

    def _after_step(self, before: Any) -> tuple[Any, bool]:
        # progress, and whether the next samples follow those of this step
        from moe_plugin.hosts.megatron.trainer.checkpoint import Progress

        if self.elastic is not None:
            return self.elastic.after_step()
        return Progress(before.iteration + 1,
                        before.consumed_samples + self.args.global_batch_size), True

    def _training_batches(self, progress: Any) -> list[Iterator[Any]]:
        return [self._batches(self.train_set, progress.consumed_samples, self.votes is not None)
                for _ in self.training.chunks]

    def step(self, batches: list[Any], rate: float) -> tuple[torch.Tensor, float | None]:
        """One step: (sum of losses and number of tokens, float [2], gradient norm; None: it is not
        known). batches: by chunk of the model. rate: learning rate.
        """
        from moe_plugin.hosts.megatron.compat import core

        for chunk in self.training.chunks:
            chunk.train()
        kept = losses_so_far()
        taken = self.microbatches if self.votes is None else self.votes.total
        loss_2 = self.until_rows_fit(self._gradients, batches, taken,
                                     lambda: core.set_logged_losses(kept))
        self.finite.loss_is_finite = bool(loss_2.isfinite().all())
        for group in self.training.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            # Megatron's scheduler, which is not used here, gives vectors none
            group["weight_decay"] = self.args.weight_decay * group.get("wd_mult", 1.0)
        stepped, norm, _ = self.training.optimizer.step()
        if self.training.activations is not None:
            self.training.activations.after_step()
        # a lost step is made again; what routers counted in it is of this replica alone
        for chunk in () if self.elastic is not None and self.elastic.lost else self.training.chunks:
            finish_step_of_any(chunk)
        if not stepped or (self.elastic is not None and self.elastic.replica.healed):
            # its losses (also those of older weights) and auxiliary losses are part of no mean
            core.set_logged_losses(kept)
            loss_2 = torch.zeros_like(loss_2)
        return loss_2, None if norm is None else float(norm)

    def _gradients(self, batches: list[Any]) -> torch.Tensor:
        for chunk in self.training.chunks:
            chunk.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        passes = functools.partial(self._forward_backward, forward_only=False)
        if self.votes is not None:
            return self._taken(self.votes(passes, batches[0], self._own_sums))
        return self._loss_sums(passes(batches, self.microbatches))

    def _record(self, progress: Any, sums: torch.Tensor, norm: float | None,
                seconds: float) -> dict[str, Any]:
        from moe_plugin.hosts.megatron.trainer.report import auxiliary_losses, line

        total, tokens = sums[:2].tolist()
        steps = tokens / (self.args.global_batch_size * self.args.seq_length)
        computed = self.microbatches * (1 if self.votes is None else self.votes.copies)
        record = {
            "iteration": progress.iteration, "consumed_samples": progress.consumed_samples,
            "lm_loss": total / tokens if tokens else None,
            **self.error_rates(sums[2:], tokens), "skipped_steps": self.finite.skipped,
            "not_finite": self.finite.take_unscaled(),
            "lr": learning_rate(self.args, progress.iteration - 1),
            "loss_scale": float(self.training.optimizer.get_loss_scale()),
            "grad_norm": norm, "tokens_per_s": tokens / seconds, "seconds": seconds,
            "aux_losses": auxiliary_losses(max(1, round(steps)) * computed), "balance": {
                layer: {
                    key: row[key]
                    for key in ("max_over_mean", "drop_fraction", "unused_experts", "entropy")
                } for layer, row in self.observer.records(progress.iteration).items()
            },
        }
        if self.elastic is not None:
            record["replicas"] = self.elastic.replica.members
        rows = list(record["balance"].values())
        if rows and dist.get_rank() == 0:
            self.warn_of_drops(progress.iteration,
                               sum(row["drop_fraction"] for row in rows) / len(rows))
        self.log.write(record)
        left_s = (self.args.train_iters - progress.iteration) * seconds / max(1, round(steps))
        logger.info("%s", line(record, self.args.train_iters, left_s))
        if dist.get_rank() == 0:
            self.observer.logged(record)
        return record
