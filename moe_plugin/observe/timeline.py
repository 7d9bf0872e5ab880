"""Record a timeline of one training step with torch's profiler.

The timeline shows layers, exchanges, matmuls and GPU kernels. Ranks that do not record a timeline
wait only until rank 0 has started the profiler.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.config import ObserveConfig
from moe_plugin.observe.sinks import HealthLog, JsonlSink
from moe_plugin.utils.machine import wait_for_device

MARK = "moe-plugin layer "
BACKWARD = "autograd::engine::evaluate_function: "
MATMULS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_grouped_mm"}
EXCHANGES = ("gloo:", "nccl:")
GPU_KINDS = (("GPU exchange", ("nccl",)),
             ("GPU matmuls", ("gemm", "cutlass", "_mm_", "matmul", "grouped")),
             ("GPU other", ("",)))
TRACKS = ("layers", "exchange", "matmuls", *(kind for kind, _ in GPU_KINDS))
SPANS = 2000  # the number of spans of one step that are stored, the longest first
JOINED_US = 50  # consecutive spans of one name with smaller gaps are joined


class _Row(NamedTuple):
    """One span. `begin` and `end` are times in microseconds, measured by the profiler's clock."""

    track: str
    name: str
    begin: float
    end: float


class StepTimeline:
    """Record the timeline of one training step.

    Args:
        config: the `observe` settings. `timeline` is the number of the step to record. `jsonl` is
            the file to which the timeline is appended.
        layers: the layers by name. The timeline shows the forward and backward passes of these
            layers.
        comm: the ranks of the run. Only rank 0 records the timeline. If `comm` is omitted, this
            rank records the timeline.
        rank: the rank that is stored in the record of the timeline.
        health: the log to which findings about the timeline are added. Optional.
    """

    def __init__(self, config: ObserveConfig, layers: Mapping[str, nn.Module],
                 comm: Comm | None = None, rank: int = 0, health: HealthLog | None = None) -> None:
        self.path = config.jsonl if comm is None or comm.rank == 0 else None
        self.step, self.layers, self.rank = config.timeline, dict(layers), rank
        self.health = health

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Return a context manager for a whole training step. The timeline is recorded only in the
        configured step.
        """
        if self.path is None or not self.step or step != self.step:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # hides the profiler's lines on stderr
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        handles = [handle for name, layer in self.layers.items() for handle in _marked(name, layer)]
        try:
            with profile(activities=[ProfilerActivity.CPU, *gpu]) as recorded:
                yield
                for device in {p.device for layer in self.layers.values()
                               for p in layer.parameters()}:
                    wait_for_device(device)
        finally:
            for handle in handles:
                handle.remove()
        row = {"step": step, "time": time.time(), "rank": self.rank,
               "timeline": spans(recorded.events())}
        sink = JsonlSink(self.path)
        sink.write(row)
        sink.close()
        if self.health is not None:
            self.health.add_timeline(row)


def _marked(name: str, layer: nn.Module) -> list[Any]:
    """Register hooks that mark the forward pass of a layer in the profile."""
    open_marks: list[Any] = []

    def enter(*_: Any) -> None:
        open_marks.append(torch.profiler.record_function(MARK + name))
        open_marks[-1].__enter__()

    def leave(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    return [
        layer.register_forward_pre_hook(enter),
        layer.register_forward_hook(leave, always_call=True)
    ]


@dataclass(frozen=True)
class _Pass:
    """The forward pass of a layer. The autograd nodes of the pass have sequence numbers in the
    range [first, after).
    """

    name: str
    begin: float
    end: float
    first: float
    after: float


def spans(events: Sequence[Any]) -> list[list[Any]]:
    """Return the `SPANS` longest spans in a profile as [track, name, begin, end].

    Times are in seconds from the start of the profile. events: the profiler events, as returned by
    `torch.profiler.profile.events()`.
    """
    timed = sorted((e for e in events if e.time_range.end >= e.time_range.start),
                   key=lambda e: e.time_range.start)
    if not timed:
        return []
    zero = timed[0].time_range.start
    passes = _passes(timed)
    rows = [_Row("layers", f"{p.name} forward", p.begin, p.end) for p in passes]
    rows += [row for e in timed if (row := _row(e, passes)) is not None]
    longest = sorted(_joined(rows), key=lambda row: row.begin - row.end)[:SPANS]
    return [[row.track, row.name, round((row.begin - zero) / 1e6, 7),
             round((row.end - zero) / 1e6, 7)]
            for row in sorted(longest, key=lambda row: (TRACKS.index(row.track), row.begin))]


def _passes(timed: Sequence[Any]) -> list[_Pass]:
    # autograd numbers its nodes in the order of the forward pass, so that the nodes of a layer have
    # the numbers that were given out between the layer's begin and end
    made = [(e.time_range.start, e.sequence_nr) for e in timed
            if e.sequence_nr >= 0 and not e.name.startswith(BACKWARD)]
    starts = [start for start, _ in made]

    def following(moment: float) -> float:
        place = bisect.bisect_left(starts, moment)
        return made[place][1] if place < len(made) else float("inf")

    found = []
    for e in timed:
        if e.name.startswith(MARK) and _on_host(e):
            begin, end = e.time_range.start, e.time_range.end
            found.append(_Pass(e.name.removeprefix(MARK), begin, end, following(begin),
                               following(end)))
    return found


def _on_host(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


def _row(event: Any, passes: Sequence[_Pass]) -> _Row | None:
    """Convert a profiler event to a span, or return None if the timeline does not show this type of
    event.
    """
    name, begin, end = event.name, event.time_range.start, event.time_range.end
    if not _on_host(event):
        if name.startswith((MARK, *EXCHANGES)):
            return None  # the profiler repeats the marks of the host on the device's row
        track = next(t for t, words in GPU_KINDS if any(word in name.lower() for word in words))
        return _Row(track, name[:80], begin, end)
    if name.startswith(BACKWARD) and event.sequence_nr >= 0:
        owner = next((p for p in passes if p.first <= event.sequence_nr < p.after), None)
        return None if owner is None else _Row("layers", f"{owner.name} backward", begin, end)
    if name.startswith(EXCHANGES):
        return _Row("exchange", name.split(":", 1)[1], begin, end)
    return _Row("matmuls", name.removeprefix("aten::"), begin, end) if name in MATMULS else None


def _joined(rows: Sequence[_Row]) -> list[_Row]:
    """Merge consecutive spans that have the same track and the same name."""
    done: list[_Row] = []
    latest: dict[tuple[str, str], _Row] = {}
    for row in sorted(rows, key=lambda r: r.begin):
        key = (row.track, row.name)
        last = latest.get(key)
        if last is not None and row.begin - last.end <= JOINED_US:
            row = last._replace(end=max(last.end, row.end))
        elif last is not None:
            done.append(last)
        latest[key] = row
    return [*done, *latest.values()]
