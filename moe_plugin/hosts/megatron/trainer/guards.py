"""Ranks that compute or send wrong numbers, in Megatron's training: votes on a step's gradients
(`plain.vote`) and the comparison of ranks with the same experts (`plain.twins`).
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.named_errors import comm_of
from moe_plugin.config import GuardConfig, MoEConfig, with_overrides
from moe_plugin.hosts.megatron.rows import Start
from moe_plugin.planner.byzshield import assign
from moe_plugin.resilience.twins import TwinCheck, alike
from moe_plugin.resilience.vote import Ballots, flat_gradients, refuse_reported_loads

logger = logging.getLogger("moe_plugin.megatron")
Logged = list[dict[str, Tensor]]
Run = Callable[[list[Iterator[Any]], int], Logged]
Sums = Callable[[Logged], Tensor]


def guard_of(args: argparse.Namespace, settings: Mapping[str, Any]) -> GuardConfig:
    """What a run asks for.

    Raises:
        ValueError: the run cannot have it; it names the setting, the reason and the remedy.
    """
    given = {path: value for path, value in settings.items() if path.startswith("guard.")}
    guard = with_overrides(MoEConfig(), given).guard
    whole = [("--tensor-model-parallel-size", args.tensor_model_parallel_size == 1, "use 1"),
             ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size == 1, "use 1"),
             ("--native-moe", not args.native_moe, "leave it out")]
    if guard.twins:
        _refuse(f"guard.twins={guard.twins}", "which computes the whole model on each rank, once "
                "more than the step does", [*whole, (
                    "--recompute-granularity", args.recompute_granularity is None, "leave it out")])
    if guard.votes:
        balance = args.moe_router_load_balancing_type
        losses = settings.get("losses") or {}
        _refuse(f"guard.votes={guard.votes}", "where each rank must compute and update the whole "
                "model by itself, and alike", [
                    *whole,
                    ("--expert-model-parallel-size", args.expert_model_parallel_size == 1,
                     "use 1, so that every rank has all experts"),
                    ("--use-distributed-optimizer", not args.use_distributed_optimizer,
                     "leave it out: what one rank updates for all cannot be voted on"),
                    ("--overlap-grad-reduce", not args.overlap_grad_reduce,
                     "leave it out: gradients would be summed before the vote"),
                    ("--calculate-per-token-loss", not args.calculate_per_token_loss,
                     "leave it out: it counts tokens of one rank's whole step"),
                    ("--moe-lighthouse", args.moe_lighthouse is None,
                     "leave it out: replicas' gradients are averaged, whatever they are"),
                    ("--moe-router-enable-expert-bias", not args.moe_router_enable_expert_bias
                     or args.moe_router_bias_update_rate == 0,
                     "leave it out: its biases follow loads that every rank reports"),
                    ("losses.global_batch", not losses.get("global_batch"),
                     "use --moe-aux-loss-coeff"),
                    ("--moe-router-load-balancing-type", "global" not in str(balance),
                     "use aux_loss")])
    return guard


def _refuse(what: str, why: str, unfit: Sequence[tuple[str, bool, str]]) -> None:
    for name, ok, remedy in unfit:
        if not ok:
            raise ValueError(f"{what}, {why}, does not fit {name}: {remedy}")


def losses_so_far() -> dict[str, Tensor]:
    """A copy of Megatron's log of auxiliary losses, for `core.set_logged_losses`."""
    from moe_plugin.hosts.megatron.compat import core

    return {name: entry.values.clone() for name, entry in core.logged_losses().items()}


