"""SWARM's policies for uneven, unreliable peers (Ryabinin et al. 2023).

- `Wiring`: which of several peers gets the next task: interleaved weighted round robin over
  averages of their throughput; a task of a peer that fails is sent again, a peer that answers with
  an error is banned.
- `butterfly_weights`: how much of a vector each peer of an all-reduce sums.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

ALPHA = 0.1  # of averages of throughput: the weight of the newest value
BACKWARD = 2.5  # size of a backward task where a forward task's is 1


@dataclass
class Throughput:
    """A moving average of tasks per second, without the bias of its start at zero."""

    _average: float = 0.0
    _weight: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """A task of `size` took `seconds` (> 0)."""
        self._average += ALPHA * (size / seconds - self._average)
        self._weight += ALPHA * (1 - self._weight)

    @property
    def value(self) -> float | None:
        """Size per second; None: nothing was added."""
        return self._average / self._weight if self._weight else None


@dataclass(order=True)
class _Entry:
    """A peer in the heap.

    Attributes:
        busy_until: predicted.
        tie: random.
    """

    busy_until: float
    tie: float
    peer: Hashable = field(compare=False)


class Wiring:
    """Chooses a peer for each task of one stage.

    Every peer has a time until which its tasks are predicted to keep it busy. The next task goes to
    the least of these, which grows by the task's size over the peer's throughput. So of N equal
    tasks and n peers of constant throughput t_i, with p_i = t_i / sum t, each peer gets N p_i tasks
    but for max(1, n p_i): of the shares that is within max(1, n p_i) / N.

    Args:
        seed: of the order of equally busy peers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._heap: list[_Entry] = []
        self._throughput: dict[Hashable, Throughput] = {}
        self._start: dict[Hashable, float] = {}

    @property
    def peers(self) -> frozenset[Hashable]:
        """Those that get tasks."""
        return frozenset(self._throughput)

    def announce(self, peer: Hashable, throughput: float) -> None:
        """A peer is there (again), with the throughput it is expected to have.

        It starts at the load of the least busy peer, so that it does not get all tasks at first.
        """
        if throughput <= 0:
            raise ValueError(f"throughput={throughput} of peer {peer!r} must be > 0")
        self.ban(peer)
        busy = self._heap[0].busy_until if self._heap else 0.0
        self._throughput[peer], self._start[peer] = Throughput(), throughput
        heapq.heappush(self._heap, _Entry(busy, self._dice.random(), peer))

    def ban(self, peer: Hashable) -> None:
        """A peer answered with an error, or left: it gets no tasks until it is announced."""
        if self._throughput.pop(peer, None) is not None:
            self._heap = [entry for entry in self._heap if entry.peer != peer]
            heapq.heapify(self._heap)

    def choose(self, size: float = 1.0, *, but: frozenset[Hashable] = frozenset()) -> Hashable:
        """The peer for the next task of this size.

        but: peers that did not answer in time when they had this task; it is sent again to another.
        Raises: LookupError: no peer is left; announce one, or wait.
        """
        passed = []
        while self._heap and self._heap[0].peer in but:
            passed.append(heapq.heappop(self._heap))
        found = self._heap[0] if self._heap else None
        if found is not None:
            busy = found.busy_until + size / self.throughput(found.peer)
            heapq.heapreplace(self._heap, _Entry(busy, self._dice.random(), found.peer))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if found is None:
            raise LookupError(f"none of {len(passed)} peers is left for a task: announce another")
        return found.peer

    def done(self, peer: Hashable, size: float, seconds: float) -> None:
        """A task is done. A peer that was banned in the meantime is not measured."""
        if peer in self._throughput:
            self._throughput[peer].add(size, seconds)

    def throughput(self, peer: Hashable) -> float:
        """What is assumed of a peer: the average, before the first task what it was announced with.
        """
        measured = self._throughput[peer].value
        return self._start[peer] if measured is None else measured


def butterfly_weights(bandwidths: Sequence[float]) -> list[float]:
    """Shares w of a vector that n peers sum in a butterfly all-reduce.

    They minimise the largest (1 + (n - 2) w_i) / b_i under sum w = 1, w >= 0. For a bound T, peer i
    can take (T b_i - 1) / (n - 2); the least T for which these sum to 1 is found in closed form
    over the peers with T b_i > 1, the fastest ones. (A peer with b_i < 1 / T takes nothing; it
    still has its own vector to send.) Two peers: in proportion to b.
    """
    count = len(bandwidths)
    if count == 0 or min(bandwidths) <= 0:
        raise ValueError(f"bandwidths {list(bandwidths)[:8]} must be > 0, of at least one peer")
    if count <= 2:
        return [b / sum(bandwidths) for b in bandwidths]
    total = 0.0
    bound = 0.0
    for used, bandwidth in enumerate(sorted(bandwidths, reverse=True), 1):
        if used > 1 and bound * bandwidth <= 1:
            break
        total += bandwidth
        bound = (count - 2 + used) / total
    return [max(0.0, bound * b - 1) / (count - 2) for b in bandwidths]
