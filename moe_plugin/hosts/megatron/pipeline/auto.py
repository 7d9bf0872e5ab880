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

from megatron.core import parallel_state as ps

from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline.base import (
    ForwardBackward,
    PipelineSchedule,
    refuse,
    register,
)
from moe_plugin.hosts.megatron.pipeline.eager import EagerSchedule
from moe_plugin.hosts.megatron.pipeline.measuring import MeasuredStep, agreed
from moe_plugin.hosts.megatron.pipeline.slice_step import check_slices
from moe_plugin.hosts.megatron.pipeline.terapipe import SliceSchedule, given_slices
from moe_plugin.planner.pipeline.choice import Predicted, StageProfile, choose, predict
from moe_plugin.planner.units import parse_size, show_time

logger = logging.getLogger(__name__)


@register
class AutoSchedule(PipelineSchedule):
    """1F1B, eager 1F1B or, with `pipeline.slices`, TeraPipe, by measured times and
    `pipeline.memory`; virtual stages: Megatron's own.

    Attributes:
        chosen: None before that.
        profile: what was measured.
    """

    name = "auto"

    def __init__(self, settings: PipelineConfig, native: ForwardBackward) -> None:
        super().__init__(settings, native)
        self.steps = 0
        self.chosen: Predicted | None = None
        self.profile: StageProfile | None = None
        self._run = native
        self._sliced: SliceSchedule | None = None  # while slices are measured
        if settings.slices is not None:
            self.unfit = SliceSchedule.unfit

    @classmethod
    def or_native(cls, settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
        """See `PipelineSchedule`."""
        virtual = ps.get_virtual_pipeline_model_parallel_world_size()
        return super().or_native(settings, native) if virtual is None else native

    def __call__(self, **passes: Any) -> list[Any]:
        """One step, as Megatron's own functions take and return it."""
        if passes.get("forward_only") or self.chosen is not None:
            return self._run(**passes)
        if self._sliced is not None:
            return self._measure_slices(passes, self._sliced)
        self.steps += 1
        return self.native(**passes) if self.steps == 1 else super().__call__(**passes)

    def check(self, passes: dict[str, Any], config: Any) -> None:
        """See `PipelineSchedule`."""
        super().check(passes, config)
        if self.settings.slices is None:
            return
        if config.deterministic_mode:
            refuse(self.name, "deterministic_mode", True, "off with pipeline.slices",
                   "whether sequences are cut follows measured times, and slices add up in another "
                   "order: leave out one of the two")
        check_slices(passes, config)

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """The second one, which measures."""
        step = MeasuredStep(passes, config, self.group, self.gradients)
        logged = step.run()
        limit = self.settings.memory and parse_size(self.settings.memory)
        self.profile = agreed(step, self.group, limit)
        if self.settings.slices is None:
            self._choose()
        else:
            settings = dataclasses.replace(self.settings, schedule=SliceSchedule.name, slices=None)
            self._sliced = SliceSchedule(settings, self.native, self.gradients)
        return logged

    def _measure_slices(self, passes: dict[str, Any], sliced: SliceSchedule) -> list[Any]:
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

    def _choose(self, sliced: SliceSchedule | None = None) -> None:
        self.chosen = choose(self.profile)
        if self.chosen.schedule == EagerSchedule.name:
            self._run = EagerSchedule(self.settings, self.native, self.gradients)
        elif self.chosen.schedule == SliceSchedule.name:
            sliced.settings = dataclasses.replace(self.settings, schedule=SliceSchedule.name)
            self._run = sliced
        logger.info("pipeline.schedule=auto: %s; predicted %s", self.chosen.schedule, ", ".join(
            f"{one.schedule} {show_time(one.seconds)}{'' if one.fits else ' (does not fit)'}"
            for one in predict(self.profile)))