class StepVotes:
    """Votes in training steps. Every rank reads all micro-batches of a step, which are dealt out to
    files by turns, and computes those of its own files.

    Args:
        guard: what is asked for. training: its chunk no longer reduces gradients by itself.
        microbatches: of a step on each rank, without votes.
    Raises:
        ValueError: no such assignment for these ranks, files of different sizes, or a router that
            follows loads which ranks report.

    Attributes:
        total: micro-batches that a step takes from the data, all ranks' together.
        copies: ranks that compute each of them.
    """

    def __init__(self, guard: GuardConfig, training: Any, microbatches: int) -> None:
        from megatron.core import parallel_state as ps

        [self.chunk] = training.chunks
        refuse_reported_loads(self.chunk)
        comm = comm_of(ps.get_data_parallel_group())
        assignment = assign(guard.assignment, comm.size, guard.votes)
        self.ballots = Ballots(assignment, comm, guard.aggregate)
        self.training, self.copies = training, guard.votes
        self.total = microbatches * comm.size
        if self.total % assignment.count:
            raise ValueError(
                f"guard.assignment={guard.assignment!r} cuts a step into {assignment.count} parts, "
                f"of which its {self.total} micro-batches must be a multiple; use another "
                "--global-batch-size, or 'cyclic'")
        # `finalize_model_grads` calls it
        self.chunk.finish_grad_sync = lambda **_: None
        self.parameters = [p for p in self.chunk.parameters() if p.requires_grad]
        self.layers = [layer.moe for layer in training.moe_layers()]

    def __call__(self, run: Run, batches: Iterator[Any], sums: Sums) -> Tensor:
        """Set all gradients of a step; sums of all ranks, of losses and tokens first, float64.

        Collective.

        Args:
            run: Megatron's forward and backward passes of so many micro-batches.
            batches: those of all ranks, in order.
            sums: of what some micro-batches logged, float [2] or more.
        """
        step = list(itertools.islice(batches, self.total))
        config, count = self.training.config, self.ballots.assignment.count
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        start, answers, losses = Start([]), [], []
        try:
            with alike(self.layers):
                for file in self.ballots.files:
                    start.restore()
                    self.chunk.zero_grad_buffer()
                    mine = step[file::count]
                    logged = run([iter(mine)], len(mine))
                    losses.append(sums(logged).double())
                    answers.append(flat_gradients(self.parameters, self._gradients()))
        finally:
            config.finalize_model_grads_func = finalize
        result_N = self.ballots.result(torch.stack(answers))
        sums_FS = self.ballots.winners(torch.stack(losses).to(self.ballots.comm.device))
        self._set(result_N)
        finalize([self.chunk])
        return sums_FS.sum(0).cpu()

    def report(self, iteration: int) -> None:
        """Warn of ranks that were outvoted since the last call."""
        found = self.ballots.verdict()
        if found.outvoted or found.undecided:
            logger.warning("iteration %d: outvoted ranks: %s; parts without a majority: %s",
                           iteration, list(found.outvoted), list(found.undecided))

    def _gradients(self) -> list[Tensor]:
        return [p.main_grad for p in self.parameters]

    @torch.no_grad()
    def _set(self, gradient_N: Tensor) -> None:
        parts = gradient_N.split([p.numel() for p in self.parameters])
        for gradient, part_N in zip(self._gradients(), parts, strict=True):
            gradient.copy_(part_N.view_as(gradient))


class TwinSteps:
    """`TwinCheck` of a training run, before the steps that are due. Made by all ranks; collective.

    Args:
        guard: what is asked for. training: not cut over tensor-parallel ranks or pipeline stages.
    Raises:
        ValueError: no two ranks store the same experts.
    """

    def __init__(self, guard: GuardConfig, training: Any) -> None:
        from megatron.core import parallel_state as ps

        self.training = training
        world = comm_of(ps.get_data_parallel_group())
        self.check = TwinCheck(training.bare()[0], world, every=guard.twins, start=Start)

    def __call__(self, iteration: int, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a step, after the check if it is due.

        iteration: from 1.

        Raises:
            WrongResultError: on all ranks.
        """
        if not self.check.due(iteration):
            return batches
        from moe_plugin.hosts.megatron.compat import core
        from moe_plugin.hosts.megatron.trainer.model import forward_step

        first = next(batches)
        kept = losses_so_far()
        self.training.gather_parameters()
        model = self.training.bare()[0]
        model.train()

        def loss_of(batch: Any) -> Tensor:
            output, loss = forward_step(iter([batch]), model, ensemble=self.training.ensemble)
            return loss(output)[0]

        self.check(iteration, first, loss_of)
        core.set_logged_losses(kept)
        return itertools.chain([first], batches)
