"""Automatic selection of a pipeline schedule: the schedule with the shortest predicted time among
all schedules that fit in memory.

The first step is a warm-up, which runs Megatron's 1F1B schedule. The following steps also run their
passes in 1F1B order. These steps measure the passes, the transfers, and the memory that backward
passes need. Measuring continues until the measurements of two steps agree. If `pipeline.slices` is
set, nine more steps measure the times of slices. After the measurements, all ranks select the same
schedule. All schedules compute the same losses and gradients. With slices, losses and gradients are
equal up to rounding errors. From time to time, one step is measured again. If this step is much
faster than the earlier steps, the machine must have been busy during the earlier measurements. All
measurements are then repeated.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.comm.host_collectives import gather_objects
from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline.base import (
    ForwardBackward,
    PipelineSchedule,
    register,
    values_of_schedule,
)
from moe_plugin.hosts.megatron.pipeline.eager import EagerSchedule
from moe_plugin.hosts.megatron.pipeline.executor import Step, transfer_s
from moe_plugin.hosts.megatron.pipeline.slice_step import check_model
from moe_plugin.hosts.megatron.pipeline.terapipe import SliceSchedule, given_slices
from moe_plugin.hosts.megatron.refusals import MEASURED_SLICES
from moe_plugin.planner.pipeline.choice import Predicted, StageProfile, choose, predict
from moe_plugin.planner.trials import Checks, Steady
from moe_plugin.planner.units import parse_size, show_time
from moe_plugin.utils.machine import wait_for_device

HEADROOM = 0.9  # fraction of the free memory that a schedule may use


class MeasuredStep(Step):
    """A `Step` that measures the times of its passes and transfers, and the memory needed for a
    backward pass.

    Attributes:
        forward_s: list of the times of forward passes, in seconds. Waiting for transfers is not
            included. The time of the first forward pass is included only if the step has no other
            forward pass.
        backward_s: list of the times of backward passes, in seconds. Waiting for transfers is not
            included.
        activation_bytes: number of bytes that one forward pass saves for its backward pass.
        transfer_s: time to send the activations of a micro-batch to the next stage, in seconds. The
            last stage measures the transfer from the previous stage instead.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.forward_s: list[float] = []
        self.backward_s: list[float] = []
        self.activation_bytes = 0
        self._waited_s = 0.0
        for receiver in (self.links.inputs, self.links.output_grads):
            if receiver:
                receiver.next = self._timed(receiver.next)  # type: ignore[method-assign]

    def _timed(self, receive: Any) -> Any:

        def call() -> Tensor:
            start = time.perf_counter()
            tensor = receive()
            wait_for_device(self.device)
            self._waited_s += time.perf_counter() - start
            return tensor

        return call

    def _now(self) -> float:
        wait_for_device(self.device)
        return time.perf_counter() - self._waited_s

    def forward(self, batch: int, number: int) -> None:
        """Run a forward pass and measure its time. See `Step`."""
        start = self._now()
        if batch == 0:
            saved = _SavedBytes()
            with saved:
                super().forward(batch, number)
            self.activation_bytes = saved.total
            if self.batches > 1:
                return  # counting bytes takes time, so this pass is not representative
        else:
            super().forward(batch, number)
        self.forward_s.append(self._now() - start)

    def backward(self, batch: int, number: int) -> None:
        """Run a backward pass and measure its time. See `Step`."""
        start = self._now()
        super().backward(batch, number)
        self.backward_s.append(self._now() - start)


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes of all tensor storages that autograd saves, except those of parameters.

    A storage that is saved several times is counted once.
    """

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Number of bytes saved so far."""
        return sum(self._storages.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor  # some of Megatron's backward functions read attributes of parameters
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # saving the tensor itself would keep its graph alive


def agreed(step: MeasuredStep, group: Any, limit: int | None) -> StageProfile:
    """Combine the measurements of all ranks. The returned profile is identical on all ranks. For
    each stage, the profile contains the times of the slowest rank and the largest number of
    activation bytes on any rank.

    This is a collective operation, so all ranks must call this function.

    limit: number of bytes available for activations. On a GPU, `limit` defaults to the free memory.
        On a CPU, there is no limit by default.
    """
    rank_values = {
        "stage": group.rank(), "forward_s": statistics.median(step.forward_s),
        "backward_s": statistics.median(step.backward_s),
        "transfer_s": transfer_s(step, step.shapes()[1]),
        "activation_bytes": step.activation_bytes, "memory_bytes": _free(step, limit),
    }
    every = gather_objects(rank_values, "the measurements of pipeline.schedule=auto")
    stages = [[row for row in every if row["stage"] == stage] for stage in range(group.size())]

    def worst(name: str) -> list[Any]:
        return [max(row[name] for row in rows) for rows in stages]

    known = [row["memory_bytes"] for row in every if row["memory_bytes"] is not None]
    return StageProfile(
        name="measured", micro_batches=step.batches, forward_s=worst("forward_s"),
        backward_s=worst("backward_s"), transfer_s=max(worst("transfer_s")),
        activation_bytes=worst("activation_bytes"), memory_bytes=min(known, default=0),
        transport="nccl" if dist.get_backend(group) == "nccl" else "gloo")


def _free(step: MeasuredStep, limit: int | None) -> int | None:
    if limit is not None or step.device.type != "cuda":
        return limit
    free, _ = torch.cuda.mem_get_info(step.device)
    cached = torch.cuda.memory_reserved(step.device) - torch.cuda.memory_allocated(step.device)
    # the memory that the 1F1B step has just used is available in any case
    return max(int(HEADROOM * (free + cached)), step.activation_bytes * step.most_alive)


logger = logging.getLogger(__name__)


@register
class AutoSchedule(PipelineSchedule):
    """A schedule that selects 1F1B, eager 1F1B or TeraPipe, based on measured times and memory.
    TeraPipe is considered only if `pipeline.slices` is set.

    `pipeline.memory` sets the memory limit. With virtual stages, Megatron's own schedule is used.

    Attributes:
        chosen: the selected schedule, or None if no schedule has been selected yet.
        profile: the measurements.
    """

    name = "auto"

    def __init__(self, settings: PipelineConfig, native: ForwardBackward) -> None:
        super().__init__(settings, native)
        self.steps = 0
        self.chosen: Predicted | None = None
        self.profile: StageProfile | None = None
        self._run: Callable[..., list[Any]] = native
        self._sliced: SliceSchedule | None = None  # while slices are measured
        self._steady, self._checks = Steady(), Checks()
        if settings.slices is not None:
            self.unfit = SliceSchedule.unfit

    @classmethod
    def or_native(cls, settings: PipelineConfig, native: ForwardBackward) -> ForwardBackward:
        """Return a schedule of this class. If there are virtual stages or only a single stage,
        return Megatron's function instead. See `PipelineSchedule`.
        """
        virtual = ps.get_virtual_pipeline_model_parallel_world_size()
        return super().or_native(settings, native) if virtual is None else native

    def __call__(self, **passes: Any) -> list[Any]:
        """Run one step, with the same arguments and return value as Megatron's function."""
        if passes.get("forward_only"):
            return self._run(**passes)
        if self.chosen is not None:
            self._checks.calls += 1
            return super().__call__(**passes) if self._checks.due() else self._run(**passes)
        if self._sliced is not None:
            return self._measure_slices(passes, self._sliced)
        self.steps += 1
        return self.native(**passes) if self.steps == 1 else super().__call__(**passes)

    def check(self, passes: dict[str, Any], config: Any) -> None:
        super().check(passes, config)
        if self.settings.slices is None:
            return
        MEASURED_SLICES.refuse(values_of_schedule(self.name, config))
        [model] = passes["model"] if isinstance(passes["model"], list) else [passes["model"]]
        check_model(model, config)

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """Run one step and measure its passes. All ranks then agree on the measurements."""
        step = MeasuredStep(passes, config, self.group, self.gradients)
        logged = step.run()
        limit = parse_size(self.settings.memory) if self.settings.memory else None
        profile = agreed(step, self.group, limit)
        numbers = numbers_of(profile)
        if self.chosen is not None:
            if not self._steady.contradicts(numbers):
                self._checks.agreed()
                return logged
            logger.info("pipeline.schedule=auto: a step was much faster than the measured steps, "
                        "so the measurements are repeated")
            self.chosen, self._run, self._steady = None, self.native, Steady()
        self._steady.add(numbers)
        if self.settings.slices is None:
            choose(profile)  # raises at once if no schedule fits the memory
        if not self._steady.enough:
            return logged
        self._checks.changed()
        self.profile = with_numbers(profile, self._steady.best())
        if self.settings.slices is None:
            self._choose()
        else:
            settings = dataclasses.replace(self.settings, schedule=SliceSchedule.name, slices=None)
            self._sliced = SliceSchedule(settings, self.native, self.gradients)
        return logged

    def _measure_slices(self, passes: dict[str, Any], sliced: SliceSchedule) -> list[Any]:
        logged = sliced(**passes)
        trials, profile = sliced.trials, self.profile
        assert trials is not None and profile is not None
        if trials.chosen is not None:
            slices = given_slices(self.settings.slices, trials.length, trials.multiple)
            assert trials.profile is not None
            self.profile = dataclasses.replace(
                profile, sequence=trials.length, slice_samples=trials.samples,
                granularity=trials.profile.granularity, slices=list(slices or trials.chosen))
            self._sliced = None
            self._choose(sliced)
        return logged

    def _choose(self, sliced: SliceSchedule | None = None) -> None:
        assert self.profile is not None
        self.chosen = choose(self.profile)
        if self.chosen.schedule == EagerSchedule.name:
            self._run = EagerSchedule(self.settings, self.native, self.gradients)
        elif self.chosen.schedule == SliceSchedule.name:
            assert sliced is not None  # it has measured the slices
            sliced.settings = dataclasses.replace(self.settings, schedule=SliceSchedule.name)
            self._run = sliced
        logger.info("pipeline.schedule=auto: %s; predicted %s", self.chosen.schedule, ", ".join(
            f"{plan.schedule} {show_time(plan.seconds)}{'' if plan.fits else ' (does not fit)'}"
            for plan in predict(self.profile)))


def numbers_of(profile: StageProfile) -> dict[Hashable, float]:
    """Return a dict of the measured times. Each key is a pair of the measurement's name
    (`forward_s` or `backward_s`) and the stage.
    """
    return {(what, stage): seconds for what in ("forward_s", "backward_s")
            for stage, seconds in enumerate(getattr(profile, what))}


def with_numbers(profile: StageProfile, numbers: Mapping[Hashable, float]) -> StageProfile:
    """Return a copy of the profile with the times in `numbers`. See `numbers_of`."""
    stages = range(len(profile.forward_s))
    return dataclasses.replace(profile, forward_s=[numbers["forward_s", i] for i in stages],
                               backward_s=[numbers["backward_s", i] for i in stages])
