"""The best predicted schedule that fits the memory, from what the first steps measure.

The first step warms up under Megatron's 1F1B. The second one runs in 1F1B's order, too, and
measures passes, transfers and what backward needs. With `pipeline.slices` the next nine steps
measure slices. Then all ranks agree on a schedule, which gives the same numbers as any other (with
slices, up to rounding).
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.trainer.pipeline.base import ForwardBackward, refuse, schedules
from moe_plugin.hosts.megatron.trainer.pipeline.eager import NAME as EAGER
from moe_plugin.hosts.megatron.trainer.pipeline.terapipe import NAME as TERAPIPE
from moe_plugin.hosts.megatron.trainer.pipeline.terapipe import (
    SlicedSteps,
    check_passes,
    given_slices,
)
from moe_plugin.planner.pipeline.choice import Predicted, StageProfile, choose, predict
from moe_plugin.planner.units import parse_size, show_time

logger = logging.getLogger(__name__)
NAME = "auto"


@schedules.register(NAME)
def auto(settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
    """1F1B, eager 1F1B or, with `pipeline.slices`, TeraPipe, by measured times and
    `pipeline.memory`; virtual stages: Megatron's own.
    """
    from megatron.core import parallel_state as ps

    stages = ps.get_pipeline_model_parallel_world_size()
    virtual = ps.get_virtual_pipeline_model_parallel_world_size()
    if stages == 1 or virtual is not None:
        return native
    return AutoSchedule(settings, native)


class AutoSchedule:
    """Megatron's function of a step's passes, until a schedule is chosen; then the chosen one.

    chosen: None before that. profile: what was measured.
    """

    def __init__(self, settings: PipelineConfig, native: ForwardBackward) -> None:
        from megatron.core import parallel_state as ps

        # imported here: it imports Megatron, which may lie next to a script that is not known yet
        from moe_plugin.hosts.megatron.trainer.pipeline.executor import backward_group

        self.settings, self.native = settings, native
        self.group = ps.get_pipeline_model_parallel_group()
        self.gradients = backward_group(self.group)
        self.steps = 0
        self.chosen: Predicted | None = None
        self.profile: StageProfile | None = None
        self._run = native
        self._sliced: SlicedSteps | None = None  # while slices are measured

    def __call__(self, **passes: Any) -> list[Any]:
        """One step, as Megatron's own functions take and return it."""
        if passes.get("forward_only") or self.chosen is not None:
            return self._run(**passes)
        if self._sliced is not None:
            return self._measure_slices(passes, self._sliced)
        self.steps += 1
        return self.native(**passes) if self.steps == 1 else self._measure(passes)

    def _measure(self, passes: dict[str, Any]) -> list[Any]:
        from moe_plugin.hosts.megatron.compat.names import get_model_config
        from moe_plugin.hosts.megatron.trainer.pipeline.executor import check_config
        from moe_plugin.hosts.megatron.trainer.pipeline.measuring import MeasuredStep, agreed
        from moe_plugin.planner.pipeline.schedules import order, warm_up

        model = passes["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        check_config(NAME, config)
        if self.settings.slices is not None:
            self._check_slices(passes, config)
        shape = (self.group.size(), self.group.rank(), passes["num_microbatches"], "overlapped")
        step = MeasuredStep(passes, config, self.group, self.gradients, warm_up(*shape))
        logged = step.run(order(*shape))
        step.finish_gradients()
        limit = self.settings.memory and parse_size(self.settings.memory)
        self.profile = agreed(step, self.group, limit)
        if self.settings.slices is not None:
            settings = dataclasses.replace(self.settings, schedule=TERAPIPE, slices=None)
            self._sliced = SlicedSteps(settings, self.native, self.group, self.gradients)
        else:
            self._choose()
        return logged

    def _check_slices(self, passes: dict[str, Any], config: Any) -> None:
        from moe_plugin.hosts.megatron.trainer.pipeline.slice_step import check_slices

        if config.deterministic_mode:
            refuse(NAME, "deterministic_mode", True, "off with pipeline.slices",
                   "whether sequences are cut follows measured times, and slices add up in another "
                   "order: leave out one of the two")
        check_passes(passes)
        check_slices(passes, config)

    def _measure_slices(self, passes: dict[str, Any], sliced: SlicedSteps) -> list[Any]:
        logged = sliced(**passes)
        trials = sliced.trials
        if trials.chosen is not None:
            slices = given_slices(self.settings.slices, trials.length, trials.multiple)
            self.profile = dataclasses.replace(
                self.profile, sequence=trials.length, slice_samples=trials.samples,
                granularity=trials.profile.granularity, slices=list(slices or trials.chosen))
            self._sliced = None
            self._choose(sliced)
        return logged

    def _choose(self, sliced: SlicedSteps | None = None) -> None:
        self.chosen = choose(self.profile)
        if self.chosen.schedule == EAGER:
            self._run = schedules.get(EAGER)(self.settings, self.native)
        elif self.chosen.schedule == TERAPIPE:
            sliced.settings = dataclasses.replace(self.settings, schedule=TERAPIPE)
            self._run = sliced
        logger.info("pipeline.schedule=auto: %s; predicted %s", self.chosen.schedule, ", ".join(
            f"{one.schedule} {show_time(one.seconds)}{'' if one.fits else ' (does not fit)'}"
            for one in predict(self.profile)))
