"""A rank that cannot go on says why in the job's store and breaks its connections: the others end
at once by an error with its words, instead of by a timeout without.

While all is well nothing is sent and no rank waits.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.comm.open_files import too_many

log = logging.getLogger(__name__)
_KEY, _GAVE_UP = "moe_plugin/gave_up", "of the job gave up"
_TAG = (1 << 31) - 1  # of a message that is never sent
_ANSWER_S = 3.0  # for the store, which may be in a rank that is gone
_TOGETHER_S = 1.0  # between ranks that end by the same error


@contextmanager
def ends_all_ranks(kind: type[BaseException]) -> Iterator[None]:
    """An error of this kind inside is of this rank alone, and no rank can go on without it."""
    try:
        yield
    except kind as error:
        abort_job(error)
        raise


@contextmanager
def says_why() -> Iterator[None]:
    """For a whole run: an error that ends this rank alone ends the others by its words, too, not by
    a broken connection. Ranks that all end by themselves, as of settings that do not fit, are left
    alone. An error of too many open files becomes a `ValueError` with the limit and the remedy.
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
    """End the waits of all ranks of the job for this one; the groups of this process are of no use
    afterwards. A job of one process is left alone.

    error: why; gets a note with this rank's number. On NCCL ranks that are in a kernel see it where
        their host waits for the next sizes, or by their own timeout.
    """
    if not _several() or _why(error) in getattr(error, "__notes__", ()):
        return
    # as `error.add_note`, which Python 3.10 does not have
    error.__notes__ = [*getattr(error, "__notes__", ()), _why(error)]  # type: ignore[attr-defined]
    _bounded(lambda store: _publish(store, _why(error)))
    _break_connections()
    if dist.get_rank() == 0:  # the store may end with this process
        _bounded(_all_know)


def reason() -> str:
    """What a rank that gave up said, for an error message; empty: none did.

    Where one did, this rank's connections break, too: others may wait for it.
    """
    if not _several():
        return ""
    said = _bounded(_read)
    if not said:
        return ""
    _break_connections()
    return f"; {said}"


def is_of_another_rank(error: BaseException) -> bool:
    """Whether the error says by which error another rank ended, which is the cause."""
    return _GAVE_UP in str(error)


def claim_first_report(text: str) -> bool:
    """Whether no other rank of the job has said the same before; True, too, where no rank can be
    asked. For messages that any rank may have, alone or as all do.
    """
    key = f"moe_plugin/said/{zlib.crc32(text.encode()):08x}"
    count = _bounded(lambda store: store.add(key, 1)) if _several() else None
    return count is None or count == 1


def leave() -> None:
    """Before a rank ends by an error: the first one, whose process may have the job's store, waits
    a moment for the others, which would otherwise write pages about a lost connection.
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
    """Whether all ranks counted themselves in time."""
    until = time.monotonic() + timeout_s
    while store.add(f"{_KEY}/{counter}", 0) < dist.get_world_size():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _break_connections() -> None:
    """Of all groups of this process."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.size() > 1:
            _break(group)


def _break(group: Any) -> None:
    for kind in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(kind))
        except RuntimeError:  # none for this kind of device
            continue
        try:
            if isinstance(backend, dist.ProcessGroupGloo):
                # its `abort` does nothing, but a message that timed out ends the group
                nothing, peer = torch.empty(1), (group.rank() + 1) % group.size()
                backend.recv([nothing], peer, _TAG).wait(timedelta(milliseconds=1))
            else:
                backend.abort()
        except RuntimeError as error:
            log.debug("connections were broken: %s", error)


def _bounded(call: Callable[[Any], Any]) -> Any:
    """`call(store)` of the job's store, on a connection of its own, which other threads do not
    hold; None where it does not answer.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call(dist.distributed_c10d._get_default_store().clone()))
        except (RuntimeError, ValueError) as error:
            log.debug("the job's store does not answer: %s", error)

    thread = threading.Thread(target=run, name="gave-up", daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    return found[0] if found else None
