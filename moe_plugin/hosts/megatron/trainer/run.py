"""The run features of this trainer, and what it tells them of itself (`moe_plugin.run`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of, gather_objects
from moe_plugin.config import GuardConfig, run_config
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.run import MegatronStart, records_of
from moe_plugin.hosts.megatron.trainer.arguments import our_settings
from moe_plugin.hosts.megatron.trainer.checkpoint import Progress
from moe_plugin.hosts.megatron.translate import timeout_of
from moe_plugin.observe.drops import DropWarning
from moe_plugin.observe.features import FirstStepLine, LayerRecords
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.resilience.elastic import ReplicaSteps
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.resilience.step_votes import StepVotes
from moe_plugin.resilience.stopping import RUN
from moe_plugin.resilience.twins import TwinCheck
from moe_plugin.resilience.vote import Ballots, refuse_reported_loads
from moe_plugin.routing.steps import RouterSteps
from moe_plugin.run import Run, RunFeature, refuse_unfit

Logged = list[dict[str, Tensor]]
Passes = Callable[[list[Iterator[Any]], int], Logged]


def guard_of(args: argparse.Namespace, settings: Mapping[str, Any]) -> GuardConfig:
    """What a run asks for.

    Raises:
        ValueError: the run cannot have it; it names the setting, the reason and the remedy.
    """
    guard = run_config(settings).guard
    whole = [("--tensor-model-parallel-size", args.tensor_model_parallel_size == 1, "use 1"),
             ("--pipeline-model-parallel-size", args.pipeline_model_parallel_size == 1, "use 1"),
             ("--native-moe", not args.native_moe, "leave it out")]
    if guard.twins:
        refuse_unfit(
            f"guard.twins={guard.twins}, which computes the whole model on each rank, once more "
            "than the step does,", [
                *whole,
                ("--recompute-granularity", args.recompute_granularity is None, "leave it out")])
    if guard.votes:
        _check_votes(args, settings, guard, whole)
    return guard


def _check_votes(args: argparse.Namespace, settings: Mapping[str, Any], guard: GuardConfig,
                 whole: list[tuple[str, bool, str]]) -> None:
    balance, losses = args.moe_router_load_balancing_type, settings.get("losses") or {}
    refuse_unfit(
        f"guard.votes={guard.votes}, where each rank must compute and update the whole model by "
        "itself, and alike,", [
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
            ("losses.global_batch", not losses.get("global_batch"), "use --moe-aux-loss-coeff"),
            ("--moe-router-load-balancing-type", "global" not in str(balance), "use aux_loss")])


def run_of(loop: Any) -> Run:
    """The run of a training loop; collective.

    loop: has `args`, `training`, `progress` and `microbatches`.
    """
    args, training = loop.args, loop.training
    settings, drops = our_settings(args), DropWarning(dist.get_rank() == 0)
    guard = guard_of(args, settings)
    records = records_of(training.moe_layers(), run_config(settings).observe, training.activations,
                         drops.validation.add, flushes=False)
    training.watch(records.recorder)
    return Run([
        FirstStepLine(), RUN, _twins(guard, training), _replicas(loop, settings), records,
        _votes(guard, loop), RowsFit(training.chunks, comm_of(), MegatronStart), FiniteSteps(),
        RouterSteps(training.chunks), training.activations, drops])


def _twins(guard: GuardConfig, training: Any) -> RunFeature | None:
    if not guard.twins:
        return None

    @contextmanager
    def kept() -> Iterator[None]:
        losses = core.losses_so_far()
        training.gather_parameters()
        training.bare()[0].train()
        yield
        core.set_logged_losses(losses)

    return TwinCheck(training.bare()[0], comm_of(ps.get_data_parallel_group()),
                     every=guard.twins, start=MegatronStart, kept=kept)


def _replicas(loop: Any, settings: Mapping[str, Any]) -> RunFeature | None:
    args, training = loop.args, loop.training
    if not args.moe_lighthouse:
        return None

    def its_optimizers() -> list[Any]:
        # a rank without parameters of a kind has no optimizer for them
        return [part.optimizer for part in optimizers.parts(training.optimizer)
                if part.optimizer is not None]

    def state() -> dict[str, Any]:
        return {"optimizers": [each.state_dict() for each in its_optimizers()],
                "progress": (loop.progress.iteration, loop.progress.consumed_samples)}

    def load(given: dict[str, Any]) -> None:
        for optimizer, its_state in zip(its_optimizers(), given["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)
        loop.progress = Progress(*given["progress"])

    return ReplicaSteps(args.moe_lighthouse, args.moe_replica, timeout_of(settings),
                        training.bare(), state, load, lambda: loop.progress.iteration)


class FileSteps(StepVotes):
    """`StepVotes` over micro-batches of all ranks, which every rank reads; the passes of each file
    run by themselves.

    Args:
        guard: what is asked for. training: its chunk no longer reduces gradients by itself.
        microbatches: of a step on each rank, without votes.
    Raises:
        ValueError: no such assignment for these ranks, files of different sizes, or a router that
            follows loads which ranks report.
    """

    def __init__(self, guard: GuardConfig, training: Any, microbatches: int) -> None:
        [self.chunk] = training.chunks
        refuse_reported_loads(self.chunk)
        comm = comm_of(ps.get_data_parallel_group())
        assignment = assign(guard.assignment, comm.size, guard.votes)
        super().__init__(Ballots(assignment, comm, guard.aggregate), [self.chunk],
                         lambda p: p.main_grad, MegatronStart)
        self.config, self.copies = training.config, guard.votes
        total = microbatches * comm.size
        if total % assignment.count:
            raise ValueError(
                f"guard.assignment={guard.assignment!r} cuts a step into {assignment.count} parts, "
                f"of which its {total} micro-batches must be a multiple; use another "
                "--global-batch-size, or 'cyclic'")
        # `finalize_model_grads` calls it
        self.chunk.finish_grad_sync = lambda **_: None

    def batches(self, own: list[Any]) -> list[Any]:
        """See `StepVotes`; `own` are those of all ranks."""
        return self.deal(own)

    def compute(self, passes: Passes, sums: Callable[[Logged], Tensor]) -> Tensor:
        """Set all gradients of the step; sums of all ranks, of losses and tokens first, float64.

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
                losses.append(sums(passes([iter(mine)], len(mine))).double())
        finally:
            config.finalize_model_grads_func = finalize
        agreed = self.agreed_sums(losses)
        self.finish()
        finalize([self.chunk])
        return agreed.cpu()


