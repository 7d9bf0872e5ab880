"""Schedules of compute and copies between a device and slower memory, with memory accounting.

A device has three streams that work at the same time: one computes, one copies in, and one copies
out. Each stream runs one step at a time, in issue order. The accounting of bytes delays no step: a
step that needs memory must list in `after` the step that frees this memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from moe_plugin.planner.events import Span, Task, Timeline, simulate
from moe_plugin.planner.units import load_record
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import write_regular

# Limits of block profiles, far beyond any real block or model.
MAX_SECONDS, MAX_BYTES, MAX_BLOCKS = 1e6, 10**16, 10_000


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """Measured costs of one block of a model, for one micro-batch.

    Attributes:
        name: unique name in the model.
        forward_s, backward_s: seconds of forward, and of backward without recomputation.
        activation_bytes: bytes that forward stores for backward, including the block's input.
        kept_bytes: bytes of the activations that remain if forward is recomputed, which is the
            block's input. If a model is divided before this block, the same bytes are sent between
            the two parts.
        parameter_bytes: bytes of the block's weights.
        gradient_bytes: bytes of the gradients of the weights.
        workspace_bytes: additional bytes that are needed only while forward or backward runs.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int = 0
    kept_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            value, most = getattr(self, f.name), MAX_SECONDS if f.name[-2:] == "_s" else MAX_BYTES
            if not 0 <= value <= most:
                raise ValueError(f"block {short(self.name)}: {f.name}={short(value)} must be from "
                                 f"0 to {most:g}; measure the block again")
        if self.kept_bytes > self.activation_bytes:
            raise ValueError(f"block {short(self.name)}: kept_bytes={self.kept_bytes} must be at "
                             f"most activation_bytes={self.activation_bytes}, because activations "
                             "include the block's input")


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's blocks in the order of forward, and the machine on which they were measured.

    Attributes:
        blocks: the blocks, at least one.
        name: name that is shown to users.
        base_bytes: bytes that are always on the device: resident weights, optimizer state, buffers.
        in_bytes_s, out_bytes_s: bandwidth of copies to and from the device, in bytes per second. 0
            means that copies are not possible.
        duplex: whether copies in both directions run at the same time.
    """

    blocks: list[BlockProfile] = field(default_factory=list)
    name: str = "model"
    base_bytes: int = 0
    in_bytes_s: float = 0.0
    out_bytes_s: float = 0.0
    duplex: bool = True

    def __post_init__(self) -> None:
        if not 1 <= len(self.blocks) <= MAX_BLOCKS:
            raise ValueError(f"profile {short(self.name)} has {len(self.blocks)} blocks; it must "
                             f"have from 1 to {MAX_BLOCKS} blocks")
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"profile {short(self.name)}: block {short(twice)} occurs twice. "
                             "Assign a unique name to each block")
        for key, most in (("base_bytes", MAX_BYTES), ("in_bytes_s", 1e15), ("out_bytes_s", 1e15)):
            if not 0 <= getattr(self, key) <= most:
                raise ValueError(f"profile {short(self.name)}: {key}={short(getattr(self, key))} "
                                 f"must be from 0 to {most:g}; measure the model again")

    @property
    def compute_s(self) -> float:
        """Seconds of all forward and backward passes without recomputation."""
        return sum(block.forward_s + block.backward_s for block in self.blocks)

    def save(self, path: str | Path) -> Path:
        """Write the profile to a file atomically."""
        return write_regular(path, json.dumps(asdict(self), indent=1) + "\n")


def load_profile(path: str | Path) -> ModelProfile:
    """Read a profile from a JSON or YAML file.

    Raises:
        ValueError: if the file cannot be read or contains no profile.
    """
    return load_record(ModelProfile, path, "profile file", "see docs/activations.md")


STREAMS = ("compute", "in", "out")


@dataclass(frozen=True)
class OffloadStep:
    """A step of one stream.

    Attributes:
        name: unique name in the schedule.
        stream: "compute", "in" (copies to the device) or "out" (copies from the device).
        seconds: duration of the step.
        after: names of earlier issued steps that must end before this step starts.
        takes: bytes that the step allocates on the device when it starts.
        frees: bytes that the step releases when it ends.
        block: name of the block to which the step belongs, for display.
    """

    name: str
    stream: str
    seconds: float
    after: tuple[str, ...] = ()
    takes: int = 0
    frees: int = 0
    block: str = ""

    def __post_init__(self) -> None:
        if self.stream not in STREAMS:
            raise ValueError(f"step {short(self.name)}: stream {short(self.stream)} is unknown. "
                             f"Choose from {', '.join(STREAMS)}")
        if not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise ValueError(f"step {short(self.name)}: seconds={self.seconds} must be a finite "
                             "number >= 0; omit copies that never end")
        if min(self.takes, self.frees) < 0:
            raise ValueError(f"step {short(self.name)}: takes={self.takes} and "
                             f"frees={self.frees} must be numbers of bytes >= 0")

    @property
    def moved(self) -> int:
        """Bytes that the step copies."""
        return {"in": self.takes, "out": self.frees, "compute": 0}[self.stream]


@dataclass(frozen=True)
class Outcome:
    """Result of a simulated schedule.

    Attributes:
        timeline: spans in issue order. Resources are the streams, and phases are the blocks.
        memory: (seconds, bytes on the device) after each change, in chronological order.
        peak: largest number of bytes on the device at a time.
        peak_step: name of the step that reached the peak.
        stalls: seconds that the compute stream waited before each compute step.
        moved_in, moved_out: bytes copied to and from the device.
    """

    timeline: Timeline
    memory: tuple[tuple[float, int], ...]
    peak: int
    peak_step: str
    stalls: dict[str, float]
    moved_in: int
    moved_out: int

    @property
    def seconds(self) -> float:
        """Time at which the last step ends, in seconds."""
        return self.timeline.seconds

    @property
    def stall_s(self) -> float:
        """Seconds that the compute stream waited between or before its steps."""
        return sum(self.stalls.values())

    @property
    def occupancy(self) -> float:
        """Share of the time in which the compute stream is busy, or 1 for an empty schedule."""
        return self.timeline.busy("compute") / self.seconds if self.seconds else 1.0

    @cached_property
    def ended(self) -> dict[str, float]:
        """End of each step in seconds."""
        return {span.task.name: span.end for span in self.timeline.spans}

    @cached_property
    def started(self) -> dict[str, float]:
        """Start of each step in seconds."""
        return {span.task.name: span.start for span in self.timeline.spans}

    def trace(self) -> dict[str, Any]:
        """Return a Chrome and Perfetto trace of the timeline, with a counter of used bytes."""
        trace = self.timeline.trace(STREAMS)
        trace["traceEvents"] += [{"name": "memory", "ph": "C", "pid": 0, "ts": 1e6 * at,
                                  "args": {"bytes": size}} for at, size in self.memory]
        return trace


@dataclass(frozen=True)
class OffloadSchedule:
    """Steps in issue order.

    Attributes:
        steps: the steps.
        limit: largest number of bytes that may be on the device at a time. None means no limit.
        base: bytes that are always on the device.
        duplex: whether copies in and out run at the same time. Otherwise copies run one after
            another in issue order, like copies of a single queue.
    """

    steps: tuple[OffloadStep, ...]
    limit: int | None = None
    base: int = 0
    duplex: bool = True
    _tasks: tuple[Task, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        other = {} if self.duplex else {"in": ("out",), "out": ("in",)}
        tasks = (Task(s.name, s.stream, s.seconds, s.after, s.block, other.get(s.stream, ()))
                 for s in self.steps)
        object.__setattr__(self, "_tasks", tuple(tasks))

    def run(self) -> Outcome:
        """Simulate the schedule.

        Raises:
            ValueError: if a step waits for a step that is not issued before it, if a step occurs
                twice, if the bytes on the device exceed the limit, or if more bytes are freed than
                were allocated.
        """
        timeline = simulate(self._tasks)
        memory: list[tuple[float, int]] = [(0.0, self.base)]
        size, peak, peak_step = self.base, self.base, ""
        self._check("the resident memory", peak)
        for at, index, change in _changes(self.steps, timeline.spans):
            size += change
            if size < self.base:
                raise ValueError(f"step {short(self.steps[index].name)} frees {-change} bytes, "
                                 f"which is {self.base - size} more than steps allocated. Free "
                                 "only allocated bytes")
            if size > peak:
                peak, peak_step = size, self.steps[index].name
                self._check(f"step {short(peak_step)}", peak)
            memory.append((at, size))
        moved = {stream: sum(s.moved for s in self.steps if s.stream == stream)
                 for stream in STREAMS}
        return Outcome(timeline, tuple(memory), peak, peak_step, _stalls(timeline), moved["in"],
                       moved["out"])

    def _check(self, what: str, size: int) -> None:
        if self.limit is not None and size > self.limit:
            raise ValueError(f"{what} raises the memory of the device to {size} bytes, above the "
                             f"limit of {self.limit}. Raise the limit or store less on the device")


def _changes(steps: tuple[OffloadStep, ...],
             spans: tuple[Span, ...]) -> Iterator[tuple[float, int, int]]:
    """Yield (seconds, step, change of bytes) in chronological order.

    At equal times, running steps end before other steps start. Steps that start at the same time do
    so in issue order, and a step of zero length ends before the next step starts.
    """
    order = []
    for index, (step, span) in enumerate(zip(steps, spans, strict=True)):
        if step.takes:
            order.append((span.start, 1, index, 0, step.takes))
        if step.frees:
            order.append((span.end, int(span.end == span.start), index, 1, -step.frees))
    for at, _, index, _, change in sorted(order):
        yield at, index, change


def _stalls(timeline: Timeline) -> dict[str, float]:
    """Return, by compute step, the seconds for which the compute stream idles before the step."""
    stalls, end = {}, 0.0
    for span in timeline.spans:
        if span.task.resource == "compute":
            if span.start > end:
                stalls[span.task.name] = span.start - end
            end = span.end
    return stalls
