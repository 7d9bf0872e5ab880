"""What the launcher adds to a run of Megatron's own training script: the features of a run, token
ids for routers that need them, torch's fused Adam, pipeline schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import PipelineConfig, run_config
from moe_plugin.hosts.megatron.compat.finite import guard_all_optimizers
from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam
from moe_plugin.hosts.megatron.compat.settings import (
    replace_training,
    script_arguments,
    training_module,
)
from moe_plugin.hosts.megatron.translate import settings_from_flags
from moe_plugin.observe.drops import DropWarning
from moe_plugin.observe.features import FirstStepLine, listen
from moe_plugin.resilience.finite import FiniteSteps
from moe_plugin.resilience.overflow import RowsWarning
from moe_plugin.run import Run, RunFeature, StepFacts, StepInput

_SEAM = "get_forward_backward_func"  # the training code imports it by name


def observe_script() -> None:
    """Make Megatron's `pretrain` call a run's features around its steps, hand token ids to the
    layers, follow `--moe-fused-adam` and `--pipeline-schedule`; stays for the life of the process.
    """
    script = _Script()
    guard_all_optimizers(lambda: script.run)
    replace_training("setup_model_and_optimizer", script.around_setup)
    replace_training("train_step", script.around_step)
    replace_training("evaluate", script.around_evaluation)
    if _SEAM in vars(training_module("training")):
        # imported here: it imports Megatron, which may lie next to the script
        from moe_plugin.hosts.megatron.trainer.pipeline import scheduled

        replace_training(_SEAM, lambda get: scheduled(get, script.pipeline))


def check_seam(settings: PipelineConfig) -> None:
    if settings.schedule != "1f1b" and _SEAM not in vars(training_module("training")):
        raise ValueError(
            f"pipeline.schedule={settings.schedule!r} must be '1f1b' with this Megatron, whose "
            f"megatron.training.training does not take its passes from {_SEAM}; use python -m "
            "moe_plugin.hosts.megatron.train, or leave it out")


def features_of(chunks: list[Any]) -> list[RunFeature | None]:
    """The features of a script's run with these parts of a model; collective."""
    # imported once the script's arguments are parsed, because a layer spec follows them
    from moe_plugin.hosts.megatron.activations import activations_of
    from moe_plugin.hosts.megatron.layer import PluginMoELayer
    from moe_plugin.hosts.megatron.run import named, records_of

    rows, finite = RowsWarning(chunks, comm_of()), FiniteSteps()
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)]
    drops = DropWarning(not layers or dist.get_rank(layers[0].groups.data) == 0)
    if not layers:
        return [FirstStepLine(), rows, finite]
    config = layers[0].plan.run
    if config.guard.twins or config.guard.votes:
        raise ValueError(
            f"guard.twins={config.guard.twins}, guard.votes={config.guard.votes} must be 0 in "
            "Megatron's own training script, whose steps moe-plugin does not run; use python -m "
            "moe_plugin.hosts.megatron.train, or leave them out")
    activations = activations_of(config.offload, layers[0].config, chunks)
    records = None
    if config.observe.writes:
        records = records_of(layers, config.observe, activations, drops.validation.add,
                             has_log=False)
    else:
        listen(named(layers), None, drops.validation.add)
    return [FirstStepLine(), records, activations, rows, finite, drops]


class _Script:

    def __init__(self) -> None:
        self.run = Run([FiniteSteps()])

    def around_setup(self, setup: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(setup)
        def call(*args: Any, **kwargs: Any) -> Any:
            built = setup(*args, **kwargs)
            self.connect(built[0])
            if built[1] is not None:  # evaluation has no optimizer
                use_fused_adam(built[1], script_arguments().get("moe_fused_adam", False))
            return built

        return call

    def connect(self, chunks: list[Any]) -> None:
        from moe_plugin.hosts.megatron.tokens import give_token_ids
        from moe_plugin.pregate import link

        for chunk in chunks:
            link(chunk)
            give_token_ids(chunk)
        check_seam(self.pipeline())
        self.run = Run(features_of(chunks))

    def pipeline(self) -> PipelineConfig:
        """The settings of pipeline stages."""
        return run_config(settings_from_flags(script_arguments())).pipeline

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            number = script_arguments().get("curr_iteration", 0) + 1
            with self.run.around_step(StepInput(number)):
                self.run.before_passes()
                done = step(*args, **kwargs)
                self.run.after_passes()
            self.run.after_step(_facts(number, done, self.run.left_out is not None))
            return done

        return call

    def around_evaluation(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(evaluate)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.run.before_passes()
            done = evaluate(*args, **kwargs)
            self.run.after_passes()
            self.run.after_evaluation(script_arguments().get("curr_iteration", 0))
            return done

        return call


def _facts(number: int, done: tuple[Any, ...], left_out: bool) -> StepFacts:
    """What is known of a step of the script's loop.

    done: what `train_step` returned: the losses by name, whether the step was
    skipped, and more.
    """
    losses, skipped = done[:2]
    arguments = script_arguments()
    loss = losses.get("lm loss") if isinstance(losses, Mapping) else None
    total = arguments.get("train_iters")
    return StepFacts(
        number, skipped=(left_out or bool(skipped)) and not arguments.get("fp16"),  # a scale falls
        tokens=arguments.get("global_batch_size", 0) * arguments.get("seq_length", 0),
        left=None if total is None else max(0, total - number),
        loss=None if loss is None else float(loss))
