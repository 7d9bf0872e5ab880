"""Which schedule: the fastest predicted one whose activations fit the memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_plugin.planner.events import Timeline
from moe_plugin.planner.pipeline.schedules import Pipeline, idle
from moe_plugin.planner.pipeline.slices import (
    BatchCut,
    BatchTimes,
    cut,
    cut_batch,
    fit_batches,
    slice_seconds,
)
from moe_plugin.planner.units import load_record

SCHEDULES = ("1f1b", "eager-1f1b", "terapipe")
MOST_TOKENS, MOST_PIECES, MOST_BATCH = 1 << 24, 512, 64
GAPS = 1000  # of bounds that are tried between no time and that of a whole sequence
TRANSPORTS = {"nccl": "blocking", "gloo": "paired"}  # by what Megatron's 1F1B sends


def _is_sample(value: Any, numbers: int) -> bool:
    return (isinstance(value, list) and len(value) == numbers
            and all(isinstance(number, int | float) for number in value))


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Times and sizes of one micro-batch on each pipeline stage, measured or assumed.

    Attributes:
        micro_batches: of a step, in one pipeline.
        forward_s, backward_s: seconds by stage, first to last.
        transfer_s: seconds of its activations, or their gradient, between two stages.
        activation_bytes: by stage, what backward needs of one micro-batch; empty: not known.
        memory_bytes: what activations may take on each rank; 0: any.
        transport: nccl, or gloo, which sends what crosses between two stages in turn.
        sequence: tokens of a sequence, where slices of it are to be compared, too; 0: they are not.
        slice_samples: [tokens, earlier tokens of the sequence, seconds] of forward passes of
            slices on the slowest stage, measured; some with no earlier tokens. With `batch` each
            begins with its number of sequences.
        batch: sequences of a step in one pipeline, where the size of a micro-batch is to be chosen
            with its slices; 0: it is given.
        granularity: tokens that are not cut apart; a divisor of `sequence`.
        slices: lengths that are given, in tokens; empty: the best by the samples.
    """

    name: str = "pipeline"
    micro_batches: int = 1
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    transfer_s: float = 0.0
    activation_bytes: list[int] = field(default_factory=list)
    memory_bytes: int = 0
    transport: str = "nccl"
    sequence: int = 0
    slice_samples: list[Any] = field(default_factory=list)
    batch: int = 0
    granularity: int = 8
    slices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if not stages or len(self.backward_s) != stages:
            raise ValueError(f"forward_s has {stages} and backward_s {len(self.backward_s)} "
                             "numbers; give both one for each stage")
        if len(self.activation_bytes) not in (0, stages) or min([0, *self.activation_bytes]) < 0:
            raise ValueError(f"activation_bytes={self.activation_bytes} must be sizes >= 0, one "
                             f"for each of {stages} stages, or left out")
        if self.memory_bytes < 0 or (self.memory_bytes and not self.activation_bytes):
            raise ValueError(f"memory_bytes={self.memory_bytes} must be >= 0, and 0 without "
                             "activation_bytes; leave it out or give both")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} must be one of "
                             f"{', '.join(TRANSPORTS)}")
        if not 0 <= self.batch <= MOST_BATCH or self.batch % max(1, self.micro_batches) or (
                self.batch and (not self.sequence or self.slices)):
            raise ValueError(f"batch={self.batch} must be a multiple of micro_batches="
                             f"{self.micro_batches}, at most {MOST_BATCH}, with sequence and "
                             "without slices; leave it out where a micro-batch's size is given")
        if not 0 <= self.sequence <= MOST_TOKENS or bool(self.sequence) != bool(
                self.slice_samples) or not all(_is_sample(one, 4 if self.batch else 3)
                                               for one in self.slice_samples):
            raise ValueError(f"sequence={self.sequence} must be 1 to {MOST_TOKENS} tokens with "
                             f"slice_samples of {'four' if self.batch else 'three'} numbers each, "
                             "and 0 without; give both")
        if self.granularity < 1 or self.sequence % self.granularity:
            raise ValueError(f"granularity={self.granularity} must be >= 1 and a divisor of "
                             f"sequence={self.sequence}")
        if self.sequence // self.granularity > MOST_PIECES:
            raise ValueError(f"granularity={self.granularity} is too fine: sequence="
                             f"{self.sequence} must have at most {MOST_PIECES} such pieces")
        if self.slices and (sum(self.slices) != self.sequence or min(self.slices) < 1):
            raise ValueError(f"slices={self.slices} must be lengths >= 1 that sum to sequence="
                             f"{self.sequence}; leave them out for the best")
        self.pipeline()  # checks the times

    def pipeline(self) -> Pipeline:
        """For the simulator."""
        return Pipeline(stages=len(self.forward_s), micro_batches=self.micro_batches,
                        forward_s=tuple(self.forward_s), backward_s=tuple(self.backward_s),
                        send_s=self.transfer_s)


