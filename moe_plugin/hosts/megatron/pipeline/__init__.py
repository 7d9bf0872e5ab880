"""Pipeline schedules for Megatron, by the name that `--pipeline-schedule` gives.

Megatron asks `get_forward_backward_func` for the function that runs all forward and backward passes
of a step. That is the seam: a schedule is registered as a function that takes the settings and
Megatron's own such function, and returns one of the same signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline import auto, eager, terapipe  # noqa: F401, register
from moe_plugin.hosts.megatron.pipeline.base import ForwardBackward, schedules

__all__ = ["ForwardBackward", "forward_backward_func", "schedules", "scheduled"]


def forward_backward_func(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """The function that runs a step's forward and backward passes.

    Args:
        settings: which schedule.
        native: what Megatron's `get_forward_backward_func` returns.
    Raises:
        ValueError: the schedule does not run here; or, where the function is called, a setting of
            Megatron does not fit it.
    """
    return schedules.get(settings.schedule)(settings, native)


def scheduled(get: Callable[..., ForwardBackward],
              settings: Callable[[], PipelineConfig]) -> Callable[..., ForwardBackward]:
    """Megatron's `get_forward_backward_func` under a schedule, for its own training script.

    settings: read at the first call, when the script has its arguments. What a schedule returns is
    kept, so that it can keep what it measured from one step to the next.
    """
    made: dict[ForwardBackward, ForwardBackward] = {}

    def call(*args: Any, **kwargs: Any) -> ForwardBackward:
        native = get(*args, **kwargs)
        if native not in made:
            made[native] = forward_backward_func(settings(), native)
        return made[native]

    return call
