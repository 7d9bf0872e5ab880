"""The run features of this trainer, and what it tells them of itself (`moe_plugin.run`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import GuardConfig, run_config
from moe_plugin.hosts.megatron.ensemble import EnsembleErrors, ensemble_of
from moe_plugin.hosts.megatron.guards import FileSteps, Logged, Passes, guard_of, twins_of
from moe_plugin.hosts.megatron.replicas import replicas_of
from moe_plugin.hosts.megatron.run import MegatronStart, records_of, router_steps
from moe_plugin.hosts.megatron.trainer.arguments import our_settings
from moe_plugin.hosts.megatron.trainer.checkpoint import Progress
from moe_plugin.observe.drops import DropWarning
from moe_plugin.observe.features import FirstStepLine, LayerRecords
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.resilience.stopping import RUN
from moe_plugin.run import Run, RunFeature


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
        FirstStepLine(), RUN, twins_of(guard, training.bare()[0], training.gather_parameters),
        _replicas(loop), records,
        _votes(guard, loop), RowsFit(training.chunks, comm_of(), MegatronStart), FiniteSteps(),
        router_steps(training.chunks), training.activations, drops,
        errors_of(args, training.chunks)])


def errors_of(args: argparse.Namespace, chunks: list[Any]) -> RunFeature | None:
    """Errors of an ensemble; None: there is none."""
    return EnsembleErrors(chunks) if ensemble_of(args) else None


def of_evaluation(loop: Any) -> list[RunFeature | None]:
    """Features of a run that only evaluates."""
    chunks = loop.training.chunks
    return [RowsFit(chunks, comm_of(), MegatronStart), errors_of(loop.args, chunks)]


def _replicas(loop: Any) -> RunFeature | None:
    training = loop.training

    def take(*progress: int) -> None:
        loop.progress = Progress(*progress)

    return replicas_of(loop.args, training.bare(), training.optimizer,
                       lambda: (loop.progress.iteration, loop.progress.consumed_samples), take)


def _votes(guard: GuardConfig, loop: Any) -> RunFeature | None:
    if not guard.votes:
        return None
    return FileSteps(guard, loop.training.chunks, loop.training.config, loop.microbatches)


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


def records_in(run: Run) -> LayerRecords:
    """The feature that every run of this trainer has."""
    found = run.find(LayerRecords)
    assert found is not None
    return found
