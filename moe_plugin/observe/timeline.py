"""What ran when in one training step, by torch's profiler: layers, exchanges, matrix products, and
a GPU's kernels.

    timeline = Timeline(config.observe, {"layer3": layer}, comm)
    for step in ...:
        with timeline.around(step):     # does nothing unless this is the step of
        `observe.timeline`, and rank 0 of `comm`
            train(step)

The other ranks run undisturbed; they wait for rank 0 no longer than it takes to start the profiler.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.config import ObserveConfig
from moe_plugin.observe.sinks import JsonlSink

MARK = "moe-plugin layer "
BACKWARD = "autograd::engine::evaluate_function: "
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::_grouped_mm"}
EXCHANGES = ("gloo:", "nccl:")
GPU_KINDS = (("GPU exchange", ("nccl",)), ("GPU products", ("gemm", "cutlass", "_mm_", "matmul",
                                                            "grouped")), ("GPU other", ("",)))
SPANS = 2000  # kept of one step, the longest
JOINED_S = 5e-5  # spans of one name closer than this become one

_Row = tuple[str, str, float, float]  # track, name, begin, end; seconds


class Timeline:
    """Records one step.

    Args:
        config: `timeline`, the step; `jsonl`, the file that one record is appended to. layers: by
            name; their forward and backward passes are shown. comm: whose rank 0 records; None:
            this rank does. rank: written into the record.
    """

    def __init__(self, config: ObserveConfig, layers: Mapping[str, nn.Module],
                 comm: Comm | None = None, rank: int = 0) -> None:
        self.path = config.jsonl if comm is None or comm.rank == 0 else None
        self.step, self.layers, self.rank = config.timeline, dict(layers), rank

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Around everything of a training step; records the one asked for."""
        if self.path is None or not self.step or step != self.step:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        handles = [handle for name, layer in self.layers.items() for handle in _marked(name, layer)]
        try:
            with profile(activities=[ProfilerActivity.CPU, *gpu]) as recorded:
                yield
                if gpu:
                    torch.cuda.synchronize()
        finally:
            for handle in handles:
                handle.remove()
        sink = JsonlSink(self.path)
        sink.write({
            "step": step, "time": time.time(), "rank": self.rank,
            "timeline": spans(recorded.events())
        })
        sink.close()


def _marked(name: str, layer: nn.Module) -> list[Any]:
    """Hooks that mark a layer's forward pass in the profile."""
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
    """A layer's forward pass: when, and the numbers of the autograd nodes that it made, [first,
    after).
    """

    name: str
    begin: float
    end: float
    first: int
    after: float


def spans(events: Sequence[Any]) -> list[list[Any]]:
    """[track, name, begin, end] of what a profile's events tell, seconds since its first event; at
    most `SPANS`, by begin.

    events: with `name`, `time_range.start/end` (microseconds), `sequence_nr` and `device_type`, as
    `torch.profiler.profile.events()` has them.
    """
    timed = sorted((e for e in events if e.time_range.end >= e.time_range.start),
                   key=lambda e: e.time_range.start)
    if not timed:
        return []
    zero = timed[0].time_range.start
    passes = _passes(timed)
    rows = [("layers", f"{p.name} forward", p.begin, p.end) for p in passes]
    rows += [(track, name, e.time_range.start, e.time_range.end) for e in timed
             if (named := _named(e, passes)) for track, name in [named]]
    joined = sorted(
        _joined([(track, name, (a - zero) / 1e6, (b - zero) / 1e6) for track, name, a, b in rows]),
        key=lambda row: row[2] - row[3])[:SPANS]
    return [[track, name, round(a, 7), round(b, 7)]
            for track, name, a, b in sorted(joined, key=lambda row: (_order(row[0]), row[2]))]


def _passes(timed: Sequence[Any]) -> list[_Pass]:
    # autograd numbers its nodes as the forward pass makes them: those made between begin and end of
    # a layer are the layer's
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
            found.append(
                _Pass(e.name.removeprefix(MARK), begin, end, following(begin), following(end)))
    return found


def _on_host(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CPU


def _named(event: Any, passes: Sequence[_Pass]) -> tuple[str, str] | None:
    """(track, name) of an event that is shown."""
    name = event.name
    if not _on_host(event):
        if name.startswith((MARK, *EXCHANGES)):
            return None  # the profiler's copies of marks on the device's row
        return next((track, name[:80]) for track, words in GPU_KINDS
                    if any(word in name.lower() for word in words))
    if name.startswith(BACKWARD) and event.sequence_nr >= 0:
        owner = next((p for p in passes if p.first <= event.sequence_nr < p.after), None)
        return None if owner is None else ("layers", f"{owner.name} backward")
    if name.startswith(EXCHANGES):
        return "exchange", name.split(":", 1)[1]
    return ("products", name.removeprefix("aten::")) if name in PRODUCTS else None


def _joined(rows: Sequence[_Row]) -> list[_Row]:
    """Spans of one track and name that follow each other at once, as one."""
    done: list[_Row] = []
    open_rows: dict[tuple[str, str], _Row] = {}
    for row in sorted(rows, key=lambda r: r[2]):
        track, name, begin, end = row
        last = open_rows.get((track, name))
        if last is not None and begin - last[3] <= JOINED_S:
            open_rows[track, name] = (track, name, last[2], max(last[3], end))
            continue
        if last is not None:
            done.append(last)
        open_rows[track, name] = row
    return [*done, *open_rows.values()]


def _order(track: str) -> int:
    return ("layers", "exchange", "products", *(kind for kind, _ in GPU_KINDS)).index(track)
