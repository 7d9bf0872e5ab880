"""The features of a run of Megatron's own loop."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import comm_of, gather_objects, refused_together
from moe_plugin.config import ObserveConfig, run_config
from moe_plugin.hosts.megatron.activations import activations_of
from moe_plugin.hosts.megatron.compat.settings import script_arguments, training_module
from moe_plugin.hosts.megatron.ensemble import EnsembleErrors, add_heads, ensemble_of
from moe_plugin.hosts.megatron.guards import FileSteps, guard_of, twins_of
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.hosts.megatron.parameters import gather
from moe_plugin.hosts.megatron.passes import bare
from moe_plugin.hosts.megatron.replicas import replicas_of
from moe_plugin.hosts.megatron.report import log_path
from moe_plugin.hosts.megatron.resizing import steps_of
from moe_plugin.hosts.megatron.run import MegatronStart, named, records_of, router_steps, traced
from moe_plugin.hosts.megatron.streamed import StreamedModel
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.memory.weights.files import read_beside
from moe_plugin.observe.drops import DropWarning
from moe_plugin.observe.features import FirstStepLine, listen
from moe_plugin.observe.prediction import prediction_check
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.output import LayerStats
from moe_plugin.resilience.averaging_peers import PeerSteps
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.resilience.stopping import RUN
from moe_plugin.run import RunFeature


def features_of(chunks: list[Any], optimizer: Any, scheduler: Any, taken: dict[int, int]
                ) -> tuple[list[RunFeature | None], StatsRecorder]:
    """The features of a script's run with these parts of a model, and the recorder of its log;
    collective.

    Args:
        optimizer: Megatron's; None: the run only evaluates.
        scheduler: of its learning rate.
        taken: see `Script`; replicas write it.
    """
    args = argparse.Namespace(**script_arguments())
    settings = settings_from_flags(vars(args))
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)]
    config = layers[0].plan.run if layers else run_config(settings)
    for layer in layers:
        layer.run_ends_steps = True
    args.native_moe = bool(getattr(args, "num_experts", None)) and not layers
    guard = guard_of(args, settings, config.guard)
    drops = DropWarning(not layers or dist.get_rank(layers[0].groups.data) == 0)
    activations = activations_of(config.offload, layers[0].config, chunks) if layers else None
    records = None
    observe = _traced(config.observe, args, layers)
    if observe.writes and layers:
        records = records_of(layers, observe, activations, drops.validation.add,
                             has_log=log_path(vars(args)) is not None)
        if isinstance(chunks[0], StreamedModel):
            chunks[0].watch(records.recorder)
    recorder = StatsRecorder(
        ObserveConfig(), comm_of(ps.get_tensor_and_data_parallel_group(with_context_parallel=True)),
        host="megatron")

    def training(name: str, stats: LayerStats) -> None:
        recorder.add(name, stats)
        if records is not None:
            records.recorder.add(name, stats)

    listen(named(layers), training, drops.validation.add)
    twins = twins_of(guard, bare(chunks[0]), lambda: gather(chunks))
    each = args.micro_batch_size * ps.get_data_parallel_world_size()
    votes = FileSteps(guard, chunks, bare(chunks[0]).config,
                      args.global_batch_size // each) if guard.votes else None
    replicas = (_replicas(args, chunks, optimizer, scheduler, taken)
                if optimizer is not None else None)
    check = prediction_check(observe, comm_of(), chunks, "megatron")
    return [steps_of(config, chunks, optimizer), FirstStepLine(), RUN, check, twins, replicas,
            records, votes, RowsFit(chunks, comm_of(), MegatronStart, votes=votes),
            FiniteSteps(), router_steps(chunks), activations, drops,
            _errors(args, chunks)], recorder


def _traced(observe: ObserveConfig, args: argparse.Namespace,
            layers: list[PluginMoELayer]) -> ObserveConfig:
    """`run.traced` of this stage's layers; what it refuses ends the stages without layers, too."""
    if not getattr(args, "moe_routing_trace_path", None):
        return observe
    with refused_together("what stages say of routing traces"):
        observe = traced(observe, args, layers) if layers else observe
    return observe


def with_heads(provider: Callable[..., Any]) -> Callable[..., Any]:
    """A script's model provider, whose models get the ensemble of heads that is asked for."""

    @functools.wraps(provider)
    def provide(*given: Any, **kwargs: Any) -> Any:
        args = argparse.Namespace(**script_arguments())
        model, ensemble = provider(*given, **kwargs), ensemble_of(args)
        return model if ensemble is None else add_heads(
            model, ensemble, _classes(args))

    return provide


def _classes(args: argparse.Namespace) -> int:
    """Token ids of the script's tokenizer, which knows them: `--vocab-size` may count one less."""
    tokenizer = training_module("global_vars").get_tokenizer()
    return int(getattr(tokenizer, "vocab_size", None) or args.vocab_size)


def _errors(args: argparse.Namespace, chunks: list[Any]) -> EnsembleErrors | None:
    if ensemble_of(args) is None:
        return None
    errors = EnsembleErrors(chunks)
    if not any(gather_objects(errors.has_heads, "which stages have heads")):
        raise ValueError(
            f"ensemble_heads={args.ensemble_heads} cannot be used with this script, which gives "
            "Megatron a model's config in place of a function that makes the model; use "
            "pretrain_gpt_moe, or leave it out")
    return errors


def _peers(args: argparse.Namespace, model: StreamedModel) -> PeerSteps | None:
    if not args.moe_lighthouse:
        return None
    settings, trainer, folder = settings_from_flags(vars(args)), model.trainer, model.loaded
    model.peers = PeerSteps(run_config(settings).offload, trainer, args.moe_lighthouse,
                            args.moe_replica, timeout_of(settings), lambda: trainer.steps,
                            lambda steps: None)  # data and rates go on at its own iteration
    if folder is not None:
        model.peers.saved = (read_beside(folder, block) for block in trainer.blocks)
    return model.peers


def _replicas(args: argparse.Namespace, chunks: list[Any], optimizer: Any,
              scheduler: Any, taken: dict[int, int]) -> RunFeature | None:
    if isinstance(chunks[0], StreamedModel):
        return _peers(args, chunks[0])
    given = script_arguments()

    def done() -> int:
        return given.get("curr_iteration", given.get("iteration", 0))

    def progress() -> tuple[int, ...]:
        return taken.get(done(), done()), scheduler.num_steps

    def take(iteration: int, samples: int) -> None:
        # Megatron's loop goes on after the present step: it reads the data of those between
        mine, scheduler.num_steps = done(), samples
        taken[mine] = iteration
        given["iterations_to_skip"] = [*given["iterations_to_skip"],
                                       *range(mine + 2, iteration + 2)]

    return replicas_of(args, [bare(chunk) for chunk in chunks], optimizer, progress, take)
