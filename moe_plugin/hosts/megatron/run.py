"""Data that the features of a run (`moe_plugin.training.run`) need from Megatron's script.

For `--moe-expert-parallel-at`, this module also changes the expert-parallel size between two steps.
Megatron's training loop stores references to several objects: the process groups of dense layers,
the optimizer, the model's wrapper and the scheduler. Because of these references, the objects are
modified in place instead of being replaced.

Ranks' results are checked in two ways: twins compute the same micro-batch and compare their
results, and replicas vote on gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from moe_plugin.checkpoint.resize import change_expert_parallel
from moe_plugin.comm.base import Comm
from moe_plugin.comm.host_collectives import comm_of, refused_together
from moe_plugin.config import GuardConfig, ObserveConfig, RunConfig, run_config
from moe_plugin.hosts.megatron.compat import aux_losses, core, regrouping
from moe_plugin.hosts.megatron.compat import optimizer as optimizers
from moe_plugin.hosts.megatron.compat.core import bare
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.layer import PluginMoELayer, plugin_layers
from moe_plugin.hosts.megatron.parameters import gather
from moe_plugin.hosts.megatron.refusals import REPLICAS, RESIZE, TWINS, VOTES, values_of
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.planner.vote_assignments import assign
from moe_plugin.training.resilience.elastic import ReplicaPlace, is_replica
from moe_plugin.training.resilience.resizing import ExpertParallelSteps, expert_parallel_steps
from moe_plugin.training.resilience.skipped_steps import StepStart
from moe_plugin.training.resilience.step_votes import StepVotes
from moe_plugin.training.resilience.vote import Ballots, refuse_reported_loads
from moe_plugin.utils.replaced import replaced

Logged = list[dict[str, Tensor]]
Passes = Callable[[list[Iterator[Any]], int], Logged]


def of_stage(config: ObserveConfig) -> ObserveConfig:
    """Return the `observe` settings for the current pipeline stage.

    Only one process may write to a file, so all stages but the first write to separate files.
    """
    stage = ps.get_pipeline_model_parallel_rank()
    return replace(config, jsonl=f"{config.jsonl}.stage{stage}") if (
        stage and config.jsonl) else config


def traced(config: ObserveConfig, args: Any,
           layers: Sequence[PluginMoELayer]) -> ObserveConfig:
    """Return the `observe` settings with the routing trace that `--moe-routing-trace-path`
    requests.

    If Megatron's own router is used, return the settings unchanged, because Megatron then writes
    the trace itself.

    Raises:
        ValueError: If `observe.trace` names a different folder, or if Megatron's arguments request
            a trace of anything other than the selected experts.
    """
    path = getattr(args, "moe_routing_trace_path", None)
    if not path or layers[0].plan.native_router:
        return config
    for name in ("capture_logits", "capture_hidden_states", "dump_weights"):
        if getattr(args, f"moe_routing_trace_{name}", False):
            raise ValueError(
                f"moe_routing_trace_{name}=True is not supported with moe-plugin's router. Leave "
                "it out.")
    if config.trace not in (None, path):
        raise ValueError(f"observe.trace={config.trace!r} contradicts --moe-routing-trace-path "
                         f"{path!r}. Use only one of the two.")
    steps = getattr(args, "moe_routing_trace_max_training_iters", None) or config.trace_steps
    return replace(config, trace=path, trace_steps=steps)


def named(layers: Sequence[PluginMoELayer]) -> dict[str, PluginMoELayer]:
    """Return a dict of the layers. The keys are the names under which the layers appear in the
    run's records.
    """
    return {f"layer{layer.layer_number}": layer for layer in layers}


@contextmanager
def tracker_states(states: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the block, Megatron's tracker of random generators has other states."""
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(before)


