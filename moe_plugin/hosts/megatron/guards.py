"""Checks of what ranks compute: twins that compute one micro-batch, and votes on the
gradients of a step.
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
from moe_plugin.hosts.megatron.run import MegatronStart
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.vote import Ballots, refuse_reported_loads
from moe_plugin.utils.run_feature import refuse_unfit

Logged = list[dict[str, Tensor]]
Passes = Callable[[list[Iterator[Any]], int], Logged]


def guard_of(args: argparse.Namespace, settings: Mapping[str, Any],
             guard: GuardConfig | None = None) -> GuardConfig:
    """What a run asks for.

    guard: what its layers were built with; None: as in the settings.
    Raises:
        ValueError: the run cannot have it; it names the setting, the reason and the remedy.
    """
    guard = run_config(settings).guard if guard is None else guard
    if not (guard.twins or guard.votes):
        return guard
    whole = [("--tensor-model-parallel-size", args.tensor_model_parallel_size == 1, "use 1"),
             ("--native-moe", not getattr(args, "native_moe", False), "leave it out")]
    if guard.twins:
        refuse_unfit(
            f"guard.twins={guard.twins}, which computes the whole model on each rank, once more "
            "than the step does,", [
                *whole,
                ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size == 1, "use 1"),
                ("--recompute-granularity", args.recompute_granularity is None, "leave it out")])
    if guard.votes:
        _check_votes(args, settings, guard, whole)
    return guard


def _check_votes(args: argparse.Namespace, settings: Mapping[str, Any], guard: GuardConfig,
                 whole: list[tuple[str, bool, str]]) -> None:
    balance, losses = args.moe_router_load_balancing_type, settings.get("losses") or {}
    stages, pipeline = args.pipeline_model_parallel_size, run_config(settings).pipeline
    refuse_unfit(
        f"guard.votes={guard.votes}, where each worker (a rank, an expert-parallel group, a "
        "pipeline) must compute and update the whole model by itself, and alike,", [
            *whole,
            ("--context-parallel-size", args.context_parallel_size == 1, "use 1"),
            ("--expert-tensor-parallel-size", args.expert_tensor_parallel_size in (None, 1),
             "use 1"),
            ("embeddings that the first and the last stage share", stages == 1
             or args.untie_embeddings_and_output_weights,
             "give --untie-embeddings-and-output-weights: their gradients are summed after the vote"
             ),
            ("--mtp-num-layers on several stages", stages == 1 or not args.mtp_num_layers,
             "leave it out: its embedding's gradients are summed after the vote"),
            ("virtual stages", args.virtual_pipeline_model_parallel_size is None,
             "leave them out"),
            (f"pipeline.schedule={pipeline.schedule}", pipeline.schedule == "1f1b", "use 1f1b"),
            ("--stage-layouts", not getattr(args, "stage_layouts", None), "leave it out"),
            ("--use-distributed-optimizer", not args.use_distributed_optimizer,
             "leave it out: what one rank updates for all cannot be voted on"),
            ("--overlap-grad-reduce", not args.overlap_grad_reduce,
             "leave it out: gradients would be summed before the vote"),
            ("--calculate-per-token-loss", not args.calculate_per_token_loss,
             "leave it out: it counts tokens of one rank's whole step"),
            ("--moe-lighthouse", getattr(args, "moe_lighthouse", None) is None,
             "leave it out: replicas' gradients are averaged, whatever they are"),
            ("--moe-router-enable-expert-bias", not args.moe_router_enable_expert_bias
             or args.moe_router_bias_update_rate == 0,
             "leave it out: its biases follow loads that every rank reports"),
            ("losses.global_batch", not losses.get("global_batch"), "use --moe-aux-loss-coeff"),
            ("--moe-router-load-balancing-type", "global" not in str(balance), "use aux_loss")])


@contextmanager
def twins_apart(chunks: Sequence[Any]) -> Iterator[None]:
    """Around a check of twins in the steps of a run: what passes change in Megatron is as before.
    """
    losses = core.losses_so_far()
    gather(chunks)
    for chunk in chunks:
        chunk.train()
    yield
    core.set_logged_losses(losses)


class FileSteps(StepVotes):
    """`StepVotes` over micro-batches of all ranks, which every rank reads; the passes of each file
    run by themselves.

    Args:
        guard: what is asked for.
        chunks: one, whose reduction of gradients is turned off.
        config: `TransformerConfig`.
        microbatches: of a step on each rank, without votes.
    Raises:
        ValueError: no such assignment for these ranks, files of different sizes, or a router that
            follows loads which ranks report.
    """

    def __init__(self, guard: GuardConfig, chunks: Sequence[Any], config: Any,
                 microbatches: int) -> None:
        [self.chunk] = chunks
        with refused_together("what stages say of their routers"):
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
                f"guard.assignment={guard.assignment!r} cuts a step into {parts} parts, "
                f"of which its {total} micro-batches must be a multiple; use another "
                "--global-batch-size, or 'cyclic'")
        # `finalize_model_grads` calls it
        self.chunk.finish_grad_sync = lambda **_: None

    def batches(self, own: list[Any]) -> list[Any]:
        """See `StepVotes`; `own` are those of all ranks."""
        return self.deal(own)

    def compute(self, passes: Passes, sums: Callable[[Logged], Tensor]) -> Tensor:
        """Set all gradients of the step; sums of all ranks, of losses and tokens first, float64;
        none where a stage is not the last.

        Collective.

        Args:
            passes: Megatron's forward and backward passes of so many micro-batches.
            sums: of what some micro-batches logged, float [2] or more.
        """
        config = self.config
        finalize, config.finalize_model_grads_func = config.finalize_model_grads_func, None
        losses = []
        try:
            for mine in self.files_dealt():
                self.begin_file()
                self.chunk.zero_grad_buffer()
                logged = passes([iter(mine)], len(mine))
                losses += [sums(logged).double()] if logged else []
        finally:
            config.finalize_model_grads_func = finalize
        agreed = self.agreed_sums(losses) if losses else torch.zeros(0)
        # a micro-batch's loss is divided by the number that a rank has
        scale = 1 / self.ballots.sharing.size
        self.finish(scale, scale)
        finalize([self.chunk])
        return agreed.cpu()

    def log_once(self, before: Mapping[str, Tensor]) -> None:
        """Count each micro-batch once in Megatron's log of auxiliary losses, although several
        workers have computed it.

        before: the log's sums before `compute`, see `core.losses_so_far`.
        """
        sums = core.losses_so_far()
        core.set_logged_losses({
            name: start + (values - start) / self._votes for name, values in sums.items()
            for start in [before.get(name, torch.zeros_like(values))]})
