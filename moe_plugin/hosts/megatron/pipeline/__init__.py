"""Pipeline schedules for Megatron. `--pipeline-schedule` selects a schedule by name.

Megatron calls `get_forward_backward_func` to obtain the function that runs all forward and backward
passes of a step. A schedule is registered as a function with two arguments: the pipeline settings,
and Megatron's function that runs the passes. This function returns a replacement for Megatron's
function, with the same signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline import auto, eager, terapipe  # noqa: F401, register
from moe_plugin.hosts.megatron.pipeline.base import ForwardBackward, schedules

__all__ = ["ForwardBackward", "forward_backward_func", "schedules", "scheduled"]


def forward_backward_func(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Return the function that runs the forward and backward passes of a step.

    Args:
        settings: pipeline settings, including the name of the schedule.
        native: function that was returned by Megatron's `get_forward_backward_func`.
    Raises:
        ValueError: If the schedule is not available. The returned function raises a ValueError if
            the schedule does not support one of Megatron's settings.
    """
    return schedules.get(settings.schedule)(settings, native)


def scheduled(get: Callable[..., ForwardBackward],
              settings: Callable[[], PipelineConfig]) -> Callable[..., ForwardBackward]:
    """Wrap Megatron's `get_forward_backward_func` so that the training script uses a schedule of
    this package.

    settings: function that returns the pipeline settings. The function is called in the first step,
        after the script has parsed its arguments. The schedule is created only once, so that its
        measurements persist from step to step.
    """
    made: dict[ForwardBackward, ForwardBackward] = {}

    def call(*args: Any, **kwargs: Any) -> ForwardBackward:
        native = get(*args, **kwargs)
        if native not in made:
            made[native] = forward_backward_func(settings(), native)
        return made[native]

    return call
