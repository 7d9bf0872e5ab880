"""Choose the pipeline schedule with the shortest predicted step whose activations fit in memory."""

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
GAPS = 1000  # number of bounds tried between zero and the time of a whole sequence
TRANSPORTS = {"nccl": "blocking", "gloo": "paired"}  # sending mode of Megatron's 1F1B


def _is_sample(value: Any, numbers: int) -> bool:
    return (isinstance(value, list) and len(value) == numbers
            and all(isinstance(number, int | float) for number in value))


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """Measured or assumed times and sizes of one micro-batch, for each pipeline stage.

    Attributes:
        name: name of the profile.
        micro_batches: number of micro-batches per training step in one pipeline.
        forward_s, backward_s: for each stage, from first to last, the times in seconds of the
            forward pass and the backward pass.
        transfer_s: time in seconds to send one micro-batch's activations, or their gradient, from
            one stage to the next.
        activation_bytes: for each stage, the number of bytes that one micro-batch stores for its
            backward pass. Empty means unknown.
        memory_bytes: memory limit for activations on each rank in bytes, or 0 for no limit.
        transport: backend that sends data between stages, nccl or gloo. With gloo, two stages that
            exchange data send one after the other.
        sequence: number of tokens per sequence. Required to compare slices of sequences, otherwise
            0.
        slice_samples: measured forward passes of slices on the slowest stage. Each sample is
            [number of tokens, number of earlier tokens in the sequence, seconds]. At least one
            sample must have 0 earlier tokens. If `batch` is set, each sample starts with an
            additional number, the number of sequences.
        batch: number of sequences per training step in one pipeline. Required to choose the size of
            micro-batches together with the slices, otherwise 0.
        granularity: a divisor of `sequence`, of which all slice lengths are multiples.
        slices: fixed lengths of slices in tokens. If `slices` is empty, the best lengths are
            computed from the samples.
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
            raise ValueError(f"forward_s has {stages} numbers and backward_s has "
                             f"{len(self.backward_s)}. Set one number per stage in both")
        if len(self.activation_bytes) not in (0, stages) or min([0, *self.activation_bytes]) < 0:
            raise ValueError(f"activation_bytes={self.activation_bytes} must contain one size >= 0 "
                             f"for each of {stages} stages, or be omitted")
        if self.memory_bytes < 0 or (self.memory_bytes and not self.activation_bytes):
            raise ValueError(f"memory_bytes={self.memory_bytes} must be >= 0, and a value > 0 "
                             "requires activation_bytes. Set both or omit memory_bytes")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"transport={self.transport!r} is unknown. Choose from "
                             f"{', '.join(TRANSPORTS)}")
        if not 0 <= self.batch <= MOST_BATCH or self.batch % max(1, self.micro_batches) or (
                self.batch and (not self.sequence or self.slices)):
            raise ValueError(f"batch={self.batch} must be a multiple of micro_batches="
                             f"{self.micro_batches} and at most {MOST_BATCH}. It requires sequence "
                             "and cannot be combined with slices. Omit it if the micro-batch size "
                             "is fixed")
        if not 0 <= self.sequence <= MOST_TOKENS or bool(self.sequence) != bool(
                self.slice_samples) or not all(_is_sample(one, 4 if self.batch else 3)
                                               for one in self.slice_samples):
            raise ValueError(f"sequence={self.sequence} must be 1 to {MOST_TOKENS} tokens if there "
                             "are slice_samples, and 0 otherwise. Each sample needs "
                             f"{'four' if self.batch else 'three'} numbers")
        if self.granularity < 1 or self.sequence % self.granularity:
            raise ValueError(f"granularity={self.granularity} must be >= 1 and a divisor of "
                             f"sequence={self.sequence}. Correct one of them")
        if self.sequence // self.granularity > MOST_PIECES:
            raise ValueError(f"granularity={self.granularity} is too fine for sequence="
                             f"{self.sequence}: at most {MOST_PIECES} pieces are allowed. Use a "
                             "larger granularity")
        if self.slices and (sum(self.slices) != self.sequence or min(self.slices) < 1):
            raise ValueError(f"slices={self.slices} must be lengths >= 1 that sum to sequence="
                             f"{self.sequence}. Omit them to use the best lengths")
        self.pipeline()  # the constructor of `Pipeline` validates the times

    def pipeline(self) -> Pipeline:
        """Convert the profile to a `Pipeline`, which can be simulated."""
        return Pipeline(stages=len(self.forward_s), micro_batches=self.micro_batches,
                        forward_s=tuple(self.forward_s), backward_s=tuple(self.backward_s),
                        send_s=self.transfer_s)


@dataclass(frozen=True)
class Predicted:
    """Predicted training step with a pipeline schedule.

    Attributes:
        schedule: name of the schedule, one of `SCHEDULES`.
        timeline: simulated timeline of a training step.
        alive: for each stage, the maximum number of micro-batches whose activations are stored at
            the same time. With slices, this number may be fractional.
        fits: whether the activations fit in memory.
        slices: lengths of slices in tokens. Empty if sequences are not divided into slices.
        sequences: number of sequences per micro-batch. 0 means the same number as in the profile.
    """

    schedule: str
    timeline: Timeline
    alive: tuple[float, ...]
    fits: bool
    slices: tuple[int, ...] = ()
    sequences: int = 0

    @property
    def seconds(self) -> float:
        """Time of the training step in seconds."""
        return self.timeline.seconds

    @property
    def bubble(self) -> float:
        """Fraction of the time for which stages are idle, from 0 to 1."""
        return idle(self.timeline, len(self.alive))


def predict(profile: StageProfile) -> list[Predicted]:
    """Return the predicted training steps of all schedules, from fastest to slowest. The schedule
    `terapipe` is included only if the profile contains measured slices.
    """
    line = profile.pipeline()
    predictions = []
    for schedule, mode in (("1f1b", TRANSPORTS[profile.transport]), ("eager-1f1b", "eager")):
        alive = tuple(map(float, line.peak_activations(mode)))
        predictions.append(Predicted(schedule, line.simulate(mode), alive, _fits(profile, alive)))
    if profile.sequence:
        times, batch = _slice_times(profile), profile.batch
        sizes = [n for n in range(1, batch + 1) if batch % n == 0] or [0]
        predictions.append(min((_sliced(profile, times, size) for size in sizes),
                               key=lambda one: (not one.fits, one.seconds)))
    return sorted(predictions, key=lambda one: one.seconds)


def _fits(profile: StageProfile, alive: tuple[float, ...]) -> bool:
    return not profile.memory_bytes or all(
        size * count <= profile.memory_bytes
        for size, count in zip(profile.activation_bytes, alive, strict=True))


def _slice_times(profile: StageProfile) -> BatchTimes:
    return fit_batches((int(size), int(tokens), int(context), s) for size, tokens, context, s in (
        one if profile.batch else [1, *one] for one in profile.slice_samples))


def _sliced(profile: StageProfile, times: BatchTimes, sequences: int) -> Predicted:
    """Predict a training step with the slices that the dynamic program chooses.

    The ratio between the times of the backward pass and the forward pass is assumed to be the same
    for a slice as for a whole micro-batch. The time to send a slice is assumed to be proportional
    to its number of tokens.

    sequences: number of sequences per micro-batch. The value 0 means the same number as in the
        profile.
    """
    stages, length = len(profile.forward_s), profile.sequence
    count, share = profile.micro_batches, 1.0
    if sequences:
        count = profile.batch // sequences
        share = profile.micro_batches / count  # ratio to the micro-batch of the profile

    def seconds(tokens: int, context: int) -> float:
        return times(sequences or 1, tokens, context)

    # each of m consecutive sequences bears 1/m of the time to fill the pipeline
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
    """Return TeraPipe's division of the batch into groups of samples, and of each group into
    slices.

    The groups run one after the other. The times include the forward and backward passes, but not
    the transfers between stages.

    profile: a profile whose `batch` is not 0.
    """
    times, both = _slice_times(profile), 1 + _backward_share(profile)
    return cut_batch(lambda b, l, c: both * times(b, l, c), profile.batch,  # noqa: E741
                     profile.sequence, len(profile.forward_s), granularity=profile.granularity,
                     gap_s=both * times(1, profile.sequence, 0) / GAPS)


def choose(profile: StageProfile) -> Predicted:
    """Return the fastest schedule whose activations fit in memory. Among equally fast schedules,
    Megatron's own schedule is preferred.

    Raises:
        ValueError: If no schedule fits in memory.
    """
    fitting = [one for one in predict(profile) if one.fits]
    if not fitting:
        raise ValueError(
            f"memory_bytes={profile.memory_bytes} is too small for the activations of any "
            f"schedule. A micro-batch needs {profile.activation_bytes} bytes by stage. Use smaller "
            "micro-batches or recompute activations")
    least = fitting[0].seconds
    return min((one for one in fitting if one.seconds <= least * (1 + 1e-9)),
               key=lambda one: SCHEDULES.index(one.schedule))


def load_profile(path: str | Path) -> StageProfile:
    """Read a `StageProfile` from a file.

    Raises:
        ValueError: If the file cannot be read, or if it does not contain a valid profile.
    """
    return load_record(StageProfile, path, "pipeline profile", "see docs/pipeline.md")
