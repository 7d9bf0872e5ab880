"""Registry and base class of pipeline schedules, and Megatron's own schedule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.config import PipelineConfig
from moe_plugin.config.refusals import Values
from moe_plugin.hosts.megatron.compat.names import get_model_config
from moe_plugin.hosts.megatron.compat.settings import cuda_graphs, setting
from moe_plugin.hosts.megatron.refusals import OWN_SCHEDULES
from moe_plugin.utils.registry import Registry

# signature of the function that Megatron's get_forward_backward_func returns; keyword-only
ForwardBackward = Callable[..., list[Any]]
schedules: Registry[Callable[[PipelineConfig, ForwardBackward],
                             ForwardBackward]] = Registry("pipeline schedule")


@schedules.register("1f1b")
def one_f_one_b(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Return Megatron's own schedule (1F1B, or interleaved 1F1B with virtual stages)."""
    return native


class PipelineSchedule:
    """Base class of pipeline schedules. A schedule replaces Megatron's function that runs the
    forward and backward passes of a step.

    Args:
        settings: pipeline settings of the run.
        native: Megatron's own function, which the schedule uses for evaluation.
        gradients: process group for transferring gradients, if another schedule has already created
            this group. By default, a new group is created, so all ranks must create the schedule.

    Attributes:
        name: name of the schedule in the registry `schedules`.
        unfit: names of those arguments of Megatron's function that the schedule does not support.
        group: process group of the pipeline stages.
        gradients: second process group with the same ranks, for transferring gradients.
    """

    name = ""
    unfit: tuple[str, ...] = ("p2p_communicator",)

    def __init__(self, settings: PipelineConfig, native: ForwardBackward,
                 gradients: Any = None) -> None:
        self.settings, self.native = settings, native
        self.group = ps.get_pipeline_model_parallel_group()
        self.gradients = gradient_group(self.group) if gradients is None else gradients

    @classmethod
    def or_native(cls, settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
        """Return a schedule of this class, or Megatron's function if there is only one stage."""
        single_stage = ps.get_pipeline_model_parallel_world_size() == 1
        return native if single_stage else cls(settings, native)

    def __call__(self, **passes: Any) -> list[Any]:
        """Run one step, with the same arguments and return value as Megatron's function."""
        model = passes["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        self.check(passes, config)
        if passes.get("forward_only"):
            return self.native(**passes)
        if config.timers is not None:
            config.timers("forward-backward",
                          log_level=1).start(barrier=config.barrier_with_L1_time)
        logged = self.step(passes, config)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return logged

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """Run the forward and backward passes. Return the losses that the last stage logged."""
        raise NotImplementedError

    def check(self, passes: dict[str, Any], config: Any) -> None:
        """Raise a `ValueError` if the schedule does not support an argument or a setting."""
        OWN_SCHEDULES.refuse(values_of_schedule(self.name, config))
        for name in self.unfit:
            if passes.get(name) is not None:
                refuse(self.name, name, "given", "left out",
                       "use pipeline.schedule=1f1b for models of several modules")


def gradient_group(group: Any) -> Any:
    """Create a second process group with the ranks of the pipeline stages. If the backend is gloo,
    return the given group instead.

    Gloo uses tags to distinguish the two directions, so only NCCL needs a second group. This is a
    collective operation, so all ranks must call this function.
    """
    if dist.get_backend(group) != "nccl":
        return group
    stage_ranks: list[int] = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, stage_ranks)
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in sorted(set(map(tuple, every)))}
    return groups[tuple(stage_ranks)]


def register(schedule: type[PipelineSchedule]) -> type[PipelineSchedule]:
    """Class decorator that registers a schedule class in `schedules`."""

    def make(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
        return schedule.or_native(settings, native)

    make.__doc__ = schedule.__doc__
    schedules.register(schedule.name)(make)
    return schedule


def refuse(schedule: str, name: str, value: Any, bound: str, remedy: str) -> None:
    """Raise the `ValueError` for a setting that a schedule does not support."""
    raise ValueError(f"pipeline.schedule={schedule!r} does not support {name}={value!r}, which "
                     f"must be {bound}; {remedy}")


def values_of_schedule(schedule: str, config: Any) -> Values:
    """Return the settings that determine whether a schedule supports a `TransformerConfig`."""
    return Values({"pipeline.schedule": schedule, "cuda_graph_impl": cuda_graphs(config)},
                  functools.partial(setting, config))
