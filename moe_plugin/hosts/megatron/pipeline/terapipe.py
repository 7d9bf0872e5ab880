"""TeraPipe (arXiv 2102.07988). TeraPipe splits sequences into slices and pipelines the slices."""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.config import PipelineConfig
from moe_plugin.hosts.megatron.pipeline.base import (
    ForwardBackward,
    PipelineSchedule,
    refuse,
    register,
)
from moe_plugin.hosts.megatron.pipeline.executor import transfer_s
from moe_plugin.hosts.megatron.pipeline.slice_step import NAME, Seconds, SliceStep
from moe_plugin.hosts.megatron.refusals import MEASURED_SLICES
from moe_plugin.planner.pipeline.schedules import equal_slices
from moe_plugin.planner.pipeline.slices import SliceProfile, fit, slice_seconds
from moe_plugin.planner.trials import BUSY, Checks

# The first steps of a run measure slices of several lengths. Then the best slices are chosen.
# Every step is a training step, even if it is measured. All ranks choose the same slices, based on
# the times of the slowest rank. From time to time a step with the chosen slices is measured. If it
# is much faster than the trials predicted, the machine was busy during the trials, and the trials
# are repeated.
COUNTS = (1, 2, 4, 8)  # numbers of equal slices in the trials
ROUNDS = 2
logger = logging.getLogger(__name__)