class MegatronStart(StepStart):
    """A snapshot of the state that Megatron's forward and backward passes change. The snapshot is
    restored before the passes are repeated.

    The snapshot includes the random generators that Megatron uses in its parallel regions.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__(chunks)
        self._tracker = get_cuda_rng_tracker()
        self._states = {name: state.clone() for name, state in self._tracker.get_states().items()}

    def restore(self) -> None:
        """Restore the state that was saved in this snapshot."""
        super().restore()
        self._tracker.set_states({name: state.clone() for name, state in self._states.items()})


def check_resizing(args: argparse.Namespace, run: RunConfig) -> None:
    """Raise a `ValueError` if the run does not support changing the expert-parallel size."""
    sizes = run.resize.expert_parallel_at
    if sizes:
        indivisible = next((n for n in sizes.values() if args.num_experts % n), None)
        RESIZE.refuse(values_of(args, {"resize.expert_parallel_at": sizes},
                                indivisible=indivisible))


def steps_of(run: RunConfig, chunks: list[Any], optimizer: Any) -> ExpertParallelSteps | None:
    """Return the feature that changes the expert-parallel size during training, or None.

    Args:
        chunks: model chunks with their wrappers.
        optimizer: Megatron's optimizer, or None if the model is only evaluated.
    """
    if optimizer is None or not run.resize.expert_parallel_at:
        return None
    size = core.groups(None).experts.size()
    world = comm_of(core.all_data_group(core.groups(None).collection))
    known = {size: regrouping.expert_groups()}

    def change(size: int) -> None:
        arguments = script_arguments()
        if size not in known:
            known[size] = regrouping.make_expert_groups(size, arguments)
        regrouping.restore_groups(known[size])
        _change(chunks[0], optimizer, world)
        arguments["expert_model_parallel_size"] = size

    return expert_parallel_steps(run, [bare(chunk) for chunk in chunks], size, change, world,
                                 "megatron")


def _change(chunk: Any, optimizer: Any, world: Comm) -> None:
    model, groups = bare(chunk), core.groups(None)
    layers = plugin_layers(model)
    experts = (p for layer in layers for p in layer.experts.parameters())
    part = regrouping.part_of(optimizer, experts)
    copies = regrouping.main_copies(part)
    comm = comm_of(groups.experts, layers[0].plan.config.comm.timeout_s)
    changed = change_expert_parallel(model, part.optimizer, comm, world, copies)
    for layer in layers:
        layer.follow_groups(groups)
    regrouping.follow_parameters(part, changed, copies)
    regrouping.follow_groups(model, groups.collection, groups.experts.size())
    regrouping.rewrap(chunk)


def check_replicas(args: argparse.Namespace) -> bool:
    """Return True for one of several replicas. Unfit arguments raise a `ValueError`."""
    return is_replica(args.moe_lighthouse, args.moe_replica, lambda: REPLICAS.refuse(
        values_of(args, settings_from_flags(vars(args)))))


def place_of(args: argparse.Namespace, models: Sequence[nn.Module], optimizer: Any,
             scheduler: Any, taken: dict[int, int]) -> ReplicaPlace | None:
    """Return an object that gives the replicas access to the state of this run, or None if the run
    has no replicas.

    Args:
        models: model chunks of the current rank, without their wrappers.
        optimizer: Megatron's outermost optimizer.
        scheduler: learning rate scheduler.
        taken: see `Script`. This function adds entries to the dict.
    """
    if not args.moe_lighthouse:
        return None
    given = script_arguments()

    def its_optimizers() -> list[Any]:
        # a rank without parameters of a kind has no optimizer for them
        inner = [part.optimizer for part in optimizers.parts(optimizer)]
        return [each for each in inner if each is not None]

    def done() -> int:
        return given.get("curr_iteration", given.get("iteration", 0))

    def progress() -> tuple[int, ...]:
        return taken.get(done(), done()), scheduler.num_steps

    def take(iteration: int, samples: int) -> None:
        # Megatron's loop continues after the current step: it skips the iterations between the
        # current and the received one, but reads their data
        current, scheduler.num_steps = done(), samples
        taken[current] = iteration
        given["iterations_to_skip"] = [*given["iterations_to_skip"],
                                       *range(current + 2, iteration + 2)]

    return ReplicaPlace(args.moe_lighthouse, args.moe_replica,
                        timeout_of(settings_from_flags(vars(args))), models, its_optimizers,
                        progress, take)


def guard_of(args: argparse.Namespace, settings: Mapping[str, Any],
             guard: GuardConfig | None = None) -> GuardConfig:
    """Return the settings of the checks that a run requests.

    guard: the guard settings that were used to build the layers. `guard` defaults to the guard
        settings in `settings`.
    Raises:
        ValueError: If the run does not support a requested check.
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
        """Return the micro-batches that the current worker has to compute. `own` contains the
        micro-batches of all ranks.
        """
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
        """Correct Megatron's log of auxiliary losses so that each micro-batch is counted once.

        Without this correction, a micro-batch would be counted once per worker that computes it.

        before: the logged sums before the call of `compute`, as returned by
        `aux_losses.losses_so_far`.
        """
        sums = aux_losses.losses_so_far()
        aux_losses.set_logged_losses({
            name: start + (values - start) / self._votes for name, values in sums.items()
            for start in [before.get(name, torch.zeros_like(values))]})
