"""Lines of work that is done later, in any order that they and the waits between them allow.

What is put in a line is done later: while more is put in, or when somebody waits for it. Which of
the works that may be done comes next is drawn at random, each line with a speed of its own, so that
another seed is another GPU. What no wait orders is done in both orders, under some seed.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import _disable_current_modes

STUCK_S = 120.0  # after which work of a thread that does not end is an error


class Work:
    """One entry of a line; made by `Queue.add`. name: for messages."""

    def __init__(self, name: str, run: Callable[[], object] | None, line: Line) -> None:
        self.name, self.run, self.line = name, run, line
        self.done = False
        self.missing = 0  # entries that must be done before, and are not
        self.next: list[Work] = []
        self.worker: ThreadPoolExecutor | None = None


class Line:
    """Work that is done in order, of one stream. weight: how likely its next entry comes next."""

    def __init__(self, name: str, weight: float) -> None:
        self.name, self.weight = name, weight
        self.last: Work | None = None

    def latest(self) -> list[Work]:
        """Its last entry, if it is not done."""
        return [] if self.last is None or self.last.done else [self.last]


class Queue:
    """The lines of one process. Any thread may call it.

    Args:
        seed: of the order.

    Attributes:
        eager: how many entries are done, on average, when one is added.
        added, overtaken: entries so far, and those that were done before an older one.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.eager = self.random.choice((0.0, 0.3, 1.0))
        self.added = self.overtaken = 0
        self._changed = threading.Condition(threading.RLock())
        self._ready: list[Work] = []
        self._flying = 0
        self._errors: list[BaseException] = []
        self._oldest: deque[Work] = deque()
        self._workers: dict[object, tuple[ThreadPoolExecutor, Line]] = {}

    @property
    def failed(self) -> bool:
        """Whether a work has raised an error; then nothing more is done."""
        return bool(self._errors)

    def line(self, name: str) -> Line:
        """A new line."""
        return Line(name, 10 ** self.random.uniform(-1.5, 1.5))

    def add(self, line: Line, name: str, run: Callable[[], object] | None = None,
            after: Iterable[Work] = (), group: object = None, last: bool = True) -> Work:
        """Work at the end of a line.

        Args:
            run: None: nothing is to be done but to wait for `after`.
            group: of other processes that `run` waits for: it has a thread of its own, in which the
                group's works are done in the order in which they are added. None: it waits for
                nobody.
            last: what is added to the line later waits for it.
        """
        with self._changed:
            work = Work(name, run, line)
            before = [*line.latest(), *after]
            if group is not None:
                work.worker, of_group = self._worker(group)
                before += of_group.latest()
                of_group.last = work
            for one in {id(one): one for one in before if not one.done}.values():
                one.next.append(work)
                work.missing += 1
            if last:
                line.last = work
            self.added += 1
            self._oldest.append(work)
            if not work.missing:
                self._ready.append(work)
        self.some()
        return work

    def some(self) -> None:
        """Do a few of the entries that may be done, perhaps none."""
        with self._changed, _of_the_device():
            while self._ready and self.random.random() < self.eager / (1 + self.eager):
                self._begin()

    def wait(self, works: Iterable[Work]) -> None:
        """Do what is needed for these works to be done. Raises: what a work raised."""
        with self._changed, _of_the_device():
            for work in works:
                while not work.done and not self._errors:
                    self._progress(work.name)
        self._check()

    def finish(self) -> None:
        """Do all. Raises: what a work raised."""
        with self._changed, _of_the_device():
            while (self._ready or self._flying) and not self._errors:
                self._progress("all")
        for worker, _ in self._workers.values():
            worker.shutdown()
        self._workers.clear()
        self._check()

    def _check(self) -> None:
        if self._errors:
            raise self._errors[0]

    def _worker(self, group: object) -> tuple[ThreadPoolExecutor, Line]:
        if group not in self._workers:
            self._workers[group] = ThreadPoolExecutor(1), Line("a group", 1.0)
        return self._workers[group]

    def _progress(self, wanted: str) -> None:
        if self._ready:
            self._begin()
        elif not self._flying:
            raise RuntimeError(f"{wanted} never comes: nothing is left that may be done")
        elif not self._changed.wait(STUCK_S):
            raise RuntimeError(f"{wanted}: other ranks do not come")

    def _begin(self) -> None:
        """Do one of the entries that may be done, or let its thread do it."""
        weights = [work.line.weight for work in self._ready]
        (place,) = self.random.choices(range(len(self._ready)), weights)
        work = self._ready.pop(place)
        while self._oldest[0].done:
            self._oldest.popleft()
        self.overtaken += self._oldest[0] is not work
        if work.worker is not None:
            self._flying += 1
            work.worker.submit(self._fly, work)
        else:
            self._do(work)
            self._done(work)

    def _fly(self, work: Work) -> None:
        self._do(work)
        with self._changed:
            self._flying -= 1
            self._done(work)
            self._changed.notify_all()

    def _do(self, work: Work) -> None:
        if work.run is None or self._errors:
            return
        try:
            with torch.no_grad():
                work.run()
        except BaseException as error:  # noqa: BLE001 - who waits raises it
            error.add_note(f"in {work.name}, {work.line.name}")
            self._errors.append(error)

    def _done(self, work: Work) -> None:
        work.done, work.run = True, None
        for follower in work.next:
            follower.missing -= 1
            if not follower.missing:
                self._ready.append(follower)
        work.next = []


@contextlib.contextmanager
def _of_the_device() -> Iterator[None]:
    """No mode sees what runs inside: it is the device's, not the host's."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
