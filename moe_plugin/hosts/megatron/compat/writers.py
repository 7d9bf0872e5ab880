"""Processes that write Megatron's checkpoints end with the rank that started them.

Megatron's writers hand their results over in a queue that has a process of its own, of 280 MB,
which waits for its rank without a limit: it stays where rank and launcher are killed (while
torchrun runs, it ends this process). A save that the rank waits for does not need it. In older
versions (0.16) forks of the rank write the files; they stay where they wait to hand over more than
a pipe holds.
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
_thread = threading.local()  # parent: id of this process while this thread saves


def _after_fork() -> None:
    # a fork has the thread that made it alone, with its values
    parent = getattr(_thread, "parent", None)
    if parent is not None:
        die_with_parent(parent)


os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def writers_end_with_us() -> Iterator[None]:
    """Inside, a save that is waited for starts no process that outlives this one."""
    kept = vars(filesystem_async).get(_QUEUE)
    setattr(filesystem_async, _QUEUE, queue.Queue())
    _thread.parent = os.getpid()
    try:
        yield
    finally:
        _thread.parent = None
        setattr(filesystem_async, _QUEUE, kept)


def saves_whose_writers_end(save: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Around `dist_checkpointing.save`: its writers end with this process, except of a save that is
    not waited for (`--async-save`).
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
    """The errors of this rank's writers: Megatron puts the class of an error in their place."""
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
