"""Pipeline schedules for Megatron, which are selected by name with `--pipeline-schedule`.

Megatron calls `get_forward_backward_func` to obtain the function that runs all forward and backward
passes of a step. A schedule is registered as a function that accepts the settings and Megatron's
function, and returns a function with the same signature as Megatron's.
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
        settings: pipeline settings, which include the name of the schedule.
        native: function returned by Megatron's `get_forward_backward_func`.
    Raises:
        ValueError: If the schedule is not available. The returned function raises a ValueError if
            the schedule does not support a setting of Megatron.
    """
    return schedules.get(settings.schedule)(settings, native)


def scheduled(get: Callable[..., ForwardBackward],
              settings: Callable[[], PipelineConfig]) -> Callable[..., ForwardBackward]:
    """Wrap Megatron's `get_forward_backward_func` so that the training script uses a schedule of
    this package.

    settings: function that returns the pipeline settings. `settings` is called at the first step,
        after the script has parsed its arguments. The schedule is created only once, so its
        measurements are kept from step to step.
    """
    made: dict[ForwardBackward, ForwardBackward] = {}

    def call(*args: Any, **kwargs: Any) -> ForwardBackward:
        native = get(*args, **kwargs)
        if native not in made:
            made[native] = forward_backward_func(settings(), native)
        return made[native]

    return call
