"""The run features of this trainer, and what it tells them of itself (`moe_plugin.run`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import GuardConfig, run_config
from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.guards import FileSteps, Logged, Passes, guard_of, twins_of
from moe_plugin.hosts.megatron.run import MegatronStart, records_of
from moe_plugin.hosts.megatron.trainer.arguments import our_settings
from moe_plugin.hosts.megatron.trainer.checkpoint import Progress
from moe_plugin.hosts.megatron.translate import timeout_of
from moe_plugin.observe.drops import DropWarning
from moe_plugin.observe.features import FirstStepLine, LayerRecords
from moe_plugin.resilience.elastic import ReplicaSteps
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.resilience.stopping import RUN
from moe_plugin.routing.steps import RouterSteps
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
        _replicas(loop, settings), records,
        _votes(guard, loop), RowsFit(training.chunks, comm_of(), MegatronStart), FiniteSteps(),
        RouterSteps(training.chunks), training.activations, drops])


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
