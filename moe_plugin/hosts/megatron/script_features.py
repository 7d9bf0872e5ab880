"""The features of a run in Megatron's own training loop."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import nn

from moe_plugin.comm.host_collectives import comm_of, gather_objects, refused_together
from moe_plugin.config import ObserveConfig, OffloadConfig, run_config
from moe_plugin.config.refusals import Values
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.core import bare
from moe_plugin.hosts.megatron.compat.finite import PreparedGradients
from moe_plugin.hosts.megatron.compat.names import TransformerLayer
from moe_plugin.hosts.megatron.compat.settings import (
    cuda_graphs,
    script_arguments,
    setting,
    training_module,
)
from moe_plugin.hosts.megatron.ensemble import EnsembleErrors, add_heads, ensemble_of
from moe_plugin.hosts.megatron.layer import PluginMoELayer, plugin_layers
from moe_plugin.hosts.megatron.model_settings import model_settings
from moe_plugin.hosts.megatron.refusals import ACTIVATIONS
from moe_plugin.hosts.megatron.run import (
    FileSteps,
    MegatronStart,
    guard_of,
    named,
    of_stage,
    place_of,
    steps_of,
    traced,
    tracker_states,
    twins_apart,
)
from moe_plugin.hosts.megatron.script_report import log_path
from moe_plugin.hosts.megatron.streamed import (
    MakePart,
    StreamedModel,
    build,
    load_streamed,
    save_streamed,
)
from moe_plugin.hosts.megatron.streamed_optimizer import StreamedOptimizer
from moe_plugin.hosts.megatron.translate import settings_from_flags, timeout_of
from moe_plugin.memory.activations.auto import manage_layers
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.memory.weights.files import read_beside
from moe_plugin.observe.recorder import StatsRecorder
from moe_plugin.training.resilience.averaging_peers import PeerSteps
from moe_plugin.training.resilience.elastic import ReplicaPlace
from moe_plugin.training.run import Run
from moe_plugin.training.run_features import HostSeams, make_run


# set_up and save replace Megatron's functions under `--weights-on host`.
def set_up(given: Mapping[str, Any], run: Callable[[], Run]
           ) -> tuple[list[StreamedModel], StreamedOptimizer | None, Any]:
    """Build the model, optimizer and learning rate scheduler, and return them like Megatron's
    `setup_model_and_optimizer`.

    Args:
        given: dict of the arguments of `setup_model_and_optimizer`, by name.
        run: function that returns the current run object.
    """
    arguments = script_arguments()
    args = argparse.Namespace(**arguments)
    model, built = build(stages_of(given), args, settings_from_flags(arguments))
    optimizer = None if args.skip_train else built
    progress = {} if args.load is None else load_streamed(
        args.load, model, optimizer, model_settings(args, model.config), args.ckpt_step)
    return [model], optimizer, begin(given, run, model, optimizer, progress)


def stages_of(given: Mapping[str, Any]) -> MakePart:
    """Return the function that builds one pipeline stage of the script's model.

    Older scripts pass a model provider to Megatron. Newer scripts pass a builder.
    """
    groups = given.get("pg_collection")
    described = getattr(given.get("cfg_container"), "model", None)
    if described is not None:
        builder = described.get_builder_cls()(described)
        return lambda **stage: builder.build_model(groups, **stage)
    provide = given["model_provider_func"]
    return lambda **stage: core.call_supported(provide, **stage, config=None, pg_collection=groups)


def begin(given: Mapping[str, Any], run: Callable[[], Run], model: Any, optimizer: Any,
          progress: Mapping[str, Any]) -> Any:
    """Prepare the script's training loop, which continues from the progress in a checkpoint.

    Args:
        given: dict of the arguments of `setup_model_and_optimizer`, by name.
        run: function that returns the current run object.
        model: the only model chunk.
        optimizer: the optimizer of the model, or None if the run only evaluates.
        progress: progress of the run, or {} for a new run.
    Returns: the learning rate scheduler, or None without an optimizer.
    """
    arguments, scheduler = script_arguments(), None
    model.model_type = arguments["model_type"] = given.get("model_type")
    if optimizer is not None:
        PreparedGradients(optimizer, run)
        scheduler = training_module("training").get_optimizer_param_scheduler(optimizer)
    arguments.update(iteration=0, num_floating_point_operations_so_far=0)
    if progress:
        _resume(arguments, progress, scheduler)
    return scheduler


def _resume(arguments: dict[str, Any], progress: Mapping[str, Any], scheduler: Any) -> None:
    arguments["iteration"] = progress["iteration"]
    arguments["consumed_train_samples"] = progress["consumed_samples"]
    for name in ("consumed_valid_samples", "num_floating_point_operations_so_far"):
        arguments[name] = progress.get(name, 0)
    training_module("training").update_num_microbatches(progress["consumed_samples"])
    if scheduler is None:
        return
    if "scheduler" in progress:
        scheduler.load_state_dict(progress["scheduler"])
    else:  # the checkpoint was written by a loop without a scheduler
        scheduler.step(increment=progress["consumed_samples"])


def progress_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the progress of a run, given the arguments of `save_checkpoint` by name."""
    arguments = script_arguments()
    return {
        "iteration": given["iteration"], "scheduler": given["opt_param_scheduler"].state_dict(),
        "consumed_samples": arguments["consumed_train_samples"],
        "consumed_valid_samples": arguments["consumed_valid_samples"],
        "num_floating_point_operations_so_far": given["num_floating_point_operations_so_far"]}


