"""Files that are made by a few threads at a time; the first failure ends all.

One thread reads, sums and writes about as fast as one core copies memory; two keep a fast disk
busy. More would wait for memory or the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Lock, Semaphore

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
