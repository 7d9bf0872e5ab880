"""Threads that write several files in parallel. If one thread fails, all of them stop.

A single thread reads data, computes its checksum and writes it about as fast as one core can copy
memory. Two threads are therefore enough to use the full bandwidth of a fast disk. Additional
threads would only wait for memory or for the disk.
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

# Tensors are read, not memory-mapped: if another process truncates the file meanwhile, a read fails
# with an error, whereas an access to a map would end the process with SIGBUS.
SPAN = 1 << 20  # bytes read at once even if not all of them are needed
GAP = 1 << 16  # a gap of more bytes is slower to read than to skip with a second call


def read_strided(file: int, start: int, shape: Sequence[int], stride: Sequence[int],
                 dtype: torch.dtype) -> Tensor:
    """Read a strided tensor from a file into new memory. The axes have the same order in memory as
    in the file.

    Args:
        file: file descriptor of the open file.
        start: position of the first element in the file, in bytes.
        shape, stride: shape and strides of the tensor, in elements. Strides must not be negative.
        dtype: data type of the elements.
    Raises:
        EOFError: If the file ends before the end of the tensor.
        OSError: If the file cannot be read.
    """
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    axis = max(range(len(shape)), key=lambda at: (shape[at] > 1, stride[at]), default=0)
    reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    wanted, item = torch.Size(shape).numel(), dtype.itemsize
    step = stride[axis] if shape else 0
    # elements spanned by a single index of the axis
    inner = reach - (shape[axis] - 1) * step if shape else reach
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
    """Allocate a dense tensor whose axes have the same order in memory as in the file."""
    order = sorted(range(len(shape)), key=lambda at: -stride[at])
    made = torch.empty([shape[at] for at in order], dtype=dtype)
    return made.permute([order.index(at) for at in range(len(shape))])


def _read_span(file: int, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """Read `count` consecutive elements from a file."""
    # numpy and not torch.empty: torch requests memory aligned to 64 bytes, which glibc before 2.38
    # hardly reuses, so that a conversion would need three times as much memory.
    memory = np.empty(count * dtype.itemsize, np.uint8)
    if missing := read_at(file, memory.data, start):
        raise EOFError(f"the file ends {missing} bytes before the end of a tensor: it was "
                       "truncated while it was being read")
    return torch.from_numpy(memory).view(dtype)


AT_ONCE = 2


class Stopped(Exception):
    """Raised in a worker thread to stop writing a file that is no longer needed, because another
    worker or the caller has failed.
    """


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # macOS does not have this function
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class FileWorkers:
    """A context manager that writes several files in parallel, in threads.

    The contents of up to `at_once` files are produced at the same time. In addition, one completely
    written file may be waiting to be flushed to disk. All files are complete when the context ends.

    Args:
        at_once: number of files whose contents are produced at the same time. Defaults to two, or
            to one if the process may use only one core.
    """

    def __init__(self, at_once: int | None = None) -> None:
        self.at_once = at_once or min(AT_ONCE, usable_cores())
        self._pool = ThreadPoolExecutor(self.at_once + 1)
        self._room, self._making = Semaphore(self.at_once + 1), Semaphore(self.at_once)
        self.stopping, self._lock = Event(), Lock()
        self._error: BaseException | None = None

    def start(self, make: Callable[[], Iterator[None]]) -> None:
        """Start writing a file in a worker thread. If all workers are busy, this method waits until
        one is free.

        Args:
            make: function that writes the file. `make` is called in a worker thread. `make` must
                return an iterator that yields exactly once, after the file has been written and
                before the file is flushed to disk. `make` must call `check` regularly, and must
                close its file if `check` raises.
        Raises:
            BaseException: If writing another file failed. If writing several files failed, the
                first error is raised.
        """
        self._room.acquire()
        try:
            self._raise()
            self._pool.submit(self._run, make)
        except BaseException:
            self._room.release()
            raise

    def check(self) -> None:
        """Raise `Stopped` if a worker or the caller has failed, so the files are not needed."""
        if self.stopping.is_set():
            raise Stopped

    def _run(self, make: Callable[[], Iterator[None]]) -> None:
        try:
            steps = make()
            with self._making:
                self.check()
                next(steps, None)
            next(steps, None)  # runs even after a stop, because the file is complete
        except Stopped:
            pass
        except BaseException as error:  # errors of all types, because the caller raises them again
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
                 *_rest: object) -> None:
        try:
            if error is None:
                for _ in range(self.at_once + 1):  # Ctrl-C interrupts this wait, but not `shutdown`
                    self._room.acquire()
                self._raise()
        finally:
            self.stopping.set()
            self._pool.shutdown()
        # A worker's error is more precise than the caller's error if both have the same cause: on a
        # full disk, the worker's error names the file.
        if isinstance(error, Exception) and error is not self._error:
            self._raise()