def save(given: Mapping[str, Any]) -> None:
    """Write a checkpoint. This function replaces Megatron's `save_checkpoint`.

    given: dict of the arguments of `save_checkpoint`, by name.
    """
    arguments, [model] = script_arguments(), given["model"]
    save_streamed(
        arguments["save"], model, given["optimizer"],
        model_settings(argparse.Namespace(**arguments), model.config), progress_of(given))


def activations_of(settings: OffloadConfig, config: Any,
                   chunks: Sequence[nn.Module]) -> Activations | None:
    """Return the object that offloads or recomputes the activations of the transformer layers on
    the current pipeline stage. Return None if all activations are kept.

    Args:
        settings: the `offload` section of the settings.
        config: Megatron's `TransformerConfig`.
        chunks: model chunks in the order of the virtual pipeline stages.
    Raises:
        ValueError: If one of Megatron's settings cannot be used together with these settings.
    """
    if settings.activations == "keep":
        return None
    ACTIVATIONS.refuse(Values({"offload.activations": settings.activations,
                               "cuda_graph_impl": cuda_graphs(config)},
                              functools.partial(setting, config)))
    layers = {f"{number}.{name}": layer for number, chunk in enumerate(chunks)
              for name, layer in chunk.named_modules() if isinstance(layer, TransformerLayer)}
    stage = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if settings.profile is not None and ps.get_pipeline_model_parallel_world_size() > 1:
        # each stage has different blocks, so each stage needs its own profile
        file = Path(settings.profile)
        name = f"{file.stem}.stage{ps.get_pipeline_model_parallel_rank()}{file.suffix}"
        settings = dataclasses.replace(settings, profile=str(file.with_name(name)))
    return manage_layers(
        settings, layers, comm_of(stage), contexts=[_random_states],
        places=[layer.layer_number - 1 for layer in layers.values()], total=config.num_layers)


def _random_states() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for two passes with the same random states of Megatron's tracker."""
    tracker, states = get_cuda_rng_tracker(), []

    @contextmanager
    def first() -> Iterator[None]:
        states.append(tracker.get_states())
        yield

    @contextmanager
    def again() -> Iterator[None]:
        with tracker_states(states[0]):
            yield

    return first(), again()


logger = logging.getLogger(__name__)


