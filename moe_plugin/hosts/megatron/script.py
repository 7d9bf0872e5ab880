"""What the launcher adds to a run of Megatron's own training script: records of the MoE layers,
token ids for routers that need them, torch's fused Adam.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam
from moe_plugin.hosts.megatron.compat.settings import script_arguments, wrap_training

logger = logging.getLogger(__name__)


def observe_script() -> None:
    """Make Megatron's `pretrain` hand token ids to the layers, write the records that
    `--moe-stats-...` ask for and follow `--moe-fused-adam`; stays for the life of the process.
    """
    script = _Script()
    wrap_training("setup_model_and_optimizer", script.around_setup)
    wrap_training("train_step", script.around_step)
    wrap_training("evaluate", script.around_evaluation)


class _Script:

    def __init__(self) -> None:
        self.observer: Any = None
        self.rows: Any = None

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
        from moe_plugin.hosts.megatron.layer import PluginMoELayer
        from moe_plugin.hosts.megatron.report import Observer
        from moe_plugin.hosts.megatron.rows import FittingSteps
        from moe_plugin.hosts.megatron.tokens import give_token_ids

        for chunk in chunks:
            give_token_ids(chunk)
        self.rows = FittingSteps(chunks)
        layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)]
        config = layers[0].plan.config.observe if layers else None
        if config is not None and (config.jsonl or config.tensorboard):
            self.observer = Observer(layers, config)

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
            # the optimizer skipped a step of such rows, whose gradients are NaN
            if self.rows is not None and self.rows.overflowed():
                logger.warning("rows of the step did not fit: it was skipped, and the bound is "
                               "larger now")
            return done

        return call

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
