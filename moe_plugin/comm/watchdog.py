"""Threads that watch a group: heartbeats, so that an error can name the missing ranks; and
collectives on NCCL that take longer than `comm.timeout_s`, found and named.

The host does not wait for NCCL, and NCCL's own watchdog knows only the timeout that a group was
made with. Where that is longer, as in groups made by others, each collective of the layer leaves an
event behind; a thread asks whether the oldest has passed. The host waits for nothing.

CUDA forbids such questions while a graph is captured in mode `global`, torch's default: capture
with `torch.cuda.graph(..., capture_error_mode="thread_local")`, as torch's own watchdog thread
does. In another mode watching stops with a warning.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.utils.machine import record_event

log = logging.getLogger(__name__)


def _event_of(device: torch.device) -> torch.cuda.Event | None:
    # a group of both backends (cpu:gloo,cuda:nccl, which torch makes by itself) has collectives on
    # the CPU, too
    return None if device.type == "cpu" else record_event(device, timing=False)


class TimeoutWatch:
    """Watches the collectives of one group; names and aborts what takes too long.

    Args:
        group: process group; not kept alive.
        timeout_s: seconds that a collective may take, with the work queued before it.
        who: rank and group, for the message.
        report: what else is known of the peers, for the message; empty: nothing.
        event: of a device, on its current stream, with `query()`; None where the host waits.
    """

    def __init__(self, group: Any, timeout_s: float, who: str, report: Callable[[], str],
                 event: Callable[[torch.device], Any] = _event_of) -> None:
        self.timeout_s, self.who, self.report, self._event = timeout_s, who, report, event
        self._group = weakref.ref(group)
        self._pending: deque[tuple[float, str, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, what: str, device: torch.device) -> None:
        """A collective, in words, was put on a device's current stream just now."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a captured event says nothing of this call
        if self._stopped:
            return
        event = self._event(device)
        if event is None:
            return
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


class Watchdog:
    """Heartbeats of one rank of a group, sent by a thread.

    Args:
        store: a torch.distributed store (or anything with `set`, `get` and `check`); it should not
            be in a rank that may die, as torchrun's is not.
        rank, size: this rank's index in the group, and the number of ranks.
        name: of the group, in the store's keys.
        interval_s: seconds between two heartbeats.
    Raises: ValueError: interval_s is not positive.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, interval_s: float) -> None:
        if interval_s <= 0:
            raise ValueError(f"watchdog interval={interval_s} must be > 0 seconds; e.g. 1")
        self.store, self.rank, self.size, self.interval_s = store, rank, size, interval_s
        self.prefix = f"moe_plugin/watchdog/{name}/"
        self.started, self.count, self.what = time.time(), 0, "started"
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._repeat, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> None:
        """This rank begins an exchange. The next heartbeat says so; nothing is sent now."""
        self.count += 1
        self.what = f"in {what}"

    def end(self) -> None:
        """The exchange is complete."""
        self.what = "between exchanges"

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()
        self._thread.join(self.interval_s + 5)

    def report(self) -> str:
        """Which ranks sent no heartbeat for three intervals, and which are behind; one sentence."""
        beats = self._read()
        if beats is None:
            return "watchdog: the store does not answer, so who is missing is not known"
        now = time.time()
        silent = {
            r: now - b["time"] for r, b in enumerate(beats)
            if b is not None and now - b["time"] > 3 * self.interval_s and r != self.rank
        }
        never = [r for r, b in enumerate(beats) if b is None]
        behind = {
            r: b for r, b in enumerate(beats)
            if b is not None and r not in silent and r != self.rank and b["count"] < self.count
        }
        parts = [f"rank {r} silent for {age:.1f} s"
                 for r, age in silent.items()] + [f"rank {r} never seen" for r in never]
        parts += [
            f"rank {r} alive but {b['what']} {b['count']}, {self.count - b['count']} behind"
            for r, b in list(behind.items())[:8]
        ]
        return "watchdog: " + ("; ".join(parts)
                               or "all ranks send heartbeats and are at this exchange")

    def _read(self) -> list[dict[str, Any] | None] | None:
        try:
            keys = [f"{self.prefix}{rank}" for rank in range(self.size)]
            return [
                json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys
            ]
        except (RuntimeError, ValueError):
            return None

    def _repeat(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self._beat()
            except RuntimeError as error:
                log.debug("watchdog of rank %d ends: %s", self.rank, error)
                return

    def _beat(self) -> None:
        self.store.set(f"{self.prefix}{self.rank}",
                       json.dumps({"time": time.time(), "count": self.count, "what": self.what}))
