"""Files that are made by a few threads at a time; the first failure ends all.

One thread reads, sums and writes about as fast as one core copies memory; two keep a fast disk
busy. More would wait for memory or the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, Semaphore

import numpy as np
import torch
from torch import Tensor

from moe_plugin.utils.regular_files import read_at

# Tensors in files that are read, not mapped: a file that somebody cuts short meanwhile is an
# error, where a map of it would end the process (SIGBUS).
SPAN = 1 << 20  # bytes that are read at once where they are not all wanted
GAP = 1 << 16  # bytes that take longer to read than another call for those behind them


def read_strided(file: int, start: int, shape: Sequence[int], stride: Sequence[int],
                 dtype: torch.dtype) -> Tensor:
    """A tensor of a file, with the file's order of axes, in memory of its own.

    Args:
        file: an open file's descriptor.
        start: byte of the first element.
        shape, stride: of the tensor, in elements; strides are not negative.
    Raises:
        EOFError: the file ends before the tensor does.
        OSError: it cannot be read.
    """
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    axis = max(range(len(shape)), key=lambda at: (shape[at] > 1, stride[at]), default=0)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    wanted, item = torch.Size(shape).numel(), dtype.itemsize
    step = stride[axis] if shape else 0
    inner = reach - (shape[axis] - 1) * step if shape else reach  # of one index of the axis
    apart = (step - inner) * item > GAP
    if reach <= wanted or (reach * item <= SPAN and not apart):
        return _read_span(file, start, reach, dtype).as_strided(tuple(shape), tuple(stride))
    made = _in_order(shape, stride, dtype)
    count = 1 if apart or not step else max(1, (SPAN // item - inner) // step + 1)
    for first in range(0, shape[axis], count):
        size = min(count, shape[axis] - first)
        part = (*shape[:axis], size, *shape[axis + 1:])
        made.narrow(axis, first, size).copy_(
            read_strided(file, start + first * step * item, part, stride, dtype))
    return made


def _in_order(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor whose axes follow each other as they do in the file."""
    order = sorted(range(len(shape)), key=lambda at: -stride[at])
    made = torch.empty([shape[at] for at in order], dtype=dtype)
    return made.permute([order.index(at) for at in range(len(shape))])


def _read_span(file: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """So many elements that follow each other."""
    # not torch.empty: of memory that it asks for in multiples of 64 bytes, glibc before 2.38 uses
    # little again, and a conversion holds three times as much
    memory = np.empty(count * dtype.itemsize, np.uint8)
    if missing := read_at(file, memoryview(memory), start):
        raise EOFError(f"it ends {missing} bytes before the end of a tensor: it was cut short while"
                       " it was read")
    return torch.from_numpy(memory).view(dtype)


AT_ONCE = 2


class Stopped(Exception):
    """Another file failed, or whoever asked for it: this one is left as it is."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class FileWorkers:
    """Makes files `at_once`, while one more may be on its way to the disk. All are made when the
    context ends.

    Args:
        at_once: None: two, or one on one core.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self.at_once = at_once or min(AT_ONCE, usable_cores())
        self._pool = ThreadPoolExecutor(self.at_once + 1)
        self._room, self._making = Semaphore(self.at_once + 1), Semaphore(self.at_once)
        self.stopping, self._lock = Event(), Lock()
        self._error: BaseException | None = None

    def start(self, make: Callable[[], Iterator[None]]) -> None:
        """Make a file, as soon as there is room for it.

        Args:
            make: makes it, by another thread; yields once, when all that is left is to wait for the
                disk. It calls `check` now and then, and leaves no file open where that raises.
        Raises:
            BaseException: what another file's `make` raised first.
        """
        self._room.acquire()
        try:
            self._raise()
            self._pool.submit(self._run, make)
        except BaseException:
            self._room.release()
            raise

    def check(self) -> None:
        """`Stopped` where the files are not wanted any more."""
        if self.stopping.is_set():
            raise Stopped

    def _run(self, make: Callable[[], Iterator[None]]) -> None:
        try:
            steps = make()
            with self._making:
                self.check()
                next(steps, None)
            next(steps, None)  # also of what was stopped since: it is complete
        except Stopped:
            pass
        except BaseException as error:  # of any kind: the caller raises it
            with self._lock:
                self._error = self._error or error
            self.stopping.set()
        finally:
            self._room.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def __enter__(self) -> FileWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 *_: object) -> None:
        try:
            if error is None:
                for _ in range(self.at_once + 1):  # unlike `shutdown`, Ctrl-C ends this
                    self._room.acquire()
                self._raise()
        finally:
            self.stopping.set()
            self._pool.shutdown()
        # what failed here may have the same cause and say less: a full disk is named by a file
        if isinstance(error, Exception) and error is not self._error:
            self._raise()
