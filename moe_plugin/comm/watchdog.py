"""Threads that watch a group of ranks, and functions that stop a job after a fatal error.

`Watchdog` sends heartbeats, so that error messages can name missing ranks. `TimeoutWatch` detects
NCCL collectives that take longer than `comm.timeout_s` and logs their names.

The host does not wait for NCCL collectives, and NCCL's own watchdog uses only the timeout that was
set when the group was created. A group that was created by other code may have a timeout longer
than `comm.timeout_s`. For groups with a longer timeout, each collective of the layer records an
event, and a thread checks whether the oldest event has completed. The host does not wait for these
events.

CUDA forbids the thread's checks while a graph is captured in `global` mode, which is torch's
default. Therefore capture graphs with `torch.cuda.graph(..., capture_error_mode="thread_local")`.
Torch's own watchdog thread requires the same mode. In any other mode, the thread logs a warning and
stops.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.new_group import too_many
from moe_plugin.utils.machine import record_event

# A rank that cannot continue writes the reason to the job's store and breaks its connections. The
# other ranks then fail immediately with this reason, instead of with a timeout later. Without an
# error, nothing is sent and no rank waits.
log = logging.getLogger(__name__)
_KEY, _GAVE_UP = "moe_plugin/gave_up", "of the job gave up"
_TAG = (1 << 31) - 1  # tag of a message that is never sent
_ANSWER_S = 3.0  # wait for the store, which may be in a rank that has ended
_TOGETHER_S = 1.0  # wait for ranks that end with the same error


@contextmanager
def ends_all_ranks(kind: type[BaseException]) -> Iterator[None]:
    """If an error of type `kind` is raised inside the block, stop all ranks of the job.

    Use this context manager for errors on one rank that prevent the other ranks from continuing.
    """
    try:
        yield
    except kind as error:
        abort_job(error)
        raise


@contextmanager
def says_why() -> Iterator[None]:
    """If an error occurs on this rank only, stop all ranks and report this rank's error message on
    each of them. Wrap a whole run in this context manager.

    Without it, the other ranks would fail with a broken connection. If all ranks fail
    independently, for example because of invalid settings, each rank raises its own error. If the
    limit on open files was reached, a `ValueError` states the limit and the remedy.
    """
    try:
        yield
    except Exception as error:
        refused = ValueError(text) if (text := too_many(error)) else error
        if _several() and not _bounded(_all_end):
            abort_job(refused)
        if refused is not error:
            raise refused from error
        raise


def abort_job(error: BaseException) -> None:
    """Stop all other ranks from waiting for this rank. The groups of this rank can no longer be
    used.

    A job with a single process is not affected. On NCCL, a rank that waits in a kernel notices the
    abort when its host next waits for row counts, or when its own timeout expires.

    Args:
        error: the error that stops the job. The rank number is added to the error as a note.
    """
    if not _several() or _why(error) in getattr(error, "__notes__", ()):
        return
    # equivalent to `error.add_note`, which Python 3.10 does not have
    error.__notes__ = [*getattr(error, "__notes__", ()), _why(error)]  # type: ignore[attr-defined]
    _bounded(lambda store: _publish(store, _why(error)))
    _break_connections()
    if dist.get_rank() == 0:  # the store may be in this process and end with it
        _bounded(_all_know)


def reason() -> str:
    """Return the reason why another rank stopped the job, or an empty string if no rank stopped it.

    If another rank stopped the job, this function also breaks this rank's connections, because
    other ranks may be waiting for this rank.
    """
    if not _several():
        return ""
    text = _bounded(_read)
    if not text:
        return ""
    _break_connections()
    return f"; {text}"


def is_of_another_rank(error: BaseException) -> bool:
    """Return whether the error message says that the cause is an error on another rank."""
    return _GAVE_UP in str(error)


def claim_first_report(text: str) -> bool:
    """Return whether this rank is the first rank of the job to report `text`.

    If the job's store cannot be reached, the function also returns True. Use this function for
    messages that may occur on a single rank or on all ranks.
    """
    key = f"moe_plugin/said/{zlib.crc32(text.encode()):08x}"
    count = _bounded(lambda store: store.add(key, 1)) if _several() else None
    return count is None or count == 1


def leave() -> None:
    """Before this rank exits with an error, wait briefly until the other ranks exit.

    Only the first rank waits. The process of the first rank may host the job's store. If the first
    rank exited immediately, the other ranks would log long errors about a lost connection.
    """
    if _several():
        _bounded(_all_leave if dist.get_rank() == 0 else lambda store: _count(store, "left"))


def _why(error: BaseException) -> str:
    return f"rank {dist.get_rank()} {_GAVE_UP}: {type(error).__name__}: {error}"


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _publish(store: Any, text: str) -> None:
    if not store.check([_KEY]):
        store.set(_KEY, text)
    store.add(f"{_KEY}/known", 1)


def _read(store: Any) -> str:
    if not store.check([_KEY]):
        return ""
    store.add(f"{_KEY}/known", 1)
    return store.get(_KEY).decode()


def _all_know(store: Any) -> None:
    _come(store, "known", _ANSWER_S)


def _all_leave(store: Any) -> bool:
    _count(store, "left")
    return _come(store, "left", _TOGETHER_S)


def _count(store: Any, counter: str) -> None:
    store.add(f"{_KEY}/{counter}", 1)


def _all_end(store: Any) -> bool:
    _count(store, "ends")
    return _come(store, "ends", _TOGETHER_S)


def _come(store: Any, counter: str, timeout_s: float) -> bool:
    until = time.monotonic() + timeout_s
    while store.add(f"{_KEY}/{counter}", 0) < dist.get_world_size():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _break_connections() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() > 1:
            _break(group)


def _break(group: Any) -> None:
    for kind in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(kind))
        except RuntimeError:  # the group has no backend for this device type
            continue
        try:
            if isinstance(backend, dist.ProcessGroupGloo):
                # gloo's `abort` does nothing, but a message that times out ends the group
                gloo: Any = backend  # torch's stubs lack `recv`
                nothing, peer = torch.empty(1), (group.rank() + 1) % group.size()
                gloo.recv([nothing], peer, _TAG).wait(timedelta(milliseconds=1))
            else:
                backend.abort()
        except RuntimeError as error:
            log.debug("connections were broken: %s", error)


def _bounded(call: Callable[[Any], Any]) -> Any:
    """Return `call(store)` for the job's store, or None if the store does not respond in time.

    The call uses a separate connection, so that other threads cannot block it.
    """
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(call(getattr(dist.distributed_c10d._get_default_store(), "clone")()))
        except (RuntimeError, ValueError) as error:
            log.debug("the job's store does not answer: %s", error)

    thread = threading.Thread(target=run, name="gave-up", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return answers[0] if answers else None



def _event_of(device: torch.device) -> torch.cuda.Event | None:
    # A group with both backends (cpu:gloo,cuda:nccl, torch's default) also runs collectives on the
    # CPU.
    return None if device.type == "cpu" else record_event(device, timing=False)


class TimeoutWatch:
    """A thread that aborts a group if one of its collectives takes too long.

    Args:
        group: process group to watch. This object holds only a weak reference to the group.
        timeout_s: maximum duration of a collective in seconds, including work queued before it.
        who: description of the rank and the group, for use in messages.
        report: function that returns information about the peers for messages, or an empty string.
        event: function that records an event on a device's current stream. The event has a
            `query()` method. Returns None if the host itself waits for collectives on the device.
    """

    def __init__(self, group: Any, timeout_s: float, who: str, report: Callable[[], str],
                 event: Callable[[torch.device], Any] = _event_of) -> None:
        self.timeout_s, self.who, self.report, self._event = timeout_s, who, report, event
        self._group = weakref.ref(group)
        self._pending: deque[tuple[float, str, Any]] = deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def add(self, what: str, device: torch.device) -> None:
        """Watch a collective, described by `what`, on the current stream of `device`."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a captured event does not track this call
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
                            "queried (%s); capture graphs with capture_error_mode='thread_local'",
                            self.who, error)
                self._stopped = True
                self._pending.clear()
                return
            if late:
                self._end(late)
                return

    def _late(self) -> list[str]:
        """If the oldest collective is late, list it and the collectives queued after it."""
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
    """A thread that sends heartbeats for one rank of a group.

    Args:
        store: a torch.distributed store, or any other object with the methods `set`, `get` and
            `check`. The store should not be hosted by a rank that may fail. torchrun's store is not
            hosted by a rank.
        rank: this rank's index in the group.
        size: number of ranks in the group.
        name: name of the group, for use in the store's keys.
        interval_s: interval between heartbeats, in seconds.
    Raises:
        ValueError: If `interval_s` is not positive.
    """

    def __init__(self, store: Any, rank: int, size: int, name: str, interval_s: float) -> None:
        if interval_s <= 0:
            raise ValueError(f"watchdog interval={interval_s} must be > 0 seconds; use e.g. 1")
        self.store, self.rank, self.size, self.interval_s = store, rank, size, interval_s
        self.prefix = f"moe_plugin/watchdog/{name}/"
        self.started, self.count, self.what = time.time(), 0, "started"
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._repeat, name="watchdog", daemon=True)
        self._thread.start()

    def begin(self, what: str) -> None:
        """Record that this rank has started an exchange."""
        self.count += 1
        self.what = f"in {what}"

    def end(self) -> None:
        """Record that the exchange has completed."""
        self.what = "between exchanges"

    def close(self) -> None:
        """Stop the heartbeats."""
        self._stop.set()
        self._thread.join(self.interval_s + 5)

    def report(self) -> str:
        """Describe in one sentence which ranks have not sent a heartbeat for three intervals, and
        which ranks have completed fewer exchanges.
        """
        beats = self._read()
        if beats is None:
            return "watchdog: the store does not answer, so the missing ranks are not known"
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
