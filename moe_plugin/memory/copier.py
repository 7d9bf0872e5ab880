"""Background copies between a device and a slower memory tier. Copies run one after another, in the
order they were started.

If the device is a GPU, copies run on a separate CUDA stream. Other work, such as reading a file,
runs in a background thread. If the device is a CPU, all work runs in this background thread. The
caller continues immediately and waits only when it needs the data.
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
    """Counters for the jobs of a copier.

    Attributes:
        copies: number of finished jobs.
        bytes: number of bytes moved by the jobs.
        busy_s: total time in seconds during which jobs ran, including throttling. For a GPU, only
            the time in the background thread is counted.
        throttled_s: total delay of jobs by throttling, in seconds.
        waits: number of times that a caller waited for an unfinished job.
        stalled_s: total time in seconds during which callers waited. The time during which a CUDA
            stream waited is not included.
    """

    copies: int = 0
    bytes: int = 0
    busy_s: float = 0.0
    throttled_s: float = 0.0
    waits: int = 0
    stalled_s: float = 0.0


@dataclass
class OnDevice:
    """Device memory used by a feature that moves data between the device and a tier.

    Attributes:
        resident_bytes: maximum number of bytes on the device during the last step, or 0 if unknown.
        keep, recompute, swap: number of blocks that have this activation policy. Zero for features
            other than activation policies.
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
        """True if the job has completed or failed."""
        if self.future is not None:
            if not self.future.done():
                return False
            if self.future.exception() is not None:
                return True
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Wait until the job is complete. If the device is a GPU, only the current stream waits for
        the copies, and the host does not wait.

        Raises:
            Exception: If the job failed. Every call of this method raises the job's error.
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
        """Block the host until the job is complete. Call this method before the host overwrites the
        source of a job or reads the copied data.
        """
        self.wait()
        if self.event is not None:
            self.event.synchronize()


class Copier:
    """An executor that runs copies in the background. Copies run one at a time, in order.

    The thread and the stream of a copier are created when its first copy starts. If a copier is
    duplicated by deepcopy, pickle or fork, the duplicate creates its own thread and stream.

    Args:
        device: source or target device of the copies.
        throttle: maximum bandwidth of the slow tier in bytes per second. Intended for tests and
            benchmarks that simulate a slow tier. By default, the bandwidth is not limited.
        sleep: function that is called to delay throttled copies.
    Raises:
        ValueError: If the throttle is not positive.
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
        """Start copying. The targets and sources must not change before the caller has waited for
        the returned ticket.

        Args:
            copies: pairs (target, source) of tensors with equal shapes. The pairs are copied in
                order. The two tensors of a pair may have different dtypes. If the device is a GPU,
                tensors in host memory should be in pinned memory.
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
        """Start work on the slow tier that is not a copy between tensors, such as reading a file.

        If the device is a GPU, the work runs in the background thread. During the work, the
        copier's stream is the current stream of the thread.

        Args:
            call: the work.
            nbytes: number of bytes that the work transfers.
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
        """Finish all jobs that have been started, and stop the thread. If another copy is started
        later, a new thread is created.
        """
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
        """If a GPU device has no index, replace it with the caller's current GPU. The background
        thread may have a different current GPU.
        """
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _here(self) -> torch.cuda.Event:
        """Record an event on the caller's stream, which may still read data to be overwritten."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _on_stream(self, call: Callable[[], object], after: torch.cuda.Event) -> torch.cuda.Event:
        """Make the copier's stream wait for `after`, and then run `call` on this stream."""
        stream = self.side_stream()
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            call()
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def side_stream(self) -> torch.cuda.Stream:
        """Return the copier's stream, which is created on first use."""
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
