"""Forward and backward passes of the training script, and its evaluation."""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import collectives_named, comm_of
from moe_plugin.config import run_config
from moe_plugin.ensembles.cmcl import BINS, HISTOGRAMS
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.names import get_forward_backward_func
from moe_plugin.hosts.megatron.run import MegatronStart
from moe_plugin.hosts.megatron.trainer import arguments
from moe_plugin.hosts.megatron.trainer.data import batches
from moe_plugin.hosts.megatron.trainer.ensemble import CONFIDENCE, ERRORS
from moe_plugin.hosts.megatron.trainer.model import forward_step
from moe_plugin.hosts.megatron.trainer.pipeline import forward_backward_func
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.run import Run

logger = logging.getLogger("moe_plugin.megatron")


class Passes:
    """Passes through a model's chunks by Megatron's schedule.

    Args:
        args: of the script. training: the model. log: takes a record of each evaluation.
        valid_set: what an evaluation reads; None: there is none.

    Attributes:
        features: of the run, around steps and evaluations.
        errors: of an ensemble in the last passes, tokens by the names of `ERRORS`. sure: in the
            last evaluation, numbers of predictions by confidence [HISTOGRAMS, BINS].
        microbatches: of a step, for each replica. replica, replicas: this one, and how many.
    """

    def __init__(self, args: argparse.Namespace, training: Any, log: Any, valid_set: Any) -> None:
        self.args, self.training, self.log, self.valid_set = args, training, log, valid_set
        self.schedule = forward_backward_func(run_config(arguments.our_settings(args)).pipeline,
                                              training.passes or get_forward_backward_func())
        self.replica, self.replicas = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
        self.microbatches = args.global_batch_size // (args.micro_batch_size * self.replicas)
        # experts that are elsewhere come after the layer's others
        self.device = next(training.chunks[0].parameters()).device
        self.errors = torch.zeros(len(ERRORS), dtype=torch.float64)
        self.sure = torch.zeros(len(HISTOGRAMS), BINS, dtype=torch.float64)
        self.features = self._features()

    def _features(self) -> Run:
        """Of an evaluation; collective."""
        return Run([RowsFit(self.training.chunks, comm_of(), MegatronStart)])

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
                  **self.error_rates(self.errors, tokens)}
        if self.training.ensemble is not None:
            record["confidence"] = dict(zip(HISTOGRAMS, self.sure.long().tolist(), strict=True))
        self.log.write(record)
        logger.info("iteration %d | validation loss %.4f", iteration, total / max(1.0, tokens))
        self.features.after_evaluation(iteration)
        return record

    def error_rates(self, errors: torch.Tensor, tokens: float) -> dict[str, float]:
        """Shares of tokens, for a record; none without an ensemble."""
        if self.training.ensemble is None:
            return {}
        return {
            name.replace("-", "").replace(" ", "_"): error / max(1.0, tokens)
            for name, error in zip(ERRORS, errors.tolist(), strict=True)}

    def _losses(self, batches: list[list[Any]]) -> torch.Tensor:
        return self._loss_sums(self._forward_backward(
            [iter(each) for each in batches], self.args.eval_iters, forward_only=True))

    def _batches(self, dataset: Any, start: int, of_all: bool = False) -> Iterator[Any]:
        """Micro-batches of this replica, or of all replicas by turns."""
        replica, replicas = (0, 1) if of_all else (self.replica, self.replicas)
        return batches(dataset, start=start, micro_batch_size=self.args.micro_batch_size,
                       replica=replica, replicas=replicas, device=self.device)

    def _forward_backward(self, batches: list[Any], microbatches: int, *,
                          forward_only: bool) -> list[dict[str, torch.Tensor]]:
        chunks = self.training.chunks
        one_step = (forward_step if self.training.ensemble is None else
                    functools.partial(forward_step, ensemble=self.training.ensemble))
        several = len(chunks) > 1
        length = self.args.seq_length
        with collectives_named("a collective of Megatron's step (gradients, or between stages)"):
            return self.schedule(
                forward_step_func=one_step, data_iterator=batches if several else batches[0],
                model=chunks if several else chunks[0], num_microbatches=microbatches,
                seq_length=length, micro_batch_size=self.args.micro_batch_size,
                decoder_seq_length=length, forward_only=forward_only)

    def _loss_sums(self, logged: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        return self._taken(self._all_sums(logged))

    def _all_sums(self, logged: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        sums = self._own_sums(logged)
        for group in (ps.get_data_parallel_group(), ps.get_pipeline_model_parallel_group()):
            sums = comm_of(group).all_reduce(sums)
        return sums.double().cpu()

    def _own_sums(self, logged: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        # over micro-batches: losses, tokens and, of an ensemble, errors and confidences
        if self.training.ensemble is None:
            return sum((entry["lm loss"] for entry in logged), torch.zeros(2, device=self.device))
        sums = torch.zeros(2 + len(ERRORS) + self.sure.numel(), device=self.device)
        for entry in logged:
            rows = [entry["lm loss"], *(entry[name][:1] for name in ERRORS)]
            rows.append(entry.get(CONFIDENCE, sums.new_zeros(self.sure.numel())))
            sums += torch.cat(rows)
        return sums

    def _taken(self, sums: torch.Tensor) -> torch.Tensor:
        # of such sums over all ranks, float64: (sum of losses, tokens); the others are kept
        loss_2, errors, sure = sums.split([2, *(
            (0, 0) if len(sums) == 2 else (len(ERRORS), self.sure.numel()))])
        if len(sums) > 2:
            self.errors, self.sure = errors, sure.view_as(self.sure)
        return loss_2
