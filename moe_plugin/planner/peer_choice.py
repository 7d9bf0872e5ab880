"""SWARM's policies for uneven, unreliable peers (Ryabinin et al. 2023).

- `Wiring` selects the peer for the next task by interleaved weighted round robin over average
  throughputs. A task whose peer fails is sent again, and a peer that answers with an error is
  banned.
- `butterfly_weights` computes how much of a vector each peer of an all-reduce sums.
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
    """Moving average of the throughput, corrected for the bias of starting at zero."""

    _average: float = 0.0
    _weight: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Add a task of this size that took `seconds` (> 0)."""
        self._average += ALPHA * (size / seconds - self._average)
        self._weight += ALPHA * (1 - self._weight)

    @property
    def value(self) -> float | None:
        """Size per second, or None if no task was added."""
        return self._average / self._weight if self._weight else None


@dataclass(order=True)
class _Entry:
    """A peer in the heap.

    Attributes:
        busy_until: predicted time at which the peer finishes its tasks.
        tie: random number that orders equally busy peers.
        peer: the peer.
    """

    busy_until: float
    tie: float
    peer: Hashable = field(compare=False)


class Wiring:
    """Selects a peer for each task of one stage.

    For every peer, the selector predicts the time until which its tasks keep it busy. The next task
    is sent to the peer with the earliest time, which then grows by the task's size divided by the
    peer's throughput. With N equal tasks and n peers of constant throughput t_i, let p_i = t_i /
    sum t. The number of tasks of peer i then differs from N p_i by at most max(1, n p_i), and its
    share by at most max(1, n p_i) / N.

    Args:
        seed: seed of the random order of equally busy peers.
    """

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._heap: list[_Entry] = []
        self._throughput: dict[Hashable, Throughput] = {}
        self._start: dict[Hashable, float] = {}

    @property
    def peers(self) -> frozenset[Hashable]:
        """Peers that receive tasks."""
        return frozenset(self._throughput)

    def announce(self, peer: Hashable, throughput: float) -> None:
        """Add a peer, or add it again, with its expected throughput.

        The peer starts with the load of the least busy peer. Otherwise a new peer would receive all
        tasks at first.
        """
        if throughput <= 0:
            raise ValueError(f"throughput={throughput} of peer {peer!r} must be > 0")
        self.ban(peer)
        busy = self._heap[0].busy_until if self._heap else 0.0
        self._throughput[peer], self._start[peer] = Throughput(), throughput
        heapq.heappush(self._heap, _Entry(busy, self._dice.random(), peer))

    def ban(self, peer: Hashable) -> None:
        """Remove a peer that answered with an error or left. The peer can be announced again."""
        if self._throughput.pop(peer, None) is not None:
            self._heap = [entry for entry in self._heap if entry.peer != peer]
            heapq.heapify(self._heap)

    def choose(self, size: float = 1.0, *, but: frozenset[Hashable] = frozenset()) -> Hashable:
        """Return the peer for the next task.

        Args:
            size: size of the task. Defaults to 1.
            but: peers to exclude because they did not answer this task in time.

        Raises:
            LookupError: if no peer is left. Announce another peer or wait.
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
                              "left. Announce another peer")
        return earliest.peer

    def done(self, peer: Hashable, size: float, seconds: float) -> None:
        """Record a finished task. Tasks of peers that were banned in the meantime are ignored."""
        if peer in self._throughput:
            self._throughput[peer].add(size, seconds)

    def throughput(self, peer: Hashable) -> float:
        """Return the assumed throughput of a peer.

        The assumed throughput is the measured average, or the announced value before the first
        task.
        """
        measured = self._throughput[peer].value
        return self._start[peer] if measured is None else measured


def butterfly_weights(bandwidths: Sequence[float]) -> list[float]:
    """Return the shares w of a vector that n peers sum in a butterfly all-reduce.

    The shares minimize the largest (1 + (n - 2) w_i) / b_i under sum w = 1 and w >= 0. For a bound
    T, peer i can sum the share (T b_i - 1) / (n - 2). The least T for which these shares sum to 1
    has a closed form over the peers with T b_i > 1, which are the fastest peers. A peer with
    b_i < 1 / T sums nothing, but it still has to send its own vector. With two peers the shares are
    proportional to b.
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
