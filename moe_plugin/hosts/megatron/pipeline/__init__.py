"""Pipeline schedules for Megatron, selected by the name in `--pipeline-schedule`.

Megatron calls `get_forward_backward_func` to get the function that runs all forward and backward
passes of a step. A schedule is registered as a function that accepts the settings and Megatron's
function, and returns a function with the same signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline import auto, eager, terapipe  # noqa: F401, register
from moe_plugin.hosts.megatron.pipeline.base import ForwardBackward, schedules

__all__ = ["ForwardBackward", "forward_backward_func", "schedules", "scheduled"]


def forward_backward_func(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Return the function that runs a step's forward and backward passes.

    Args:
        settings: settings with the name of the schedule.
        native: the function that Megatron's `get_forward_backward_func` returns.
    Raises:
        ValueError: the schedule is not available. The returned function raises a ValueError if a
            setting of Megatron does not fit the schedule.
    """
    return schedules.get(settings.schedule)(settings, native)


def scheduled(get: Callable[..., ForwardBackward],
              settings: Callable[[], PipelineConfig]) -> Callable[..., ForwardBackward]:
    """Wrap Megatron's `get_forward_backward_func` so that its training script uses a schedule.

    settings: function that returns the settings. The function is called at the first step, when the
        script has parsed its arguments. The schedule is created once, so that measurements persist
        from step to step.
    """
    made: dict[ForwardBackward, ForwardBackward] = {}

    def call(*args: Any, **kwargs: Any) -> ForwardBackward:
        native = get(*args, **kwargs)
        if native not in made:
            made[native] = forward_backward_func(settings(), native)
        return made[native]

    return call
