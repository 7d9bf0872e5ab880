"""Report errors of the worker processes that load batches for a torch `DataLoader`.

Worker processes send their batches through /dev/shm, which is small in many containers. If a batch
does not fit, torch prints a traceback, discards the batch, and then waits for it forever.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import dataloader
from torch.utils.data._utils import worker

from moe_plugin.utils.messages import short

SHARED_MEMORY = "/dev/shm"
_work = worker._worker_loop


def report_lost_batches() -> None:
    """From now on, make every `DataLoader` raise a `ValueError` with a remedy if its worker
    processes cannot be started or cannot send a batch.
    """
    loaders: Any = dataloader._MultiProcessingDataLoaderIter
    if worker._worker_loop is _work:
        worker._worker_loop = _work_and_report  # type: ignore[assignment]  # passes all arguments
        loaders.__init__ = _starting(loaders.__init__)
        loaders._try_get_data = _receiving(loaders._try_get_data)


class _LostBatch(ExceptionWrapper):
    """The reason why a batch could not be sent, which is sent in place of the batch."""

    def __init__(self, error: Exception) -> None:
        self.text = _message("could not pass on a batch", error)

    def reraise(self) -> None:
        """Raise the error in the training process. Called by torch's `DataLoader`."""
        raise ValueError(self.text)


def _work_and_report(*args: Any) -> None:
    """Replaces torch's `_worker_loop`. The fourth argument is the queue through which batches are
    sent.

    A thread of the queue pickles each batch. If pickling or sending fails, the thread calls
    `_on_queue_feeder_error`, which this function replaces.
    """
    batches = args[3]
    batches._on_queue_feeder_error = lambda error, item: batches.put((item[0], _LostBatch(error)))
    _work(*args)


def _starting(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: Any, loader: Any) -> None:
        try:
            original(self, loader)
        except OSError as error:
            # torch would end processes that were not started
            vars(self).update(_shutdown=True)
            raise ValueError(_message("could not be started", error)) from error

    return start


def _receiving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def receive(self: Any, *timeout: float) -> Any:
        try:
            return original(self, *timeout)
        except (RuntimeError, OSError) as error:
            raise ValueError(_message("ended, or its batch was lost", error)) from error

    return receive


def _message(what: str, error: Exception) -> str:
    room = ""
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage(SHARED_MEMORY)
        room = f", in which {usage.free >> 10:,} of {usage.total >> 10:,} KiB are free"
    return (f"a process that reads data {what} ({short(error)}). Batches are passed on through "
            f"{SHARED_MEMORY}{room}. Use --num-workers 0, or enlarge {SHARED_MEMORY} (in a "
            "container: docker run --shm-size 1g)")
