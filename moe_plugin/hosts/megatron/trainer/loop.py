"""The training loop of the training script: steps, evaluation, records, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import collectives_named, comm_of
from moe_plugin.config import run_config
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.finite import PreparedGradients
from moe_plugin.hosts.megatron.compat.names import get_forward_backward_func
from moe_plugin.hosts.megatron.pipeline import forward_backward_func
from moe_plugin.hosts.megatron.report import (
    auxiliary_losses,
    balance,
    layer_records,
    skipped,
    tell,
)
from moe_plugin.hosts.megatron.trainer import arguments
from moe_plugin.hosts.megatron.trainer import run as of_run
from moe_plugin.hosts.megatron.trainer.checkpoint import Progress, save
from moe_plugin.hosts.megatron.trainer.data import batches as batches_of
from moe_plugin.hosts.megatron.trainer.model import forward_step
from moe_plugin.observe import progress as progress_bar
from moe_plugin.resilience.stopping import RUN
from moe_plugin.run import Run, StepFacts, StepInput

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


class Loop:
    """The training loop: steps, evaluation, records, checkpoints, through a model's chunks by
    Megatron's schedule.

    Args:
        args: of the script; with `skip_train` it only evaluates. training: the model. log: takes
            its records. train_set, valid_set: None: there is none.

    Attributes:
        progress: of the steps made so far. features: of the run, around steps and evaluations.
        microbatches: of a step, for each replica. replica, replicas: this one, and how many.
    """

    def __init__(self, args: argparse.Namespace, training: Any, log: Any, train_set: Any,
                 valid_set: Any) -> None:
        self.args, self.training, self.log = args, training, log
        self.train_set, self.valid_set, self.progress = train_set, valid_set, Progress()
        self.schedule = forward_backward_func(run_config(arguments.our_settings(args)).pipeline,
                                              training.passes or get_forward_backward_func())
        self.replica, self.replicas = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        self.microbatches = args.global_batch_size // (args.micro_batch_size * self.replicas)
        # experts that are elsewhere come after the layer's others
        self.device = next(training.chunks[0].parameters()).device
        if args.skip_train:
            self.features = Run(of_run.of_evaluation(self))
        else:
            self.features = of_run.run_of(self)
            self.gradients = PreparedGradients(training.optimizer, lambda: self.features)

    def run(self, progress: Progress) -> dict[str, Any]:
        """Train from `progress` to `train_iters`; returns the last record."""
        args, record, saved, self.progress = self.args, {}, progress.iteration, progress
        self._begin(progress.iteration)
        batches = self.training_batches()
        sums, since = 0.0, time.perf_counter()
        shown = contextlib.nullcontext(sys.stderr) if dist.get_rank() == 0 else open(
            os.devnull, "w")
        with shown as stream, progress_bar(args.train_iters, "training", stream=stream) as bar:
            bar.update(progress.iteration)
            while self.progress.iteration < args.train_iters:
                before = self.progress.iteration
                loss_2, norm = self.step(batches, learning_rate(args, before))
                self.progress, follows = self._after_step()
                if not follows:
                    batches = self.training_batches()
                if self._lost:
                    continue
                sums, done = sums + loss_2, self.progress.iteration
                if done % args.log_interval == 0 or done == args.train_iters:
                    record = self._record(sums, norm, time.perf_counter() - since)
                    bar.set_postfix_str(f"loss {record['lm_loss'] or math.nan:.3f}")
                    sums, since = 0.0, time.perf_counter()
                if args.eval_interval and done % args.eval_interval == 0:
                    self.evaluate(done)
                if args.save and args.save_interval and done % args.save_interval == 0:
                    self._save()
                    saved = done
                bar.update(done - before)
                if args.exit_interval and done % args.exit_interval == 0:
                    break
        if args.save and saved != self.progress.iteration:
            self._save()
        return record

    def _begin(self, done: int) -> None:
        args = self.args
        same = args.load is not None and args.load == args.save
        RUN.resume(lambda: self.progress.iteration, done if same and done else None, args.save,
                   "the same command" if same else f"the command with --load {args.save}")
        if done >= args.train_iters:
            logger.info("the run of %s is finished: it has %d of --train-iters %d; a larger number "
                        "goes on", args.load, done, args.train_iters)
        elif done:
            logger.info("goes on from iteration %d, of %s", done, args.load)

    def _save(self) -> None:
        logger.info("checkpoint: %s", self.save(self.progress))
        RUN.saved = self.progress.iteration

    def save(self, progress: Progress) -> str:
        """Write a checkpoint and return its folder; a collective call."""
        return save(self.args.save, self.training, progress)

    @property
    def _lost(self) -> bool:
        left_out = self.features.left_out
        return left_out is not None and left_out.lost

    def _after_step(self) -> tuple[Progress, bool]:
        if self._lost:
            return self.progress, False
        return Progress(self.progress.iteration + 1, self.progress.consumed_samples
                        + self.args.global_batch_size), not self.features.replaced

    def training_batches(self) -> list[Iterator[Any]]:
        """Of each chunk of the model its micro-batches, from the sample where the run is."""
        return [self._batches(self.train_set, self.progress.consumed_samples, self.features.reduces)
                for _ in self.training.chunks]

    def step(self, batches: list[Any], rate: float) -> tuple[torch.Tensor, float | None]:
        """One step: (sum of losses and number of tokens, float [2], gradient norm; None: it is not
        known).

        Args:
            batches: by chunk of the model.
            rate: learning rate.
        """
        # who completes the gradients itself reads the micro-batches of all ranks
        count = self.microbatches * (self.replicas if self.features.reduces else 1)
        taken = [list(itertools.islice(each, count)) for each in batches]
        begins = StepInput(self.progress.iteration + 1, lambda: taken[0][0], self._loss_of)
        with self.features.around_step(begins):
            loss_2, norm = self._update([self.features.batches(each) for each in taken], rate)
        done = self.progress.iteration + 1  # another replica's progress may have been taken
        # steps that were skipped are counted in the log's records
        self.features.after_step(StepFacts(done, made=not self._lost, tokens=float(loss_2[1]),
                                           left=self.args.train_iters - done))
        return loss_2, norm

    def _loss_of(self, batch: Any) -> torch.Tensor:
        output, loss = forward_step(iter([batch]), self.training.bare()[0])
        return loss(output)[0]

    def _update(self, batches: list[Any], rate: float) -> tuple[torch.Tensor, float | None]:
        for chunk in self.training.chunks:
            chunk.train()
        kept = core.losses_so_far()
        loss_2 = self.computed(self._gradients, batches)
        self.gradients.loss_is_finite = bool(loss_2.isfinite().all())
        for group in self.training.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            # Megatron's scheduler, which is not used here, gives vectors none
            group["weight_decay"] = self.args.weight_decay * group.get("wd_mult", 1.0)
        stepped, norm, _ = self.training.optimizer.step()
        if not stepped or self.features.replaced:
            # its losses (also those of older weights) and auxiliary losses are part of no mean
            core.set_logged_losses(kept)
            loss_2 = torch.zeros_like(loss_2)
        return loss_2, None if norm is None else float(norm)

    def _gradients(self, batches: list[Any]) -> torch.Tensor:
        for chunk in self.training.chunks:
            chunk.zero_grad_buffer()
        self.training.optimizer.zero_grad()
        passes = functools.partial(self._forward_backward, forward_only=False)
        return of_run.gradient_sums(self.features, passes, batches, self._own_sums,
                                    self._loss_sums)

    def _record(self, sums: torch.Tensor, norm: float | None, seconds: float) -> dict[str, Any]:
        (total, tokens), iteration = sums.tolist(), self.progress.iteration
        steps = tokens / (self.args.global_batch_size * self.args.seq_length)
        computed = self.microbatches * self.features.copies
        record = {
            "iteration": iteration, "consumed_samples": self.progress.consumed_samples,
            "lm_loss": total / tokens if tokens else None, **skipped(self.features),
            "lr": learning_rate(self.args, iteration - 1),
            "loss_scale": float(self.training.optimizer.get_loss_scale()),
            "grad_norm": norm, "tokens_per_s": tokens / seconds, "seconds": seconds,
            "aux_losses": auxiliary_losses(max(1, round(steps)) * computed),
            "balance": balance(layer_records(of_run.records_in(self.features).recorder, iteration)),
            **self.features.numbers(),
        }
        left_s = (self.args.train_iters - iteration) * seconds / max(1, round(steps))
        tell(record, self.log, self.features, self.args.train_iters, left_s)
        return record

    def computed(self, passes: Callable[[list[list[Any]]], torch.Tensor],
                 batches: list[Iterable[Any]], count: int | None = None) -> torch.Tensor:
        """What `passes` return, begun again where a feature asks for it.

        Args:
            passes: of these micro-batches by chunk: all forward and backward passes of a step,
                which clear the gradients first; or all forward passes of an evaluation.
            batches: by chunk; `count` are taken of each; None: all.
        """
        taken = [list(itertools.islice(each, count)) for each in batches]
        kept = core.losses_so_far()

        def once() -> torch.Tensor:
            done = passes(taken)
            self.features.after_passes()
            return done

        return self.features.compute(once, lambda: core.set_logged_losses(kept))

    def evaluate(self, iteration: int) -> dict[str, Any]:
        """The mean loss of `eval_iters` micro-batches of the validation set, logged and returned.

        Without a validation set: nothing. A collective call.
        """
        if self.valid_set is None:
            return {}
        self.training.gather_parameters()
        for chunk in self.training.chunks:
            chunk.eval()
        batches = [self._batches(self.valid_set, 0) for _ in self.training.chunks]
        with torch.no_grad():
            total, tokens = self.computed(self._losses, batches, self.args.eval_iters).tolist()
        record = {"iteration": iteration, "valid_loss": total / max(1.0, tokens),
                  **self.features.evaluated()}
        self.log.write(record)
        logger.info("iteration %d | validation loss %.4f", iteration, total / max(1.0, tokens))
        self.features.after_evaluation(iteration)
        return record

    def _losses(self, batches: list[list[Any]]) -> torch.Tensor:
        return self._loss_sums(self._forward_backward(
            [iter(each) for each in batches], self.args.eval_iters, forward_only=True))

    def _batches(self, dataset: Any, start: int, of_all: bool = False) -> Iterator[Any]:
        """Micro-batches of this replica, or of all replicas by turns."""
        replica, replicas = (0, 1) if of_all else (self.replica, self.replicas)
        return batches_of(dataset, start=start, micro_batch_size=self.args.micro_batch_size,
                       replica=replica, replicas=replicas, device=self.device)

    def _forward_backward(self, batches: list[Any], microbatches: int, *,
                          forward_only: bool) -> list[dict[str, torch.Tensor]]:
        chunks = self.training.chunks
        several = len(chunks) > 1
        length = self.args.seq_length
        with collectives_named("a collective of Megatron's step (gradients, or between stages)"):
            return self.schedule(
                forward_step_func=forward_step, data_iterator=batches if several else batches[0],
                model=chunks if several else chunks[0], num_microbatches=microbatches,
                seq_length=length, micro_batch_size=self.args.micro_batch_size,
                decoder_seq_length=length, forward_only=forward_only)

    def _loss_sums(self, logged: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        # over all ranks, float64: (sum of losses, tokens)
        sums = self._own_sums(logged)
        for group in (ps.get_data_parallel_group(), ps.get_pipeline_model_parallel_group()):
            sums = comm_of(group).all_reduce(sums)
        return sums.double().cpu()

    def _own_sums(self, logged: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        # over micro-batches
        return sum((entry["lm loss"] for entry in logged), torch.zeros(2, device=self.device))
