"""Check the results of ranks in two ways: twins compute the same micro-batch and compare their
results, and replicas vote on gradients.
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
from moe_plugin.hosts.megatron.compat import aux_losses
from moe_plugin.hosts.megatron.parameters import gather
from moe_plugin.hosts.megatron.refusals import TWINS, VOTES, values_of
from moe_plugin.hosts.megatron.run import MegatronStart
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.vote import Ballots, refuse_reported_loads
from moe_plugin.utils.replaced import replaced

Logged = list[dict[str, Tensor]]
Passes = Callable[[list[Iterator[Any]], int], Logged]


def guard_of(args: argparse.Namespace, settings: Mapping[str, Any],
             guard: GuardConfig | None = None) -> GuardConfig:
    """Return the settings of the checks that a run requests, by default those in `settings`.

    Raises: ValueError: If the run does not support a requested check.
    """
    guard = run_config(settings).guard if guard is None else guard
    values = values_of(args, settings, **{"guard.twins": guard.twins, "guard.votes": guard.votes})
    for requested, request in ((guard.twins, TWINS), (guard.votes, VOTES)):
        if requested:
            request.refuse(values)
    return guard


@contextmanager
def twins_apart(chunks: Sequence[Any]) -> Iterator[None]:
    """When the block ends, restore the state of Megatron that a comparison of twins changes.

    Before the block runs, gather the parameters and set the model chunks to training mode.
    """
    losses = aux_losses.losses_so_far()
    gather(chunks)
    for chunk in chunks:
        chunk.train()
    yield
    aux_losses.set_logged_losses(losses)


class FileSteps(StepVotes):
    """`StepVotes` for Megatron. The votes cover the micro-batches of all ranks, and every rank
    reads all of these micro-batches. The micro-batches are divided into groups (called files). The
    forward and backward passes of each file run separately.

    Args:
        guard: settings of the checks.
        chunks: list with the only model chunk, whose gradient reduction is disabled.
        config: `TransformerConfig`.
        microbatches: number of micro-batches that each rank would compute per step without votes.
    Raises:
        ValueError: If no assignment of files exists for this number of ranks, if the files would
            differ in size, or if a router depends on loads that ranks report.
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
                         lambda p: getattr(p, "main_grad"), MegatronStart)
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
        """Return the micro-batches of this worker, given those of all ranks."""
        return self.deal(own)

    def compute(self, passes: Passes, sums: Callable[[Logged], Tensor]) -> Tensor:
        """Compute all gradients of the step. Return the sums of the logged values over all ranks.

        The sums are a float64 tensor. The first two elements of the tensor are the sum of the
        losses and the number of tokens. On all pipeline stages except the last one, the returned
        tensor is empty. This is a collective operation, so all ranks must call this method.

        Args:
            passes: function that runs Megatron's forward and backward passes for a given number of
                micro-batches.
            sums: function that adds up the logged values of several micro-batches. The returned
                float tensor has at least two elements.
        """
        losses, finalize = [], self.config.finalize_model_grads_func
        with replaced(self.config, finalize_model_grads_func=None):
            for file_batches in self.files_dealt():
                self.begin_file()
                self.chunk.zero_grad_buffer()
                logged = passes([iter(file_batches)], len(file_batches))
                losses += [sums(logged).double()] if logged else []
        agreed = self.agreed_sums(losses) if losses else torch.zeros(0)
        # Megatron divides a micro-batch's loss by the number of micro-batches of one rank
        scale = 1 / self.ballots.sharing.size
        self.finish(scale, scale)
        finalize([self.chunk])
        return agreed.cpu()

    def log_once(self, before: Mapping[str, Tensor]) -> None:
        """Count each micro-batch once in Megatron's log, not once per worker that computes it.

        before: the logged sums before `compute`, as returned by `aux_losses.losses_so_far`.
        """
        sums = aux_losses.losses_so_far()
        aux_losses.set_logged_losses({
            name: start + (values - start) / self._votes for name, values in sums.items()
            for start in [before.get(name, torch.zeros_like(values))]})
