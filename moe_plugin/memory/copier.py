"""Background copies between a device and a slower tier. The copies are executed in order.

If the device is a GPU, copies run on a separate stream. Other work, such as reading a file, runs in
a single thread. If the device is a CPU, all work runs in this thread. The caller continues
immediately and waits only when it needs the result.
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
    """Counters of a copier.

    Attributes:
        copies: number of finished jobs.
        bytes: number of bytes moved by the jobs.
        busy_s: time in seconds in which jobs ran, including throttling. For a GPU, only the time of
            the thread is counted.
        throttled_s: time in seconds that throttling added.
        waits: number of times that the caller waited for unfinished jobs.
        stalled_s: time in seconds in which the caller waited. Times during which a GPU stream
            waited are not included.
    """

    copies: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    throttled_s: float = 0.0
    waits: int = 0
    stalled_s: float = 0.0


@dataclass
class OnDevice:
    """Device memory used by a feature that moves data. Reports show these numbers.

    Attributes:
        resident_bytes: maximum number of bytes on the device in the last step, or 0 if it is
            unknown.
        keep, recompute, swap: number of blocks with this activation policy. The number is 0 for
            features other than activations.
    """

    resident_bytes: int = 0
    keep: int = 0
    recompute: int = 0
    swap: int = 0


class Ticket:
    """A job that a `Copier` executes. nbytes: number of bytes that the job moves."""

    def __init__(self, copier: Copier, nbytes: int) -> None:
        self.nbytes = nbytes
        self.copier = copier
        self.future: Future[None] | None = None
        self.event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        """Whether the job is complete or has failed."""
        if self.future is not None:
            if not self.future.done():
                return False
            if self.future.exception() is not None:
                return True
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait until the job is complete. If the device is a GPU, only the current stream waits for
        the copies of the job.

        Raises: Exception: If the job failed. Every call raises the error of the job.
        """
        started = None if self.done else time.perf_counter()
        try:
            if self.future is not None:
                self.future.result()
        finally:
            if started is not None:
                self.copier._count(waits=1, stalled_s=time.perf_counter() - started)
        if self.event is not None:
            # read after the future is done, because the thread sets the event
            torch.cuda.current_stream(self.copier.device).wait_event(self.event)

    def synchronize(self) -> None:
        """Make the host wait until the job is complete. This is needed before the host overwrites
        the source of a job or reads the result.
        """
        self.wait()
        if self.event is not None:
            self.event.synchronize()


class Copier:
    """An executor that runs copies in the background, one at a time and in the order in which they
    start.

    The thread and the stream of a copier are created when the first copy starts. If a copier is
    duplicated by deepcopy, pickle or fork, the duplicate creates a separate thread and stream.

    Args:
        device: device to and from which data is copied.
        throttle: maximum bandwidth of the slow tier in bytes/s, for tests and benchmarks that
            simulate a slow tier. Defaults to no limit.
        sleep: function that is called to wait if copies are throttled.
    Raises:
        ValueError: If the throttle is not above 0.
    """

    def __init__(self, device: torch.device | str, throttle: float | None = None, *,
                 sleep: Callable[[float], object] = time.sleep) -> None:
        if throttle is not None and not throttle > 0:
            raise ValueError(f"a throttle of {throttle} bytes/s is not valid: it must be > 0, or "
                             "None for no limit")
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
        """Start copying. The targets and sources must not be changed before waiting for the ticket.

        Args:
            copies: pairs (target, source) of tensors with equal shapes, which are copied in order.
                The dtypes may differ. If the device is a GPU, tensors in host memory should be
                pinned.
        """
        copies = list(copies)
        self.settle_device()
        nbytes = sum(target.numel() * target.element_size() for target, _ in copies)

        def copy() -> None:
            with torch.no_grad():
                for target, source in copies:
                    target.copy_(source, non_blocking=True)

        on_gpu = self.device.type == "cuda"
        # a copy may bypass the thread only if no earlier job is still queued there, because jobs
        # run in the order of their start
        idle = self._latest is None or self._latest.done()
        if on_gpu and idle and self.throttle is None:
            ticket = Ticket(self, nbytes)
            ticket.event = self._on_stream(copy, self._here())
            self._count(copies=1, bytes=nbytes)
        else:
            ticket = self.start_call(copy, nbytes)
        # without this, the allocator could reuse device memory before the copies' stream is done
        # with it
        for x in (x for pair in copies for x in pair if x.device.type == "cuda"):
            x.record_stream(self.side_stream())
        return ticket

    def start_call(self, call: Callable[[], object], nbytes: int) -> Ticket:
        """Start work of the slow tier that is not a copy between tensors, such as reading a file.

        If the device is a GPU, the work runs in the thread. The stream for copies is then the
        current stream of the thread.

        Args:
            call: the work.
            nbytes: number of bytes that the work moves.
        """
        self.settle_device()
        ticket = Ticket(self, nbytes)
        # recorded before the job is queued, so that work which the caller launches later does not
        # delay it
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
        """Finish all started jobs and end the thread. A later copy creates a new thread."""
        # a forked child must not wait for its parent's thread
        if self._thread is not None and self._pid == os.getpid():
            self._thread.shutdown()
        self._thread = self._latest = None

    def _executor(self) -> ThreadPoolExecutor:
        if self._pid != os.getpid():  # a forked process does not have the threads of its parent
            self._make()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="copier")
        return self._thread

    def settle_device(self) -> None:
        """Replace a GPU device without index with the current GPU of the caller, because the thread
        may have a different current GPU.
        """
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _here(self) -> torch.cuda.Event:
        """Record an event in the caller's stream, because this stream may still read data that a
        copy will overwrite.
        """
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _on_stream(self, call: Callable[[], object], after: torch.cuda.Event) -> torch.cuda.Event:
        """Run `call` on the stream for copies after this stream has waited for `after`."""
        stream = self.side_stream()
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            call()
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def side_stream(self) -> torch.cuda.Stream:
        """Return the stream for copies, which is created on first use."""
        with self._lock:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
            return self._stream

    # counts come from the caller and from the thread
    def _count(self, **counts: float) -> None:
        with self._lock:
            for name, value in counts.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)

    def __getstate__(self) -> dict[str, Any]:
        # threads, streams and locks cannot be copied
        return {"device": self.device, "throttle": self.throttle, "_sleep": self._sleep}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make()
