"""Schedules for computing on a device and for copying data between the device and slower memory.
Simulations also track how much memory is in use.

A device has three streams that work at the same time. The first computes, the second copies data to
the device, and the third copies data from the device. Each stream runs one step at a time, in the
order in which the steps were issued. The simulation does not delay a step if memory is lacking, so
a step that needs memory must list the step that frees it in `after`.
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
    """Measured times and sizes of one block of a model, for one micro-batch.

    Attributes:
        name: name of the block. Block names must be unique within a model.
        forward_s, backward_s: times in seconds of the forward pass and of the backward pass,
            without recomputation.
        activation_bytes: number of bytes that the forward pass stores for the backward pass,
            including the block's input.
        kept_bytes: size in bytes of the block's input, which remains stored even if the block is
            recomputed. If the model is split before this block, this is also the number of bytes
            sent from one part of the model to the other.
        parameter_bytes: size of the block's weights in bytes.
        gradient_bytes: size of the gradients of the block's weights in bytes.
        workspace_bytes: number of additional bytes that the device needs only while the forward or
            backward pass runs.
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
    """The blocks of a model in the order of the forward pass, and properties of the machine on
    which they were measured.

    Attributes:
        blocks: the blocks of the model, at least one.
        name: name of the model for messages to the user.
        base_bytes: number of bytes that are always in use on the device, such as resident weights,
            optimizer state and buffers.
        in_bytes_s, out_bytes_s: bandwidths of copies to the device and from the device, in bytes
            per second. A bandwidth of 0 means that data cannot be copied in this direction.
        duplex: whether copies to and from the device can run at the same time.
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
        """Total time in seconds of all forward and backward passes, without recomputation."""
        return sum(block.forward_s + block.backward_s for block in self.blocks)

    def save(self, path: str | Path) -> Path:
        """Write the profile to a file atomically."""
        return write_regular(path, json.dumps(asdict(self), indent=1) + "\n")


def load_profile(path: str | Path) -> ModelProfile:
    """Read a profile from a JSON or YAML file.

    Raises:
        ValueError: If the file cannot be read, or if it does not contain a profile.
    """
    return load_record(ModelProfile, path, "profile file", "see docs/activations.md")


STREAMS = ("compute", "in", "out")


@dataclass(frozen=True)
class OffloadStep:
    """A step that runs on one stream.

    Attributes:
        name: name of the step. Step names must be unique within a schedule.
        stream: the stream that runs the step: "compute", "in" (copies to the device) or "out"
            (copies from the device).
        seconds: duration of the step in seconds.
        after: names of the steps that must end before this step starts. The steps in `after` must
            be issued before this step.
        takes: number of bytes that the step allocates on the device when it starts.
        frees: number of bytes that the step frees on the device when it ends.
        block: name of the block to which the step belongs. The block name is used only for display.
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
        """Number of bytes that the step copies."""
        return {"in": self.takes, "out": self.frees, "compute": 0}[self.stream]


@dataclass(frozen=True)
class Outcome:
    """The result of simulating a schedule.

    Attributes:
        timeline: timeline of all steps, in the order in which they were issued. The resources of
            the timeline are streams, and its phases are blocks.
        memory: pairs (time in seconds, number of bytes in use on the device), one for each change,
            in chronological order.
        peak: maximum number of bytes in use on the device.
        peak_step: name of the step that raised memory use to its peak.
        stalls: for each compute step that had to wait, the time in seconds for which the compute
            stream was idle before the step.
        moved_in, moved_out: numbers of bytes copied to the device and from the device.
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
        """Time in seconds at which the last step ends."""
        return self.timeline.seconds

    @property
    def stall_s(self) -> float:
        """Total time in seconds for which the compute stream was idle before or between steps."""
        return sum(self.stalls.values())

    @property
    def occupancy(self) -> float:
        """Fraction of the time for which the compute stream is busy, or 1 for an empty schedule."""
        return self.timeline.busy("compute") / self.seconds if self.seconds else 1.0

    @cached_property
    def ended(self) -> dict[str, float]:
        """Time in seconds at which each step ends, by step name."""
        return {span.task.name: span.end for span in self.timeline.spans}

    @cached_property
    def started(self) -> dict[str, float]:
        """Time in seconds at which each step starts, by step name."""
        return {span.task.name: span.start for span in self.timeline.spans}

    def trace(self) -> dict[str, Any]:
        """Return the timeline as a trace for Chrome and Perfetto. The trace includes a counter of
        the bytes in use.
        """
        trace = self.timeline.trace(STREAMS)
        trace["traceEvents"] += [{"name": "memory", "ph": "C", "pid": 0, "ts": 1e6 * at,
                                  "args": {"bytes": size}} for at, size in self.memory]
        return trace


@dataclass(frozen=True)
class OffloadSchedule:
    """The steps of a schedule, in the order in which they are issued.

    Attributes:
        steps: the steps.
        limit: maximum number of bytes that may be in use on the device, or None for no limit.
        base: number of bytes that are always in use on the device.
        duplex: whether copies to and from the device can run at the same time. If `duplex` is
            False, all copies run one after the other in the order in which they were issued, as if
            there were a single copy queue.
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
            ValueError: If a step waits for a step that is not issued earlier, if a step name occurs
                twice, if memory use exceeds the limit, or if more bytes are freed than were
                allocated.
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
    """Yield the changes in memory use in chronological order, as tuples (time in seconds, index of
    the step, change in bytes).

    At equal times, running steps end before new steps start. Steps that start at the same time are
    sorted by the order in which they were issued. A step of zero duration ends before the next step
    starts.
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
    """For each compute step that has to wait, return the time in seconds for which the compute
    stream is idle before the step.
    """
    stalls, end = {}, 0.0
    for span in timeline.spans:
        if span.task.resource == "compute":
            if span.start > end:
                stalls[span.task.name] = span.start - end
            end = span.end
    return stalls
