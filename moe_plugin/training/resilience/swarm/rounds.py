"""Distribution of the micro-batches of a step among the trainers of a swarm. This code runs on the
leading trainer.

Every trainer can process any micro-batch, because all trainers read the same data. The leading
trainer (`Swarm`) assigns indices of micro-batches to its own threads and to the trainers that have
joined (`JoinedTrainer`). Only the leading trainer decides which backward passes are counted. For
each stage, the gradients of a micro-batch are counted exactly once, regardless of which trainers
processed it and how often.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moe_plugin.training.resilience.swarm.journeys import BEATS, Driven, RoundId, SwarmMembers
from moe_plugin.training.resilience.swarm.messages import Address, Message

log = logging.getLogger(__name__)
RESULTS = 1000  # stored results of the latest rounds, for trainers that are behind


@dataclass
class SharedRound:
    """The micro-batches of one step or evaluation, and the trainers that process them.

    Attributes:
        about: identifier of the round.
        serial: serial number of the round. If a step is repeated, the repetition has a different
            number.
        count: number of micro-batches in the round.
        changed: condition variable that is notified of every change of the round.
        found: results of the completed micro-batches, by the index of the micro-batch.
        by: for each completed micro-batch, the address of the trainer that processed it. The
            leading trainer has an empty string as its address.
    """

    about: RoundId
    serial: int
    count: int
    changed: threading.Condition
    found: dict[int, Driven] = field(default_factory=dict)
    by: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._open, self._back = deque(range(self.count)), deque[int]()
        self._with: dict[int, str] = {}  # numbers assigned to a joined trainer
        self._seen: dict[str, float] = {}
        self._ended = False

    def numbers(self, timeout_s: float) -> Iterator[int]:
        """Yield micro-batch indices for one thread of the leading trainer, until all micro-batches
        are done.

        If a joined trainer does not respond for `timeout_s` seconds, the leading trainer processes
        its micro-batches.
        """
        while True:
            with self.changed:
                while not self.over and not self._own(timeout_s):
                    self.changed.wait(timeout_s / BEATS)
                if self.over:
                    return
                number = (self._back or self._open).popleft()
            yield number

    def _own(self, timeout_s: float) -> bool:
        """Return true if there is a micro-batch left that the leading trainer can process."""
        silent = [number for number, trainer in self._with.items()
                  if time.monotonic() - self._seen[trainer] > timeout_s]
        for number in silent:
            log.warning("trainer %s does not respond: micro-batch %d is processed again",
                        self._with.pop(number), number)
        self._back.extend(silent)
        return bool(self._back or self._open)

    @property
    def is_open(self) -> bool:
        """True if there are micro-batches left that can be assigned to joined trainers."""
        return bool(self._open) and not self.over

    def number_for(self, trainer: str) -> int | None:
        """Return a micro-batch index for a joined trainer, or None if none is available now."""
        with self.changed:
            self.alive(trainer)
            if not self.is_open:
                return None
            number = self._open.popleft()
            self._with[number] = trainer
            return number

    def alive(self, trainer: str) -> None:
        """Record that a trainer has responded."""
        self._seen[trainer] = time.monotonic()

    def back(self, number: int) -> None:
        """Reassign a micro-batch that a joined trainer could not process to the leading trainer."""
        with self.changed:
            if self._with.pop(number, None) is not None:
                self._back.append(number)
            self.changed.notify_all()

    def done(self, number: int, driven: Driven, trainer: str = "") -> None:
        """Record the result of a micro-batch, unless it already has a result."""
        with self.changed:
            if number not in self.found:
                self.found[number], self.by[number] = driven, trainer
            self._with.pop(number, None)
            self.changed.notify_all()

    def end(self) -> None:
        """Stop assigning numbers."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    @property
    def over(self) -> bool:
        """True if all micro-batches are completed or the round has been ended."""
        return self._ended or len(self.found) == self.count