@dataclass(frozen=True)
class Predicted:
    """A schedule's step.

    Attributes:
        alive: by stage, the most micro-batches whose activations are kept, with parts of them.
        fits: the memory.
        slices: of a sequence, in tokens; empty: it is not cut.
        sequences: of a micro-batch; 0: as given.
    """

    schedule: str
    timeline: Timeline
    alive: tuple[float, ...]
    fits: bool
    slices: tuple[int, ...] = ()
    sequences: int = 0

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.timeline.seconds

    @property
    def bubble(self) -> float:
        """Share of the time in which stages do not compute, 0 to 1."""
        return idle(self.timeline, len(self.alive))


def predict(profile: StageProfile) -> list[Predicted]:
    """All schedules, the fastest first; `terapipe` where slices were measured."""
    line = profile.pipeline()
    found = []
    for schedule, mode in (("1f1b", TRANSPORTS[profile.transport]), ("eager-1f1b", "eager")):
        alive = tuple(map(float, line.peak_activations(mode)))
        found.append(Predicted(schedule, line.simulate(mode), alive, _fits(profile, alive)))
    if profile.sequence:
        times, batch = _slice_times(profile), profile.batch
        sizes = [n for n in range(1, batch + 1) if batch % n == 0] or [0]
        found.append(min((_sliced(profile, times, size) for size in sizes),
                         key=lambda one: (not one.fits, one.seconds)))
    return sorted(found, key=lambda one: one.seconds)


def _fits(profile: StageProfile, alive: tuple[float, ...]) -> bool:
    return not profile.memory_bytes or all(
        size * count <= profile.memory_bytes
        for size, count in zip(profile.activation_bytes, alive, strict=True))


def _slice_times(profile: StageProfile) -> BatchTimes:
    return fit_batches((int(size), int(tokens), int(context), s) for size, tokens, context, s in (
        one if profile.batch else [1, *one] for one in profile.slice_samples))


def _sliced(profile: StageProfile, times: BatchTimes, sequences: int) -> Predicted:
    """Slices by the dynamic program. A slice's backward takes the share of its forward that whole
    micro-batches' do, and its transfer the share of its tokens.

    sequences: of a micro-batch; 0: as given.
    """
    stages, length = len(profile.forward_s), profile.sequence
    count, share = profile.micro_batches, 1.0
    if sequences:
        count = profile.batch // sequences
        share = profile.micro_batches / count  # of a given micro-batch

    def seconds(tokens: int, context: int) -> float:
        return times(sequences or 1, tokens, context)

    # of each of m sequences in a row, the filling of the pipeline is an m-th
    slices = tuple(profile.slices) or cut(
        seconds, length, 1 + (stages - 1) / count, granularity=profile.granularity,
        gap_s=seconds(length, 0) / GAPS).slices
    forward, ratio = slice_seconds(seconds, slices), _backward_share(profile)
    line = Pipeline(stages=stages, micro_batches=count, slices=len(slices),
                    forward_s=forward, backward_s=tuple(ratio * s for s in forward),
                    send_s=tuple(profile.transfer_s * share * part / length for part in slices))
    alive = tuple(share * tokens / length for tokens in line.peak_activations(sizes=slices))
    return Predicted("terapipe", line.simulate(), alive, _fits(profile, alive), slices, sequences)


def _backward_share(profile: StageProfile) -> float:
    return max(profile.backward_s) / max(profile.forward_s)


def groups(profile: StageProfile) -> BatchCut:
    """The batch in groups of any sizes with their slices, one group after another, as TeraPipe cuts
    it: forward and backward, without transfers. For a profile with `batch`.
    """
    times, both = _slice_times(profile), 1 + _backward_share(profile)
    return cut_batch(lambda b, l, c: both * times(b, l, c), profile.batch,  # noqa: E741
                     profile.sequence, len(profile.forward_s), granularity=profile.granularity,
                     gap_s=both * times(1, profile.sequence, 0) / GAPS)


def choose(profile: StageProfile) -> Predicted:
    """The fastest schedule that fits; equal ones: Megatron's.

    Raises: ValueError: none fits.
    """
    found = [one for one in predict(profile) if one.fits]
    if not found:
        raise ValueError(
            f"memory_bytes={profile.memory_bytes} is too little for the activations of any "
            f"schedule, {profile.activation_bytes} bytes of a micro-batch by stage; use smaller "
            "micro-batches or recompute activations")
    least = found[0].seconds
    return min((one for one in found if one.seconds <= least * (1 + 1e-9)),
               key=lambda one: SCHEDULES.index(one.schedule))


def load_profile(path: str | Path) -> StageProfile:
    """Read a file of such a profile; `ValueError` if it does not hold one."""
    return load_record(StageProfile, path, "pipeline profile", "see docs/pipeline.md")
