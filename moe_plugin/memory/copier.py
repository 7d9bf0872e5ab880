"""Copies between a device and a slower tier, in the background and in order.

On a GPU copies run on a stream of their own; work that is no copy (reading a file), and on a CPU
all work, runs in one thread. The caller goes on at once and waits where it needs the result.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class CopyCounters:
    """What a copier did.

    Attributes:
        copies: jobs done.
        bytes: that they moved.
        busy_s: seconds in which they ran, those of a throttle included; on a GPU those of its
            thread alone.
        throttled_s: seconds that a throttle added.
        waits: waits for a job that was not done.
        stalled_s: seconds in which the caller waited; a GPU's stream waits alone, which is not
            counted.
    """

    copies: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    throttled_s: float = 0.0
    waits: int = 0
    stalled_s: float = 0.0


@dataclass
class OnDevice:
    """What stays on the device of what a copier moves.

    Attributes:
        resident_bytes: the most of the last step; 0: not known.
        keep, recompute, swap: blocks whose activations are treated so; 0 each: of other things.
    """

    resident_bytes: int = 0
    keep: int = 0
    recompute: int = 0
    swap: int = 0


class Ticket:
    """A job of a `Copier`. nbytes: that it moves."""

    def __init__(self, copier: Copier, nbytes: int) -> None:
        self.nbytes = nbytes
        self.copier = copier
        self.future: Future[None] | None = None
        self.event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """Whether the job is complete, or has failed."""
        if self.future is not None:
            if not self.future.done():
                return False
            if self.future.exception() is not None:
                return True
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Let the caller, on a GPU its current stream, wait until the job is complete. `Exception`:
        what the job raised, in every call.
        """
        started = None if self.done else time.perf_counter()
        try:
            if self.future is not None:
                self.future.result()
        finally:
            if started is not None:
                self.copier._count(waits=1, stalled_s=time.perf_counter() - started)
        if self.event is not None:
            torch.cuda.current_stream(self.copier.device).wait_event(self.event)

    def synchronize(self) -> None:
        """`wait`, of the host: before it writes what the job reads, or reads what it writes."""
        self.wait()
        if self.event is not None:
            self.event.synchronize()


class Copier:
    """Runs copies in the background, one after another, in the order in which they were started.

    The thread and the stream are made when the first copy starts; copies of this object (deepcopy,
    pickle, fork) make their own.

    Args:
        device: that copies go to or come from.
        throttle: bytes/s of the slow tier, at most; None: as fast as it is. For tests and
            benchmarks: it shows on any machine what a slow tier costs.
        sleep: how a throttle waits.
    Raises:
        ValueError: the throttle is not above 0.
    """

    def __init__(self, device: torch.device | str, throttle: float | None = None, *,
                 sleep: Callable[[float], object] = time.sleep) -> None:
        if throttle is not None and not throttle > 0:
            raise ValueError(f"a throttle of {throttle} bytes/s: must be > 0, or None for none")
        self.device, self.throttle, self._sleep = torch.device(device), throttle, sleep
        self._make()

    def _make(self) -> None:
        self.counters = CopyCounters()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._latest: Future[None] | None = None
        self._pid = os.getpid()

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Ticket:
        """Start to copy; targets and sources must stay as they are until the ticket is waited for.

        Args:
            copies: (target, source) of one shape each, copied in order; dtypes may differ. On a GPU
                the one in host memory should be pinned.
        """
        copies = list(copies)
        self.settle_device()
        nbytes = sum(target.numel() * target.element_size() for target, _ in copies)

        def copy() -> None:
            with torch.no_grad():
                for target, source in copies:
                    target.copy_(source, non_blocking=True)

        on_gpu = self.device.type == "cuda"
        idle = self._latest is None or self._latest.done()
        if on_gpu and idle and self.throttle is None:
            ticket = Ticket(self, nbytes)
            ticket.event = self._on_stream(copy, self._here())
            self._count(copies=1, bytes=nbytes)
        else:
            ticket = self.start_call(copy, nbytes)
        # memory on the device is not given to others before the copies' stream is done with it
        for x in (x for pair in copies for x in pair if x.device.type == "cuda"):
            x.record_stream(self.side_stream())
        return ticket

    def start_call(self, call: Callable[[], object], nbytes: int) -> Ticket:
        """Start work of the slow tier that is no copy between tensors, e.g. to read a file.

        On a GPU it runs in the thread, with the copies' stream as current stream.

        Args:
            call: what to do.
            nbytes: that it moves.
        """
        self.settle_device()
        ticket = Ticket(self, nbytes)
        reached = self._here() if self.device.type == "cuda" else None

        def run() -> None:
            started = time.perf_counter()
            if reached is None:
                call()
            else:
                ticket.event = self._on_stream(call, reached)
            spent = time.perf_counter() - started
            more = 0.0 if self.throttle is None else max(0.0, nbytes / self.throttle - spent)
            if more:
                self._sleep(more)
            self._count(copies=1, bytes=nbytes, busy_s=spent + more, throttled_s=more)

        ticket.future = self._latest = self._executor().submit(run)
        return ticket

    def close(self) -> None:
        """Finish what has started and give the thread back; a later copy makes a new one."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.shutdown()
        self._thread = self._latest = None

    def _executor(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():  # a fork has no threads of its parent
            self._make()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="copier")
        return self._thread

    def settle_device(self) -> None:
        """A GPU without a number is the caller's current one: the thread's own may be another."""
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _here(self) -> torch.cuda.Event:
        """Where the caller's stream is: it may still read what a copy overwrites."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _on_stream(self, call: Callable[[], object], after: torch.cuda.Event) -> torch.cuda.Event:
        """Run `call` with the copies' stream as current stream, which waits for `after` first."""
        stream = self.side_stream()
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            call()
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def side_stream(self) -> torch.cuda.Stream:
        """That copies run on, made for the first of them."""
        with self._lock:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            return self._stream

    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, value in counts.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)

    def __getstate__(self) -> dict[str, Any]:
        return {"device": self.device, "throttle": self.throttle, "_sleep": self._sleep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make()
