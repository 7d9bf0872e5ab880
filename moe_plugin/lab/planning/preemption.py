"""SWARM under preemption: throughput with and without rebalancing, and tasks of peers that vanish.

The trace: every peer works for an exponential time of mean `lifetime_s`, is gone for one of mean
`return_s`, and comes back in a random stage. A pipeline is as fast as its smallest stage; the
optimum has the peers that are there spread evenly, fractions of a peer allowed. Rebalancing: every
T seconds a peer of the largest stage leaves it for the smallest, works there after `download_s`,
and counts for the optimum all the while.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moe_plugin.planner.peer_choice import Wiring


@dataclass(frozen=True, kw_only=True)
class Preemptions:
    """A trace's statistics.

    The defaults are fitted to the published share without rebalancing, 0.827: they give 0.83 of the
    optimum without rebalancing, 0.96 with one each 300 s and 0.97 with one each 60 s (means over
    seeds; published: 0.958 and 0.976).

    Attributes:
        stages, peers: of each stage at the start.
        seconds: that are simulated.
    """

    stages: int = 4
    peers: int = 16
    lifetime_s: float = 5 * 3600.0
    return_s: float = 300.0
    seconds: float = 5 * 3600.0
    download_s: float = 10.0

    def throughput(self, every_s: float | None, seed: int = 0) -> float:
        """Share of the optimum that the pipeline reaches.

        Args:
            every_s: T; None: no rebalancing.
            seed: of the trace, which is the same for every T.
        """
        run = _Swarm(self, every_s, seed)
        run.until(self.seconds)
        return run.done / run.optimum


class _Swarm:
    """The state of one simulation. sizes: working peers by stage. loading: peers that download."""

    def __init__(self, trace: Preemptions, every_s: float | None, seed: int) -> None:
        self.trace, self.every_s = trace, every_s
        self.times, self.places = random.Random(seed), random.Random(f"{seed}")
        self.sizes, self.loading = [trace.peers] * trace.stages, 0
        self.now = self.done = self.optimum = 0.0
        self._numbers = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        for _ in range(trace.stages * trace.peers):
            self._at(self.times.expovariate(1 / trace.lifetime_s), self._leave)
        if every_s is not None:
            self._at(every_s, self._rebalance)

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), event))

    def until(self, end: float) -> None:
        """Let all events up to `end` happen."""
        while self._queue[0][0] < end:
            time, _, event = heapq.heappop(self._queue)
            self._pass(time)
            event()
        self._pass(end)

    def _pass(self, time: float) -> None:
        span, self.now = time - self.now, time
        self.done += min(self.sizes) * span
        self.optimum += (sum(self.sizes) + self.loading) / self.trace.stages * span

    def _leave(self) -> None:
        """Any of the working peers, all alike."""
        stages = range(self.trace.stages)
        if any(self.sizes):
            self.sizes[self.places.choices(stages, self.sizes)[0]] -= 1
            self._at(self.times.expovariate(1 / self.trace.return_s), self._come)
        else:
            self._at(self.trace.download_s, self._leave)

    def _come(self) -> None:
        self.sizes[self.places.randrange(self.trace.stages)] += 1
        self._at(self.times.expovariate(1 / self.trace.lifetime_s), self._leave)

    def _rebalance(self) -> None:
        most, least = (self.sizes.index(pick(self.sizes)) for pick in (max, min))
        if self.sizes[most] - self.sizes[least] >= 2:
            self.sizes[most] -= 1
            self.loading += 1
            self._at(self.trace.download_s, lambda: self._loaded(least))
        self._at(self.every_s or 0.0, self._rebalance)

    def _loaded(self, stage: int) -> None:
        self.loading -= 1
        self.sizes[stage] += 1


@dataclass
class Delivery:
    """What became of tasks that peers may lose.

    Attributes:
        peer_of: by task, the peer whose answer counted: the first one. late: answers that did not
            count, because the task had been sent again and was done. resent: tasks sent again.
        seconds: until the last task was done.
    """

    peer_of: dict[int, int] = field(default_factory=dict)
    late: int = 0
    resent: int = 0
    seconds: float = 0.0

    def answer(self, task: int, peer: int, now: float) -> None:
        """Take an answer: the first of a task counts, and no other."""
        if task in self.peer_of:
            self.late += 1
        else:
            self.peer_of[task], self.seconds = peer, now


def deliver(tasks: int, speeds: Mapping[int, float], deaths: Mapping[int, float], *,
            every_s: float, timeout_s: float, seed: int = 0) -> Delivery:
    """Send tasks to peers of one stage, one each `every_s`, and again where no answer comes.

    A peer works on its tasks one after another. From its death on it answers nothing: a task that
    is sent to it then is an error, and the peer is banned; others are sent again to another peer
    after `timeout_s`, as are those of a peer that is slow.

    Args:
        speeds: tasks per second by peer. deaths: when peers die; at least one never does.
    """
    wiring, result = Wiring(seed), Delivery()
    free = dict.fromkeys(speeds, 0.0)
    for peer, speed in speeds.items():
        wiring.announce(peer, speed)
    numbers = itertools.count()
    # when, order of equal times, what, task, peers that had it, or the one that answers
    queue = [(task * every_s, next(numbers), "send", task, frozenset()) for task in range(tasks)]
    while queue:
        now, _, what, task, who = heapq.heappop(queue)
        if what == "answer":
            (peer,) = who
            result.answer(task, peer, now)
            continue
        if task in result.peer_of:
            continue
        result.resent += bool(who)
        peer = wiring.choose(but=who if who < wiring.peers else frozenset())
        if deaths.get(peer, float("inf")) <= now:
            wiring.ban(peer)
            heapq.heappush(queue, (now, next(numbers), "send", task, who))
            continue
        begun = max(now, free[peer])
        free[peer] = end = begun + 1 / speeds[peer]
        if deaths.get(peer, float("inf")) > end:
            wiring.done(peer, 1.0, 1 / speeds[peer])
            heapq.heappush(queue, (end, next(numbers), "answer", task, frozenset({peer})))
        heapq.heappush(queue, (now + timeout_s, next(numbers), "send", task, who | {peer}))
    return result