class SliceTrials:
    """Selects the slices for each step, and runs trials until the fastest slices are known.

    Args:
        length: length of each sequence, in tokens.
        multiple: every slice length must be a multiple of this number.

    Attributes:
        profile: the measured times, or None if the trials are not complete.
        chosen: the fastest slices, or None if the trials are not complete.
        samples: list of measurements [length, context, seconds], one for each kind of forward pass.
            `seconds` is the time of the slowest rank.
    """

    def __init__(self, length: int, multiple: int) -> None:
        self.length, self.multiple = length, multiple
        self.profile: SliceProfile | None = None
        self.chosen: tuple[int, ...] | None = None
        self.samples: list[list[float]] = []
        counts = [count for count in COUNTS if count <= length // multiple]
        self._trials = [counts[-1], *counts * ROUNDS]  # the first step warms up
        self._steps, self._checks = 0, Checks()
        self._best: dict[int, tuple[int, ...]] = {}  # slices by length of a sequence
        self._seconds: Seconds = defaultdict(list)

    def knows(self, length: int) -> bool:
        """Return True if this object can select slices for sequences of this length.

        While trials are running, only sequences of the length that is being measured are supported.
        """
        return self.chosen is not None or length == self.length

    def next(self, length: int) -> tuple[tuple[int, ...], bool]:
        """Return the slices of the next step, and whether the passes of the step must be timed.

        length: length of the sequences in this step, in tokens.
        """
        if self.chosen is not None:
            self._checks.calls += 1
            return self._best_of(length), length == self.length and self._checks.due()
        count = self._trials[self._steps]
        return equal_slices(self.length, self.multiple, count), self._steps > 0

    def after(self, step: SliceStep) -> None:
        """Record a step. After the last trial and after each check, this method runs a collective,
        so all ranks must call it.
        """
        if self.chosen is not None:
            if step.timed:
                self._check(step)
            return
        self._steps += 1
        for key, seconds in step.seconds.items():
            self._seconds[key] += seconds
        if self._steps < len(self._trials):
            return
        keys = sorted(self._seconds)
        measured = [min(self._seconds[key]) for key in keys]  # disturbances only add time
        received, _ = step.shapes()
        sent = [transfer_s(step, (tokens, *received[1:])) for tokens in (1, received[0])]
        numbers = torch.tensor([*measured, *sent], dtype=torch.float64, device=step.device)
        *slowest, few_s, all_s = comm_of().all_reduce(numbers, "max").tolist()
        times = {direction: fit((length, context, s) for (k, length, context), s in
                                zip(keys, slowest, strict=True) if k == direction)
                 for direction in ("forward", "backward")}
        few = self.length // received[0]  # tokens per row: tensor-parallel ranks share a sequence
        token_s = max(0.0, all_s - few_s) / max(1, self.length - few)
        self.profile = SliceProfile(
            length=self.length, multiple=self.multiple, stages=step.stages,
            micro_batches=step.batches, forward=times["forward"], backward=times["backward"],
            send_s=max(0.0, few_s - token_s * few), token_s=token_s)
        self.chosen, best_s = self.profile.best()
        whole_s = self.profile.pipeline((self.length,)).simulate().seconds
        self.samples = [[length, context, s] for (direction, length, context), s in
                        zip(keys, slowest, strict=True) if direction == "forward"]
        if dist.get_rank() == 0:
            logger.info("pipeline slices %s: %.3g s per step predicted, %.3g s without slices",
                        ",".join(map(str, self.chosen)), best_s, whole_s)
            logger.info("slice_samples with batch (moe-plugin plan --pipeline): %s", [
                [received[1], *sizes, float(f"{s:.3g}")] for *sizes, s in self.samples])
        self._best = {self.length: self.chosen}
        self._seconds.clear()
        self._checks.changed()

    def _check(self, step: SliceStep) -> None:
        rank_seconds = sum(min(seconds) for seconds in step.seconds.values())
        [slowest] = comm_of().all_reduce(torch.tensor(
            [rank_seconds], dtype=torch.float64, device=step.device), "max").tolist()
        assert self.chosen is not None and self.profile is not None
        forward_s, backward_s = (slice_seconds(times, self.chosen) for times in
                                 (self.profile.forward, self.profile.backward))
        if slowest >= BUSY * sum((*forward_s, *backward_s)):
            self._checks.agreed()
            return
        self.chosen, self._steps = None, 0
        if dist.get_rank() == 0:
            logger.info("pipeline slices: a step was much faster than the trials predicted, so the "
                        "trials are repeated")

    def _best_of(self, length: int) -> tuple[int, ...]:
        # times for other sequence lengths are predicted from the measured length
        if length not in self._best:
            assert self.profile is not None
            profile = dataclasses.replace(self.profile, length=length)
            self._best[length], seconds = profile.best()
            if dist.get_rank() == 0:
                logger.info("sequences have %d tokens, but slices were measured with %d: pipeline "
                            "slices %s, %.3g s per step predicted", length, self.length,
                            ",".join(map(str, self._best[length])), seconds)
        return self._best[length]


@register
class SliceSchedule(PipelineSchedule):
    """A schedule that splits sequences into slices. Stage `i` of `n` starts with `n - i + S - 1`
    forward passes of slices.

    `S` is the number of slices. See docs/pipeline.md.

    trials: trials that determine the fastest slices, or None if the user chose the slices.
    """

    name = NAME
    unfit = ("p2p_communicator", "adjust_tensor_shapes_fn")

    def __init__(self, settings: PipelineConfig, native: ForwardBackward,
                 gradients: Any = None) -> None:
        super().__init__(settings, native, gradients)
        self.trials: SliceTrials | None = None

    def step(self, passes: dict[str, Any], config: Any) -> list[Any]:
        """Run one step. See `PipelineSchedule`."""
        length = passes.get("decoder_seq_length") or passes["seq_length"]
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
        slices, timed = self._next(length, multiple, config.deterministic_mode)
        step = SliceStep(passes, config, self.group, self.gradients, slices, timed)
        logged = step.run()
        if self.trials is not None:
            self.trials.after(step)
        return logged

    def _next(self, length: int, multiple: int,
              deterministic: bool) -> tuple[tuple[int, ...], bool]:
        """Return the slices of the next step, and whether the passes of the step must be timed."""
        slices = given_slices(self.settings.slices, length, multiple)
        if slices:
            return slices, False
        MEASURED_SLICES.refuse({"pipeline.schedule": NAME, "deterministic_mode": deterministic})
        if self.trials is None or not self.trials.knows(length):
            self.trials = SliceTrials(length, multiple)
        return self.trials.next(length)


def given_slices(text: str | None, length: int, multiple: int) -> tuple[int, ...]:
    """Return the slice lengths that the setting `pipeline.slices` specifies. Return an empty tuple
    if the setting is `best` or None.

    Args:
        text: value of the setting. The setting contains either slice lengths such as `512,256,256`,
            or a single number, which is the number of slices of equal length.
        length: length of each sequence, in tokens.
        multiple: every slice length must be a multiple of this number.
    Raises:
        ValueError: If the slice lengths do not fit the length of the sequence.
    """
    if text is None or text == "best":
        return ()
    remedy = (f"use lengths that are multiples of {multiple} and sum to seq_length={length}, or "
              "the number of equal slices")
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and 1 <= numbers[0] <= length // multiple:
        numbers = list(equal_slices(length, multiple, numbers[0]))
    if not numbers or sum(numbers) != length or any(n < 1 or n % multiple for n in numbers):
        refuse(NAME, "pipeline.slices", text, f"lengths that sum to seq_length={length}", remedy)
    return tuple(numbers)
