"""Make the processes that write Megatron's checkpoints exit when the rank that started them exits.

Megatron's writers pass their results through a queue, which is served by a separate process. The
queue process uses 280 MB of memory, and waits for its rank without a timeout. If both the rank and
the launcher are killed, the queue process keeps running. (torchrun terminates the process if
torchrun itself is still running.) A synchronous save does not need the queue process. In older
versions (0.16), forked copies of the rank write the files. Forked writers keep running if they wait
to send more data than fits into the buffer of a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.api import CheckpointException

from moe_plugin.utils.machine import die_with_parent

_QUEUE = "_results_queue"
_thread = threading.local()  # attribute `parent`: id of this process while this thread saves


def _after_fork() -> None:
    # in a fork only the forking thread exists, with its thread-local values
    parent = getattr(_thread, "parent", None)
    if parent is not None:
        die_with_parent(parent)


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def writers_end_with_us() -> Iterator[None]:
    """Inside the block, make the processes of a synchronous save exit with the current process."""
    kept = vars(filesystem_async).get(_QUEUE)
    setattr(filesystem_async, _QUEUE, queue.Queue())
    _thread.parent = os.getpid()
    try:
        yield
    finally:
        _thread.parent = None
        setattr(filesystem_async, _QUEUE, kept)


def saves_whose_writers_end(save: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call `dist_checkpointing.save` so that its writer processes exit when the current process
    exits.

    Asynchronous saves (`--async-save`) are passed through unchanged.
    """
    if given.get("async_sharded_save"):
        return save(**given)
    with writers_end_with_us(), _causes() as failed:
        try:
            return save(**given)
        except CheckpointException as error:
            if failed:
                raise failed[0] from error
            raise


@contextlib.contextmanager
def _causes() -> Iterator[list[Exception]]:
    """Yield a list to which the errors of the current rank's writers are appended.

    Megatron itself reports only the class of each error.
    """
    writer, failed = filesystem_async.FileSystemWriterAsync, list[Exception]()
    write = writer.write_preloaded_data

    @functools.wraps(write)
    def noted(*args: Any, **kwargs: Any) -> Any:
        output = write(*args, **kwargs)
        if output is not None and isinstance(output[1], Exception):
            failed.append(output[1])
        return output

    writer.write_preloaded_data = staticmethod(noted)
    try:
        yield failed
    finally:
        writer.write_preloaded_data = staticmethod(write)
