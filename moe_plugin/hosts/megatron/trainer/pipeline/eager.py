"""Eager 1F1B (AlpaComm, arXiv 2211.05322): more forward passes first, transfers behind compute."""

from __future__ import annotations

import functools
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.trainer.pipeline.base import ForwardBackward, refuse, schedules
from moe_plugin.planner.pipeline.schedules import order, warm_up

NAME = "eager-1f1b"


@schedules.register(NAME)
def eager_1f1b(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """Stage i of n begins with 2 (n - i) - 1 forward passes, so that nothing waits for transfers.
    """
    from megatron.core import parallel_state as ps

    # imported here: it imports Megatron, which may lie next to a script that is not known yet
    from moe_plugin.hosts.megatron.trainer.pipeline.executor import backward_group

    stages = ps.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return native
    group = ps.get_pipeline_model_parallel_group()
    return functools.partial(_eager, native, group, backward_group(group))


def _eager(native: ForwardBackward, group: Any, gradients: Any, **passes: Any) -> list[Any]:
    """One step, as Megatron's own functions take and return it."""
    from moe_plugin.hosts.megatron.compat.names import get_model_config
    from moe_plugin.hosts.megatron.trainer.pipeline.executor import Step, check_config

    model = passes["model"]
    config = get_model_config(model[0] if isinstance(model, list) else model)
    check_config(NAME, config)
    if passes.get("p2p_communicator") is not None:
        refuse(NAME, "p2p_communicator", "given", "left out",
               "models of several modules have Megatron's own schedules alone")
    if passes.get("forward_only"):
        return native(**passes)
    timers, stages = config.timers, group.size()
    if timers is not None:
        timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    shape = (stages, group.rank(), passes["num_microbatches"], "eager")
    step = Step(passes, config, group, gradients, warm_up(*shape))
    logged = step.run(order(*shape))
    step.finish_gradients()
    if timers is not None:
        timers("forward-backward").stop()
    return logged
