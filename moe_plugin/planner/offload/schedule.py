"""Schedules of compute and copies between a device and a slow tier, with a ledger of memory.

A device has three streams: it computes, copies in and copies out at the same time; each stream runs
one step at a time, in issue order. The ledger counts bytes and delays nothing: a step that needs
room waits for the step that frees it by naming it in `after`.
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

# What a model's blocks take, as measured: the input of the plans for memory, a file of JSON.
MAX_SECONDS, MAX_BYTES, MAX_BLOCKS = 1e6, 10**16, 10_000  # beyond any block or model


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block of a model, for one micro-batch.

    Attributes:
        name: unique in its model.
        forward_s, backward_s: seconds; backward without computing forward again.
        activation_bytes: what forward keeps for backward, the block's input included.
        kept_bytes: of these, what stays when forward is computed again: the block's input. It is
            also what travels from the block before, where a model is cut.
        parameter_bytes: of the block's weights.
        gradient_bytes: of their gradients.
        workspace_bytes: needed only while forward or backward run, beyond what they keep.
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
                                 f"0 to {most:g}; measure it again")
        if self.kept_bytes > self.activation_bytes:
            raise ValueError(f"block {short(self.name)}: kept_bytes={self.kept_bytes} must be at "
                             f"most activation_bytes={self.activation_bytes}, which counts the "
                             "input, too")


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model's blocks in the order of forward, and the machine that they were measured on.

    Attributes:
        name: for people.
        blocks: one or more.
        base_bytes: on the device all the time: weights that stay, optimizer state, buffers.
        in_bytes_s, out_bytes_s: bandwidth of copies to the device and from it; 0: no copies.
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
            raise ValueError(f"profile {short(self.name)} has {len(self.blocks)} blocks; give from "
                             f"1 to {MAX_BLOCKS}")
        names = [block.name for block in self.blocks]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"profile {short(self.name)}: block {short(twice)} occurs twice; give "
                             "each block a name of its own")
        for key, most in (("base_bytes", MAX_BYTES), ("in_bytes_s", 1e15), ("out_bytes_s", 1e15)):
            if not 0 <= getattr(self, key) <= most:
                raise ValueError(f"profile {short(self.name)}: {key}={short(getattr(self, key))} "
                                 f"must be from 0 to {most:g}; measure it again")

    @property
    def compute_s(self) -> float:
        """Seconds of all forwards and backwards, nothing computed twice."""
        return sum(block.forward_s + block.backward_s for block in self.blocks)

    def save(self, path: str | Path) -> Path:
        """Write a file, whole or not at all."""
        return write_regular(path, json.dumps(asdict(self), indent=1) + "\n")


def load_profile(path: str | Path) -> ModelProfile:
    """Read a file of a profile, JSON or YAML; `ValueError` where it does not hold one."""
    return load_record(ModelProfile, path, "profile file", "see docs/activations.md")


STREAMS = ("compute", "in", "out")


@dataclass(frozen=True)
class OffloadStep:
    """One step of a stream.

    Attributes:
        name: unique in a schedule.
        stream: "compute", "in" (copies to the device) or "out" (copies from it).
        seconds: how long it runs.
        after: names of steps, issued before it, that must have ended.
        takes: bytes that it allocates on the device when it starts.
        frees: bytes that it releases when it ends.
        block: what it belongs to, for people.
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
            raise ValueError(f"step {short(self.name)}: stream {short(self.stream)} must be one of "
                             f"{', '.join(STREAMS)}")
        if not (self.seconds >= 0 and math.isfinite(self.seconds)):
            raise ValueError(f"step {short(self.name)}: seconds={self.seconds} must be a finite "
                             "number >= 0; leave out copies that never end")
        if min(self.takes, self.frees) < 0:
            raise ValueError(f"step {short(self.name)}: takes={self.takes} and "
                             f"frees={self.frees} must be bytes >= 0")

    @property
    def moved(self) -> int:
        """Bytes that it copies."""
        return {"in": self.takes, "out": self.frees, "compute": 0}[self.stream]


@dataclass(frozen=True)
class Outcome:
    """What a schedule does.

    Attributes:
        timeline: spans in issue order; resources are the streams, phases the blocks.
        memory: (seconds, bytes on the device) after each change, in the order of time.
        peak: the most bytes on the device at a time.
        peak_step: the step that reached it.
        stalls: by compute step, the seconds for which the compute stream waited before it.
        moved_in, moved_out: bytes copied to the device, and from it.
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
        """End of the last step."""
        return self.timeline.seconds

    @property
    def stall_s(self) -> float:
        """Seconds for which the compute stream waited between or before its steps."""
        return sum(self.stalls.values())

    @property
    def occupancy(self) -> float:
        """Share of the time in which the compute stream is busy; 1 of an empty schedule."""
        return self.timeline.busy("compute") / self.seconds if self.seconds else 1.0

    @cached_property
    def ended(self) -> dict[str, float]:
        """By step, when it ended."""
        return {span.task.name: span.end for span in self.timeline.spans}

    @cached_property
    def started(self) -> dict[str, float]:
        """By step, when it started."""
        return {span.task.name: span.start for span in self.timeline.spans}

    def trace(self) -> dict[str, Any]:
        """The timeline in the trace format of Chrome and Perfetto, with a counter of bytes."""
        made = self.timeline.trace(STREAMS)
        made["traceEvents"] += [{"name": "memory", "ph": "C", "pid": 0, "ts": 1e6 * at,
                                 "args": {"bytes": size}} for at, size in self.memory]
        return made


@dataclass(frozen=True)
class OffloadSchedule:
    """Steps in issue order.

    Attributes:
        limit: the most bytes that may be on the device at a time; None: any number.
        base: bytes that stay on it all the time.
        duplex: copies in and out run at the same time; False: one after another, in issue
            order, as those of a single queue do.
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
        """Simulate it.

        Raises: ValueError: a step waits for one that is not issued before it, or occurs twice; the
            bytes on the device exceed the limit, with the step; more is freed than was taken.
        """
        timeline = simulate(self._tasks)
        memory: list[tuple[float, int]] = [(0.0, self.base)]
        size, peak, peak_step = self.base, self.base, ""
        self._check("what is resident all the time", peak)
        for at, index, change in _changes(self.steps, timeline.spans):
            size += change
            if size < self.base:
                raise ValueError(f"step {short(self.steps[index].name)} frees {-change} bytes, "
                                 f"{self.base - size} more than steps took; free what was taken")
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
            raise ValueError(f"{what} brings the device to {size} bytes, above the limit of "
                             f"{self.limit}; raise the limit or keep less on the device")


def _changes(steps: tuple[OffloadStep, ...],
             spans: tuple[Span, ...]) -> Iterator[tuple[float, int, int]]:
    """(seconds, step, bytes) of what steps take and free, in the order of time.

    At the same time, steps that have been running end before others start; what starts then does so
    in issue order, and a step of no length ends before the next one starts.
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
    """By compute step, seconds between the end of the one before and its start; without zeros."""
    stalls, end = {}, 0.0
    for span in timeline.spans:
        if span.task.resource == "compute":
            if span.start > end:
                stalls[span.task.name] = span.start - end
            end = span.end
    return stalls
