"""The features of a run of Megatron's own loop."""

from __future__ import annotations

import argparse
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import ObserveConfig, run_config
from moe_plugin.hosts.megatron.activations import activations_of
from moe_plugin.hosts.megatron.compat.settings import script_arguments
from moe_plugin.hosts.megatron.guards import FileSteps, guard_of, twins_of
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.hosts.megatron.parameters import gather
from moe_plugin.hosts.megatron.passes import bare
from moe_plugin.hosts.megatron.report import log_path
from moe_plugin.hosts.megatron.run import MegatronStart, named, records_of
from moe_plugin.hosts.megatron.streamed import StreamedModel
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.observe.drops import DropWarning
from moe_plugin.observe.features import FirstStepLine, listen
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.output import LayerStats
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsFit
from moe_plugin.resilience.stopping import RUN
from moe_plugin.routing.steps import RouterSteps
from moe_plugin.run import RunFeature


def features_of(chunks: list[Any]) -> tuple[list[RunFeature | None], StatsRecorder]:
    """The features of a script's run with these parts of a model, and the recorder of its log;
    collective.
    """
    args = argparse.Namespace(**script_arguments())
    settings = settings_from_flags(vars(args))
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)]
    config = layers[0].plan.run if layers else run_config(settings)
    args.native_moe = bool(getattr(args, "num_experts", None)) and not layers
    guard = guard_of(args, settings, config.guard)
    drops = DropWarning(not layers or dist.get_rank(layers[0].groups.data) == 0)
    activations = activations_of(config.offload, layers[0].config, chunks) if layers else None
    records = None
    if config.observe.writes and layers:
        records = records_of(layers, config.observe, activations, drops.validation.add,
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
    votes = FileSteps(guard, chunks, bare(chunks[0]).config,
                      _microbatches(args)) if guard.votes else None
    return [FirstStepLine(), RUN, twins, records, votes,
            RowsFit(chunks, comm_of(), MegatronStart), FiniteSteps(), RouterSteps(chunks),
            activations, drops], recorder


def _microbatches(args: argparse.Namespace) -> int:
    return args.global_batch_size // (args.micro_batch_size * ps.get_data_parallel_world_size())
