"""Checks of the ranks' results by twins, which compute the same micro-batch, and by votes on
gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of, refused_together
from moe_plugin.config import GuardConfig, run_config
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.parameters import gather
from moe_plugin.hosts.megatron.refusals import TWINS, VOTES, values_of
from moe_plugin.hosts.megatron.run import MegatronStart
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.vote import Ballots, refuse_reported_loads

Logged = list[dict[str, Tensor]]
Passes = Callable[[list[Iterator[Any]], int], Logged]


def guard_of(args: argparse.Namespace, settings: Mapping[str, Any],
             guard: GuardConfig | None = None) -> GuardConfig:
    """Return the checks that the settings of a run request.

    guard: the guard settings with which the layers were built. By default the guard settings in
        `settings` are used.
    Raises:
        ValueError: If the run does not support the requested checks. The error message contains the
            setting, the reason and the remedy.
    """
    guard = run_config(settings).guard if guard is None else guard
    values = values_of(args, settings, **{"guard.twins": guard.twins, "guard.votes": guard.votes})
    for requested, request in ((guard.twins, TWINS), (guard.votes, VOTES)):
        if requested:
            request.refuse(values)
    return guard


@contextmanager
def twins_apart(chunks: Sequence[Any]) -> Iterator[None]:
    """Restore the state that a check of twins changes in Megatron when the block ends.

    Before the block starts, the parameters are gathered and the model chunks are set to training
    mode.
    """
    losses = core.losses_so_far()
    gather(chunks)
    for chunk in chunks:
        chunk.train()
    yield
    core.set_logged_losses(losses)


class FileSteps(StepVotes):
    """`StepVotes` over the micro-batches of all ranks. Every rank reads all of these micro-batches.

    The forward and backward passes are run separately for each file.

    Args:
        guard: the checks to run.
        chunks: list with the single model chunk, whose own gradient reduction is disabled.
        config: `TransformerConfig`.
        microbatches: number of micro-batches per step that each rank would compute without votes.
    Raises:
        ValueError: If no assignment exists for this number of ranks, if files would have different
            sizes, or if a router depends on loads reported by ranks.
    """

    def __init__(self, guard: GuardConfig, chunks: Sequence[Any], config: Any,
                 microbatches: int) -> None:
        [self.chunk] = chunks
        with refused_together("the check of the stages' routers"):
            refuse_reported_loads(self.chunk)
        comm = comm_of(ps.get_expert_data_parallel_group())
        sharing = comm_of(ps.get_expert_model_parallel_group())
        worker = comm_of(ps.get_expert_tensor_model_pipeline_parallel_group())
        assignment = assign(guard.assignment, comm.size, guard.votes)
        super().__init__(Ballots(assignment, comm, guard.aggregate, sharing, worker), [self.chunk],
                         lambda p: p.main_grad, MegatronStart)
        self.config, self._votes = config, guard.votes
        total, parts = microbatches * comm.size * sharing.size, assignment.count * sharing.size
        if total % parts:
            raise ValueError(
                f"guard.assignment={guard.assignment!r} divides a step into {parts} parts, but the "
                f"number of micro-batches, {total}, is not a multiple of {parts}. Use another "
                "--global-batch-size, or guard.assignment='cyclic'.")
        # `finalize_model_grads` would otherwise sum the gradients over all ranks after the vote
        self.chunk.finish_grad_sync = lambda **_: None

    def batches(self, own: list[Any]) -> list[Any]:
        """Return the micro-batches that are assigned to the current worker. `own` contains the
        micro-batches of all ranks.
        """
        return self.deal(own)

    def compute(self, passes: Passes, sums: Callable[[Logged], Tensor]) -> Tensor:
        """Compute all gradients of the step, and return the logged sums over all ranks.

        The sums are a float64 tensor that starts with the sum of losses and the number of tokens.
        On all pipeline stages except the last one, the returned tensor is empty. This is a
        collective call.

        Args:
            passes: function that runs Megatron's forward and backward passes on a given number of
                micro-batches.
            sums: function that reduces the logged values of several micro-batches to a float tensor
                with at least two elements.
        """
        config = self.config
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        losses = []
        try:
            for file_batches in self.files_dealt():
                self.begin_file()
                self.chunk.zero_grad_buffer()
                logged = passes([iter(file_batches)], len(file_batches))
                losses += [sums(logged).double()] if logged else []
        finally:
            config.finalize_model_grads_func = finalize
        agreed = self.agreed_sums(losses) if losses else torch.zeros(0)
        # Megatron divides a micro-batch's loss by the number of micro-batches of one rank
        scale = 1 / self.ballots.sharing.size
        self.finish(scale, scale)
        finalize([self.chunk])
        return agreed.cpu()

    def log_once(self, before: Mapping[str, Tensor]) -> None:
        """Make each micro-batch count once in Megatron's log of auxiliary losses.

        Without this correction a micro-batch would be counted by every worker that computes it.

        before: the logged sums before `compute`, as returned by `core.losses_so_far`.
        """
        sums = core.losses_so_far()
        core.set_logged_losses({
            name: start + (values - start) / self._votes for name, values in sums.items()
            for start in [before.get(name, torch.zeros_like(values))]})
