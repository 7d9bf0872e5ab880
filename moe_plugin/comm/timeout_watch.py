"""Collectives on NCCL that take longer than `comm.timeout_s`, found by a thread and named.

The host does not wait for NCCL, and NCCL's own watchdog knows only the timeout that a group was
made with. Where that is longer, as in groups made by others, each collective of the layer leaves an
event behind; a thread asks whether the oldest has passed. The host waits for nothing.

CUDA forbids such questions while a graph is captured in mode `global`, torch's default: capture
with `torch.cuda.graph(..., capture_error_mode="thread_local")`, as torch's own watchdog thread
does. In another mode watching stops with a warning.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)


class TimeoutWatch:
    """Watches the collectives of one group; names and aborts what takes too long.

    Args:
        group: process group; not kept alive.
        timeout_s: seconds that a collective may take, with the work queued before it.
        who: rank and group, for the message.
        report: what else is known of the peers, for the message; empty: nothing.
        event: makes an event with `record()` and `query()`.
    """

    def __init__(self, group: Any, timeout_s: float, who: str, report: Callable[[], str],
                 event: Callable[[], Any] = torch.cuda.Event) -> None:
        self.timeout_s, self.who, self.report, self._event = timeout_s, who, report, event
        self._group = weakref.ref(group)
        self._pending: deque[tuple[float, str, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, what: str) -> None:
        """A collective, in words, was put on the current stream just now."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a captured event says nothing of this call
        if self._stopped:
            return
        event = self._event()
        event.record()
        self._pending.append((time.monotonic(), what, event))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="timeout-watch", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while self._group() is not None:
            time.sleep(min(1.0, self.timeout_s / 4))
            try:
                late = self._late()
            except RuntimeError as error:
                log.warning("%s: comm.timeout_s is no longer watched, because an event cannot be "
                            "asked (%s); capture graphs with capture_error_mode='thread_local'",
                            self.who, error)
                self._stopped = True
                self._pending.clear()
                return
            if late:
                self._end(late)
                return

    def _late(self) -> list[str]:
        """The oldest collective that has not passed in time, and those behind it; else none."""
        while self._pending and self._pending[0][2].query():
            self._pending.popleft()
        if not self._pending or time.monotonic() - self._pending[0][0] < self.timeout_s:
            return []
        return [what for _, what, _ in list(self._pending)[:4]]

    def _end(self, late: list[str]) -> None:
        behind = f" (behind it: {'; '.join(late[1:])})" if late[1:] else ""
        log.error("%s: %s has not ended within %g s (comm.timeout_s)%s%s; the group's communicator "
                  "is aborted, and its next collective fails", self.who, late[0], self.timeout_s,
                  behind, self.report())
        group = self._group()
        if group is not None:
            dist.distributed_c10d._abort_process_group(group)
