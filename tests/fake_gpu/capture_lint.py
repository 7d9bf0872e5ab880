"""What a CUDA graph cannot hold, found without a GPU: a capture is faked, and what happens in it is
looked at.

A capture forbids what makes the host wait or ask, and memory of the host that it would read again
in each replay. What hosts compute or tell each other meanwhile is not in the graph: a replay has
what they knew then. A stream takes part when it waits for an event of one that does, and all must
have come back to the first at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tests.fake_gpu.events import EVENTS, project_lines
from tests.fake_gpu.gpu import Cuda, Event, Stream, cuda
from tests.fake_gpu.seen import Block, Executor, HostThread, Launch, Observer

_COPIES = ("aten::copy_", "aten::_to_copy")


class CaptureLint(Executor, Observer):
    """Both an executor and an observer of a fake GPU. wrong: what happened in the last capture and
    must not.
    """

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.launches = 0
        self._origin: Stream | None = None
        # of each stream that takes part, how much of each other it comes after
        self._after: dict[Stream, dict[Stream, int]] = {}
        self._marks: dict[Event, dict[Stream, int]] = {}

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """The current stream is captured inside."""
        gpu = cuda()
        self.wrong, self.launches, self._marks = [], 0, {}
        self._origin, self._after = gpu.current, {gpu.current: {}}
        before = torch.cuda.is_current_stream_capturing
        torch.cuda.is_current_stream_capturing = lambda: self._captured(gpu)
        try:
            with EVENTS.noted() as events:
                yield
            self.wrong += [f"{event.kind}: {event.what} ({event.where})" for event in events
                           if event.kind != "exchange"]
            self._all_joined()
        finally:
            torch.cuda.is_current_stream_capturing = before
            self._origin = None

    def _captured(self, gpu: Cuda) -> bool:
        return self._origin is not None and gpu.current in self._after

    def _note(self, what: str) -> None:
        if self._origin is not None:
            self.wrong.append(f"{what} ({project_lines()})")

    def _all_joined(self) -> None:
        known = self._after[self._origin]
        for stream, after in self._after.items():
            if stream is not self._origin and known.get(stream, 0) < after.get(stream, 0):
                self._note(f"{stream} has work for which the captured stream does not wait")

    # executor

    def reach(self, event: Event) -> None:
        self._note("the host waits for an event")

    def passed(self, event: Event) -> bool:
        self._note("an event is asked")
        return super().passed(event)

    # observer

    def allocated(self, block: Block) -> None:
        if block.kind != "device":
            self._note(f"{block.kind} memory is allocated")

    def launched(self, launch: Launch) -> None:
        if self._origin is None:
            return
        if launch.stream is None:
            self._note(f"the host does {launch.name} on memory of a GPU")
            return
        self.launches += 1
        after = self._after.get(launch.stream)
        if after is None:
            self._note(f"{launch.name} on {launch.stream}, which is not captured")
            return
        after[launch.stream] = after.get(launch.stream, 0) + 1
        kinds = {block.kind for x in launch.reads if (block := cuda().block_of(x)) is not None}
        if launch.name in _COPIES and "pinned" in kinds:
            self._note("a copy from pinned memory, which each replay reads again")

    def recorded(self, event: Event, host: HostThread) -> None:
        if event.stream in self._after:
            self._marks[event] = dict(self._after[event.stream])

    def stream_waits(self, stream: Stream, event: Event, host: HostThread) -> None:
        if self._origin is None:
            return
        if event not in self._marks:
            if stream in self._after:
                self._note(f"{stream} waits for an event from before the capture")
            return
        after = self._after.setdefault(stream, {})
        for other, count in self._marks[event].items():
            after[other] = max(count, after.get(other, 0))
