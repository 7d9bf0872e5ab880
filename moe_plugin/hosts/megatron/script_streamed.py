"""`--weights-on host` on Megatron's own loop: what takes the place of its set-up and its saves."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from moe_plugin.hosts.megatron import streamed_checkpoint
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.finite import PreparedGradients
from moe_plugin.hosts.megatron.compat.settings import script_arguments, training_module
from moe_plugin.hosts.megatron.spec import model_settings
from moe_plugin.hosts.megatron.streamed import MakePart, StreamedModel, build
from moe_plugin.hosts.megatron.streamed_optimizer import StreamedOptimizer
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.training.run import Run


def set_up(given: Mapping[str, Any], run: Callable[[], Run]
           ) -> tuple[list[StreamedModel], StreamedOptimizer | None, Any]:
    """Model, optimizer and scheduler of learning rates, as Megatron's `setup_model_and_optimizer`
    returns them.

    Args:
        given: its arguments by name.
        run: as it is in each step.
    """
    arguments = script_arguments()
    args = argparse.Namespace(**arguments)
    model, optimizer = build(stages_of(given), args, settings_from_flags(arguments))
    model.model_type = arguments["model_type"] = given.get("model_type")
    scheduler = None
    if args.skip_train:
        optimizer = None
    else:
        PreparedGradients(optimizer, run)
        scheduler = training_module("training").get_optimizer_param_scheduler(optimizer)
    arguments.update(iteration=0, num_floating_point_operations_so_far=0)
    progress = {} if args.load is None else streamed_checkpoint.load(
        args.load, model, optimizer, model_settings(args, model.config), args.ckpt_step)
    if progress:
        resume(arguments, progress, scheduler)
    return [model], optimizer, scheduler


def stages_of(given: Mapping[str, Any]) -> MakePart:
    """What builds a stage of the script's model: its model provider, or what newer ones give."""
    groups = given.get("pg_collection")
    described = getattr(given.get("cfg_container"), "model", None)
    if described is not None:
        builder = described.get_builder_cls()(described)
        return lambda **stage: builder.build_model(groups, **stage)
    provide = given["model_provider_func"]
    return lambda **stage: core.call_supported(provide, **stage, config=None, pg_collection=groups)


def resume(arguments: dict[str, Any], progress: Mapping[str, Any], scheduler: Any) -> None:
    """Let the script's loop go on where a checkpoint's progress says."""
    arguments["iteration"] = progress["iteration"]
    arguments["consumed_train_samples"] = progress["consumed_samples"]
    for name in ("consumed_valid_samples", "num_floating_point_operations_so_far"):
        arguments[name] = progress.get(name, 0)
    training_module("training").update_num_microbatches(progress["consumed_samples"])
    if scheduler is None:
        return
    if "scheduler" in progress:
        scheduler.load_state_dict(progress["scheduler"])
    else:  # of a loop that has none
        scheduler.step(increment=progress["consumed_samples"])


def save(given: Mapping[str, Any]) -> None:
    """In the place of Megatron's `save_checkpoint`, by whose names its arguments are given."""
    arguments, [model] = script_arguments(), given["model"]
    progress = {
        "iteration": given["iteration"], "scheduler": given["opt_param_scheduler"].state_dict(),
        "consumed_samples": arguments["consumed_train_samples"],
        "consumed_valid_samples": arguments["consumed_valid_samples"],
        "num_floating_point_operations_so_far": given["num_floating_point_operations_so_far"]}
    streamed_checkpoint.save(
        arguments["save"], model, given["optimizer"],
        model_settings(argparse.Namespace(**arguments), model.config), progress)
