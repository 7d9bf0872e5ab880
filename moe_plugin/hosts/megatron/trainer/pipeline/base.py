"""What a pipeline schedule is, and Megatron's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.registry import Registry

# signature of what Megatron's get_forward_backward_func returns; keyword arguments alone
ForwardBackward = Callable[..., list[Any]]
Schedule = Callable[[PipelineConfig, ForwardBackward], ForwardBackward]
schedules: Registry[Schedule] = Registry("pipeline schedule")


@schedules.register("1f1b")
def one_f_one_b(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Megatron's own: one forward and one backward pass in turns, or its virtual stages."""
    return native


def refuse(schedule: str, name: str, value: Any, bound: str, remedy: str) -> None:
    """`ValueError`: a setting of Megatron does not fit a schedule."""
    raise ValueError(f"pipeline.schedule={schedule!r} does not fit {name}={value!r}: must be "
                     f"{bound}; {remedy}")
