"""SWARM's policies for unequal and unreliable peers (Ryabinin et al., 2023).

- `Wiring` selects the peer for the next task by interleaved weighted round-robin scheduling with
  average throughputs as weights. If a peer fails, its task is sent again, and a peer that answers
  with an error is banned.
- `butterfly_weights` computes the fraction of a vector that each peer of an all-reduce sums.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

ALPHA = 0.1  # weight of the newest value in the moving average of the throughput
BACKWARD = 2.5  # size of a backward task relative to a forward task


@dataclass
class Throughput:
    """Moving average of the throughput. The bias that results from starting at zero is
    corrected."""

    _average: float = 0.0
    _weight: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Include a task of the given size that took `seconds` > 0 in the average."""
        self._average += ALPHA * (size / seconds - self._average)
        self._weight += ALPHA * (1 - self._weight)

    @property
    def value(self) -> float | None:
        """Average task size per second, or None if no task was added."""
        return self._average / self._weight if self._weight else None


@dataclass(order=True)
class _Entry:
    """Heap entry of a peer, ordered by the predicted time at which the peer is free.

    Attributes:
        busy_until: predicted time at which the peer finishes its tasks.
        tie: random number that determines the order of equally busy peers.
        peer: the peer.
    """

    busy_until: float
    tie: float
    peer: Hashable = field(compare=False)


class Wiring:
    """Selector of a peer for each task of one pipeline stage.

    For every peer, the selector predicts the time at which the peer finishes its tasks. The next
    task is sent to the peer with the earliest time, and this time is then increased by the task's
    size divided by the peer's throughput. If there are N equal tasks and n peers with constant
    throughputs t_i, and p_i is `t_i / sum t`, the number of tasks of peer i differs from `N p_i` by
    at most `max(1, n p_i)`.

    Args:
        seed: seed of the random numbers that determine the order of equally busy peers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._heap: list[_Entry] = []
        self._throughput: dict[Hashable, Throughput] = {}
        self._start: dict[Hashable, float] = {}

    @property
    def peers(self) -> frozenset[Hashable]:
        """Peers that can currently receive tasks."""
        return frozenset(self._throughput)

    def announce(self, peer: Hashable, throughput: float) -> None:
        """Add a new or banned peer with the given expected throughput.

        The peer starts with the load of the least busy peer. Otherwise, a new peer would receive
        all tasks for some time.
        """
        if throughput <= 0:
            raise ValueError(f"throughput={throughput} of peer {peer!r} must be > 0")
        self.ban(peer)
        busy = self._heap[0].busy_until if self._heap else 0.0
        self._throughput[peer], self._start[peer] = Throughput(), throughput
        heapq.heappush(self._heap, _Entry(busy, self._dice.random(), peer))

    def ban(self, peer: Hashable) -> None:
        """Remove a peer that answered with an error or left. The peer can later be announced
        again."""
        if self._throughput.pop(peer, None) is not None:
            self._heap = [entry for entry in self._heap if entry.peer != peer]
            heapq.heapify(self._heap)

    def choose(self, size: float = 1.0, *, but: frozenset[Hashable] = frozenset()) -> Hashable:
        """Return the peer to which the next task should be sent.

        Args:
            size: size of the task in any unit. Defaults to 1.
            but: peers that are excluded because they did not answer this task in time.

        Raises:
            LookupError: If no peer is left. In this case, announce an additional peer, or wait.
        """
        passed = []
        while self._heap and self._heap[0].peer in but:
            passed.append(heapq.heappop(self._heap))
        earliest = self._heap[0] if self._heap else None
        if earliest is not None:
            busy = earliest.busy_until + size / self.throughput(earliest.peer)
            heapq.heapreplace(self._heap, _Entry(busy, self._dice.random(), earliest.peer))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if earliest is None:
            raise LookupError(f"all {len(passed)} peers are excluded from this task, so no peer is "
                              "left. Announce an additional peer")
        return earliest.peer

    def done(self, peer: Hashable, size: float, seconds: float) -> None:
        """Record that a peer has finished a task. If the peer has been banned in the meantime, the
        task is ignored."""
        if peer in self._throughput:
            self._throughput[peer].add(size, seconds)

    def throughput(self, peer: Hashable) -> float:
        """Return the throughput that is assumed for a peer.

        Before the peer's first task, this is the announced value, and afterwards the measured
        average.
        """
        measured = self._throughput[peer].value
        return self._start[peer] if measured is None else measured


def butterfly_weights(bandwidths: Sequence[float]) -> list[float]:
    """Return the fractions w of a vector that each of n peers sums in a butterfly all-reduce.

    With bandwidths b, the fractions minimize the largest `(1 + (n - 2) w_i) / b_i`, under the
    conditions that they sum to 1 and that w >= 0. Within time T, peer i can sum the fraction `(T
    b_i - 1) / (n - 2)`. The smallest T for which these fractions sum to 1 has a closed form over
    the fastest peers, those with `T b_i > 1`. A peer with `b_i < 1 / T` sums nothing, but it still
    has to send its own vector. With two peers, the fractions are proportional to b.
    """
    count = len(bandwidths)
    if count == 0 or min(bandwidths) <= 0:
        raise ValueError(f"bandwidths {list(bandwidths)[:8]} must contain at least one number, and "
                         "all numbers must be > 0")
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