def run_of(chunks: list[Any], optimizer: Any, scheduler: Any, taken: dict[int, int]
           ) -> tuple[Run, StatsRecorder]:
    """Return the run object for a script with these model chunks, and the recorder for the run's
    log. This is a collective operation.

    Args:
        chunks: model chunks of the current pipeline stage.
        optimizer: Megatron's optimizer, or None if the run only evaluates.
        scheduler: learning-rate scheduler.
        taken: see `Script`. The replicas add entries to this dict.
    """
    args = argparse.Namespace(**script_arguments())
    settings = settings_from_flags(vars(args))
    layers = plugin_layers(*chunks)
    config = layers[0].plan.run if layers else run_config(settings)
    for layer in layers:
        layer.run_ends_steps = True
    if not getattr(args, "native_moe", None):
        say_native(chunks)
    args.native_moe = bool(getattr(args, "num_experts", None)) and not layers
    stage = comm_of(ps.get_tensor_and_data_parallel_group(with_context_parallel=True))
    recorder = StatsRecorder(ObserveConfig(), stage, host="megatron")
    models, replica_place = [bare(chunk) for chunk in chunks], None
    streamed = chunks[0] if isinstance(chunks[0], StreamedModel) else None
    if optimizer is not None and streamed is not None:
        replica_place = _peer(args, streamed)
    elif optimizer is not None:
        replica_place = place_of(args, models, optimizer, scheduler, taken)
    each = args.micro_batch_size * ps.get_data_parallel_world_size()
    run = make_run(
        replace(config, guard=guard_of(args, settings, config.guard),
                observe=of_stage(_traced(config.observe, args, layers))),
        HostSeams(
            host="megatron", models=models, world=comm_of(),
            data=comm_of(ps.get_data_parallel_group()), layers=named(layers),
            records=stage if layers else None, rank=dist.get_rank(),
            has_log=log_path(vars(args)) is not None, training=recorder.add,
            speaks=not layers or dist.get_rank(layers[0].groups.data) == 0, start=MegatronStart,
            kept=lambda: twins_apart(chunks), replicas=replica_place,
            streamed=None if streamed is None else streamed.trainer,
            resize=lambda asked: steps_of(asked, chunks, optimizer),
            activations=lambda offload: activations_of(
                offload, layers[0].config, chunks) if layers else None,
            votes=lambda guard: FileSteps(guard, chunks, models[0].config,
                                          args.global_batch_size // each)))
    if streamed is not None and (peers := run.find(PeerSteps)) is not None:
        streamed.peers = peers
        if (folder := streamed.loaded) is not None:
            peers.saved = (read_beside(folder, block) for block in streamed.trainer.blocks)
    if (errors := _errors(args, chunks)) is not None:
        run.features.append(errors)  # must come after the features that skip a step
    return run, recorder


def say_native(chunks: list[Any]) -> None:
    """On the first rank, log a warning if the model contains Megatron's own MoE layers."""
    if dist.get_rank() == 0 and core.has_native_layers(chunks) and not plugin_layers(*chunks):
        logger.warning(
            "this model's MoE layers are Megatron's own, so moe-plugin's layers and their flags "
            "are not used. Add --spec moe_plugin.hosts.megatron.spec moe_layer. To train "
            "Megatron's own layers on purpose, also add --native-moe.")


def _traced(observe: ObserveConfig, args: argparse.Namespace,
            layers: list[PluginMoELayer]) -> ObserveConfig:
    if not getattr(args, "moe_routing_trace_path", None):
        return observe
    with refused_together("the check of the stages' routing traces"):
        observe = traced(observe, args, layers) if layers else observe
    return observe


def with_heads(provider: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a script's model provider so that its models have the requested prediction heads."""

    @functools.wraps(provider)
    def provide(*given: Any, **kwargs: Any) -> Any:
        args = argparse.Namespace(**script_arguments())
        model, ensemble = provider(*given, **kwargs), ensemble_of(args)
        if ensemble is None:
            return model
        # the tokenizer is asked first, because --vocab-size may not include the end-of-document
        # token
        tokenizer = training_module("global_vars").get_tokenizer()
        return add_heads(model, ensemble,
                         int(getattr(tokenizer, "vocab_size", None) or args.vocab_size))

    return provide


def _errors(args: argparse.Namespace, chunks: list[Any]) -> EnsembleErrors | None:
    if ensemble_of(args) is None:
        return None
    errors = EnsembleErrors(chunks)
    if not any(gather_objects(errors.has_heads, "the stages with heads")):
        raise ValueError(
            f"ensemble_heads={args.ensemble_heads} cannot be used with this script, because it "
            "passes Megatron a model config instead of a function that builds the model. Use "
            "pretrain_gpt_moe, or leave it out.")
    return errors


def _peer(args: argparse.Namespace, model: StreamedModel) -> ReplicaPlace | None:
    trainer = model.trainer
    return ReplicaPlace(
        args.moe_lighthouse, args.moe_replica, timeout_of(settings_from_flags(vars(args))), [],
        # data and learning rates follow Megatron's iteration, so nothing is set on receipt
        list, lambda: (trainer.steps,), lambda steps: None
    ) if args.moe_lighthouse else None
