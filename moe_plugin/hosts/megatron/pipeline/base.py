"""What a pipeline schedule is, Megatron's own, and what ours have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.compat.names import get_model_config
from moe_plugin.hosts.megatron.compat.settings import cuda_graphs, setting
from moe_plugin.utils.registry import Registry

# signature of what Megatron's get_forward_backward_func returns; keyword arguments alone
ForwardBackward = Callable[..., list[Any]]
schedules: Registry[Callable[[PipelineConfig, ForwardBackward],
                             ForwardBackward]] = Registry("pipeline schedule")
# settings of Megatron that its own schedules read and ours do not
_REFUSED = ("overlap_moe_expert_parallel_comm", "use_ring_exchange_p2p", "variable_seq_lengths",
            "mtp_standalone", "defer_embedding_wgrad_compute", "enable_cuda_graph",
            "fine_grained_activation_offloading", "moe_paged_stash", "delay_wgrad_compute")


@schedules.register("1f1b")
def one_f_one_b(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Megatron's own: one forward and one backward pass in turns, or its virtual stages."""
    return native


class PipelineSchedule:
    """A function of a step's passes in the place of Megatron's.

    Args:
        settings: of the run.
        native: Megatron's function, which evaluates.
        gradients: see there, of a schedule that this one follows; None: it makes its own, which is
            collective over all ranks.

    Attributes:
        name: see `schedules`. unfit: arguments of Megatron's function that it cannot follow.
        group: the stages.
        gradients: the same stages in a second group, for gradients.
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
        """This schedule; Megatron's function where there is one stage."""
        one = ps.get_pipeline_model_parallel_world_size() == 1
        return native if one else cls(settings, native)

    def __call__(self, **passes: Any) -> list[Any]:
        """One step, as Megatron's own functions take and return it."""
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
        """Forward and backward passes; what the loss function logged, on the last stage."""
        raise NotImplementedError

    def check(self, passes: dict[str, Any], config: Any) -> None:
        """`ValueError` where a setting of Megatron, or an argument, does not fit."""
        refuse_virtual(self.name, setting(config, "virtual_pipeline_model_parallel_size"))
        graphs = cuda_graphs(config)
        given = [(name, setting(config, name), "off") for name in _REFUSED
                 if setting(config, name, False)]
        given += [("cuda_graph_impl", graphs, "'none'")] if graphs else []
        for name, value, bound in given:
            refuse(self.name, name, value, bound, "use pipeline.schedule=1f1b, or leave it out")
        for name in self.unfit:
            if passes.get(name) is not None:
                refuse(self.name, name, "given", "left out",
                       "models of several modules have Megatron's own schedules alone")


def gradient_group(group: Any) -> Any:
    """Another group of these stages; the group itself under gloo, which keeps directions apart by
    tags. Collective over all ranks.
    """
    if dist.get_backend(group) != "nccl":
        return group
    mine: list[int] = dist.get_process_group_ranks(group)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in sorted(set(map(tuple, every)))}
    return groups[tuple(mine)]


def register(schedule: type[PipelineSchedule]) -> type[PipelineSchedule]:
    """Decorator: the class becomes one of `schedules`."""

    def make(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
        return schedule.or_native(settings, native)

    make.__doc__ = schedule.__doc__
    schedules.register(schedule.name)(make)
    return schedule


def refuse(schedule: str, name: str, value: Any, bound: str, remedy: str) -> None:
    """`ValueError`: a setting of Megatron does not fit a schedule."""
    raise ValueError(f"pipeline.schedule={schedule!r} does not fit {name}={value!r}: must be "
                     f"{bound}; {remedy}")


def refuse_virtual(schedule: str, stages: int | None) -> None:
    """`ValueError`: so many virtual stages of a rank with a schedule that has none; `auto` is
    Megatron's own with them.
    """
    if (stages or 1) > 1 and schedule not in ("1f1b", "auto"):
        refuse(schedule, "virtual stages, num_virtual_stages_per_pipeline_rank", stages, "left out",
               "virtual stages have Megatron's own interleaved schedule: use "
               "pipeline.schedule=1f1b, or leave out --num-virtual-stages-per-pipeline-rank, "
               "--num-layers-per-virtual-pipeline-stage or the further stages of "
               "--pipeline-model-parallel-layout")
