"""What the launcher adds to a run of Megatron's own training script: records of the MoE layers,
token ids for routers that need them, torch's fused Adam, pipeline schedules.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam
from moe_plugin.hosts.megatron.compat.settings import (
    script_arguments,
    training_module,
    wrap_training,
)
from moe_plugin.hosts.megatron.trainer.pipeline import pipeline_settings, scheduled
from moe_plugin.hosts.megatron.translate import settings_from_flags

logger = logging.getLogger(__name__)
_SEAM = "get_forward_backward_func"  # 0.15 to 0.19: the training code imports it by name


def observe_script() -> None:
    """Make Megatron's `pretrain` hand token ids to the layers, write the records that
    `--moe-stats-...` ask for, follow `--moe-fused-adam` and `--pipeline-schedule`; stays for the
    life of the process.
    """
    script = _Script()
    wrap_training("setup_model_and_optimizer", script.around_setup)
    wrap_training("train_step", script.around_step)
    wrap_training("evaluate", script.around_evaluation)
    if _SEAM in vars(training_module("training")):
        wrap_training(_SEAM, lambda get: scheduled(get, script.pipeline))


def _check_seam(settings: PipelineConfig) -> None:
    if settings.schedule != "1f1b" and _SEAM not in vars(training_module("training")):
        raise ValueError(
            f"pipeline.schedule={settings.schedule!r} must be '1f1b' with this Megatron, whose "
            f"megatron.training.training does not take its passes from {_SEAM}; use python -m "
            "moe_plugin.hosts.megatron.train, or leave it out")


class _Script:

    def __init__(self) -> None:
        self.observer: Any = None
        self.rows: Any = None
        self.activations: Any = None
        self._skipped, self._since = 0, time.perf_counter()

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
        # imported once the script's arguments are parsed, because a layer spec follows them
        from moe_plugin.hosts.megatron.activations import activations_of
        from moe_plugin.hosts.megatron.layer import PluginMoELayer
        from moe_plugin.hosts.megatron.rows import FittingSteps
        from moe_plugin.hosts.megatron.tokens import give_token_ids
        from moe_plugin.hosts.megatron.trainer.report import Observer
        from moe_plugin.pregate import link

        for chunk in chunks:
            link(chunk)
            give_token_ids(chunk)
        _check_seam(self.pipeline())
        self.rows = FittingSteps(chunks)
        layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)]
        guard = layers[0].plan.config.guard if layers else None
        if guard is not None and (guard.twins or guard.votes):
            raise ValueError(
                f"guard.twins={guard.twins}, guard.votes={guard.votes} must be 0 in Megatron's own "
                "training script, whose steps moe-plugin does not run; use python -m "
                "moe_plugin.hosts.megatron.train, or leave them out")
        if layers:
            self.activations = activations_of(layers[0].plan.config.offload, layers[0].config,
                                              chunks)
        config = layers[0].plan.config.observe if layers else None
        if config is not None and config.writes:
            self.observer = Observer(layers, config, self.activations)

    def pipeline(self) -> PipelineConfig:
        """The settings of pipeline stages."""
        return pipeline_settings(settings_from_flags(script_arguments()))

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(step)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.rows is not None:
                self.rows.forget()
            if self.observer is None:
                done = step(*args, **kwargs)
            else:
                number = script_arguments()["curr_iteration"] + 1
                with self.observer.timeline.around(number):
                    done = step(*args, **kwargs)
                self.observer.after_step(number)
                self._log(number, done)
            if self.activations is not None:
                self.activations.after_step()
            # the optimizer skipped a step of such rows, whose gradients are NaN
            if self.rows is not None and self.rows.overflowed():
                logger.warning("rows of the step did not fit: it was skipped, and the bound is "
                               "larger now")
            return done

        return call

    def _log(self, number: int, done: tuple[Any, ...]) -> None:
        """Numbers of the script's loop for the records. done: what `train_step` returned, from 0.15
        to 0.19 the losses by name, whether the step was skipped, and more.
        """
        losses, skipped = done[:2]
        arguments, interval = script_arguments(), self.observer.config.interval
        self._skipped += bool(skipped) and not arguments.get("fp16")  # there a loss scale falls
        if number % interval:
            return
        now = time.perf_counter()
        tokens = interval * arguments.get("global_batch_size", 0) * arguments.get("seq_length", 0)
        loss = losses.get("lm loss") if isinstance(losses, Mapping) else None
        self.observer.recorder.training(
            number, loss=None if loss is None else float(loss), not_finite=self._skipped,
            tokens_per_s=tokens / (now - self._since))
        self._skipped, self._since = 0, now

    def around_evaluation(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(evaluate)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.rows is not None:
                self.rows.forget()
            done = evaluate(*args, **kwargs)
            if self.rows is not None and self.rows.overflowed():
                logger.warning("rows of an evaluation did not fit: its loss is NaN, and the bound "
                               "is larger now")
            return done

        return call