def _votes(guard: GuardConfig, loop: Any) -> RunFeature | None:
    return FileSteps(guard, loop.training, loop.microbatches) if guard.votes else None


def gradient_sums(run: Run, passes: Passes, batches: list[list[Any]],
                  own: Callable[[Logged], Tensor], of_all: Callable[[Logged], Tensor]) -> Tensor:
    """Set all gradients of a step; its sums over all ranks, of losses and tokens first.

    Args:
        passes: see `FileSteps.compute`.
        batches: by chunk.
        own, of_all: sums of what this rank's micro-batches logged; of all ranks', collective.
    """
    votes = run.find(FileSteps)
    if votes is not None:
        return votes.compute(passes, own)
    return of_all(passes([iter(each) for each in batches], len(batches[0])))


def skipped(run: Run) -> dict[str, int]:
    """For the log: steps that were skipped so far, and since the last record those by which no
    loss scale fell.
    """
    finite = run.find(FiniteSteps)
    assert finite is not None
    return {"skipped_steps": finite.skipped, "not_finite": finite.take_unscaled()}


def layer_records(run: Run, iteration: int) -> dict[str, Any]:
    """Records by layer of all pipeline stages since the last call; a collective call."""
    recorder = records_in(run).recorder
    mine = recorder.reduce()
    recorder.write(iteration, mine)
    found = gather_objects(mine, "the layers' records", ps.get_pipeline_model_parallel_group())
    records = {layer: record for stage in found for layer, record in stage.items()}
    if dist.get_rank() == 0:  # the one that has a log
        recorder.health.add(iteration, records)
    return records


def records_in(run: Run) -> LayerRecords:
    """The feature that every run of this trainer has."""
    found = run.find(LayerRecords)
    assert found is not None
    return found