class SharedRounds:
    """The current round, the results of earlier rounds, and the answers to requests of joined
    trainers.

    Args:
        members: function that returns the peers of the swarm.
        run: settings of the run; see `Swarm`.
        steps: function that returns the number of completed steps.
        took: see `Driver`.
        lost: see `Driver`.
    """

    REQUESTS = frozenset({"join", "beat", "work", "took", "lost", "back", "done"})

    def __init__(self, members: Callable[[], SwarmMembers], run: Message,
                 steps: Callable[[], int],
                 took: Callable[[int, int, Address, Message | None], bool],
                 lost: Callable[[int, Address, object], None]) -> None:
        self.members, self.run, self.steps, self.took, self.lost = members, run, steps, took, lost
        self.timeout_s: float = run["timeout_s"]
        self._changed, self._serial = threading.Condition(), 0
        self._now: SharedRound | None = None
        self._results: dict[RoundId, Message] = {}
        self._owed: set[str] = set()  # trainers that have not received the last result yet

    def begin(self, about: RoundId, count: int) -> SharedRound:
        """Start a round of `count` micro-batches."""
        with self._changed:
            self._serial += 1
            self._now = now = SharedRound(about, self._serial, count, self._changed)
            self._changed.notify_all()
            return now

    def end(self, about: RoundId, result: Message | None, by: list[str]) -> None:
        """End the round.

        Args:
            about: identifier of the round.
            result: result that is sent to all trainers, or None if the round will be repeated.
            by: for each micro-batch, the address of the trainer that processed it.
        """
        with self._changed:
            self._now = None
            if result is not None:
                self._results[about] = result
                self._owed.update(filter(None, by))
            if len(self._results) > RESULTS:
                del self._results[next(iter(self._results))]
            self._changed.notify_all()

    def wait_until_known(self) -> None:
        """Wait up to `timeout_s` until all participating trainers have received the last result."""
        with self._changed:
            self._changed.wait_for(lambda: not self._owed, self.timeout_s)

    def answer(self, what: str, request: Message) -> Message:
        """Answer a request. `what` is one of `REQUESTS`."""
        return getattr(self, f"_{what}")(**request)

    def _current(self, serial: int) -> SharedRound | None:
        now = self._now
        return now if now is not None and now.serial == serial else None

    def _join(self, trainer: str) -> Message:
        log.info("trainer %s has joined", trainer)
        steps, members = self.steps(), self.members()
        return {"stages": len(members.stages), "run": self.run,
                "steps": steps + (("train", steps, 0) in self._results)}

    def _beat(self, trainer: str) -> Message:
        if (now := self._now) is not None:
            now.alive(trainer)
        return {}

    def _work(self, trainer: str, about: RoundId, count: int) -> Message:
        """Return a micro-batch of a round, or the result of the round if it is over. If neither
        becomes available within a certain time, the answer contains neither.
        """
        about = (about[0], about[1], about[2])  # a list, if it was sent

        def present() -> SharedRound | None:
            now = self._now
            return now if now is not None and now.about == about else None

        with self._changed:
            self._changed.wait_for(lambda: about in self._results or (
                (now := present()) is not None and now.is_open), self.timeout_s / BEATS)
            if about in self._results:
                self._owed.discard(trainer)
                self._changed.notify_all()
                return {"result": self._results[about]}
        now = present()
        if now is None:
            if about[1] < self.steps():
                raise ValueError(f"step {about[1]} was more than {RESULTS} rounds ago; restart "
                                 "this trainer")
            return {"number": None}
        if now.count != count:
            raise ValueError(f"this trainer has {count} micro-batches per step, but the leading "
                             f"trainer has {now.count}; use equal data and sizes in all trainers")
        return {"number": now.number_for(trainer), "serial": now.serial,
                "members": self.members().about}

    def _took(self, trainer: str, serial: int, stage: int, number: int, peer: Address) -> Message:
        now = self._current(serial)
        if now is None or now.over:  # the result does not count and need not be repeated
            return {"counted": True}
        now.alive(trainer)
        return {"counted": self.took(stage, number, (peer[0], peer[1]), None)}

    def _lost(self, trainer: str, serial: int, stage: int, peer: Address, why: str) -> Message:
        now = self._current(serial)
        if now is not None and not now.over:
            self.lost(stage, (peer[0], peer[1]), why)
        return {}

    def _back(self, trainer: str, serial: int, number: int) -> Message:
        if (now := self._current(serial)) is not None:
            now.back(number)
        return {}

    def _done(self, trainer: str, serial: int, number: int, loss: float, logged: dict[str, Any]
              ) -> Message:
        if (now := self._current(serial)) is not None:
            now.done(number, Driven(loss, logged), trainer)
        return {}
