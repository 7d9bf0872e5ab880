"""The policies that SWARM uses for unequal and unreliable peers (Ryabinin et al., 2023).

- `Wiring` selects the peer for the next task. `Wiring` uses interleaved weighted round-robin
  scheduling, where the weights are average throughputs. If a peer fails, its task is sent to
  another peer. A peer that responds with an error is banned.
- `butterfly_weights` computes which fraction of a vector each peer sums in an all-reduce.
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
    """A moving average of a peer's throughput. The average is corrected for the bias that results
    from the initial value of zero.
    """

    _average: float = 0.0
    _weight: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Include a task of the given size that took `seconds` > 0 in the average."""
        self._average += ALPHA * (size / seconds - self._average)
        self._weight += ALPHA * (1 - self._weight)

    @property
    def value(self) -> float | None:
        """Average task size per second, or None if no task has been added."""
        return self._average / self._weight if self._weight else None


@dataclass(order=True)
class _Entry:
    """A heap entry for one peer. Entries are sorted by the predicted time at which the peer becomes
    idle.

    Attributes:
        busy_until: predicted time at which the peer will have finished its tasks.
        tie: random number used to break ties between peers with equal times.
        peer: the peer.
    """

    busy_until: float
    tie: float
    peer: Hashable = field(compare=False)


class Wiring:
    """Selects a peer for each task of one pipeline stage.

    This class predicts when every peer will have finished its tasks, and selects the peer that will
    be idle first. The predicted time of this peer is then increased by the size of the task divided
    by the peer's throughput. For N equal tasks and n peers with constant throughputs t_i, let p_i
    be `t_i / sum t`. The number of tasks of peer i then differs from `N p_i` by at most
    `max(1, n p_i)`.

    Args:
        seed: random seed used to break ties between peers with equal times.
    """

    def __init__(self, seed: int = 0) -> None:
        self._dice = random.Random(seed)
        self._heap: list[_Entry] = []
        self._throughput: dict[Hashable, Throughput] = {}
        self._start: dict[Hashable, float] = {}

    @property
    def peers(self) -> frozenset[Hashable]:
        """The peers that can currently receive tasks."""
        return frozenset(self._throughput)

    def announce(self, peer: Hashable, throughput: float) -> None:
        """Add a new peer or a banned peer, with its expected throughput.

        The peer is treated as if it were as busy as the least busy peer; otherwise, it would
        receive all tasks for some time.
        """
        if throughput <= 0:
            raise ValueError(f"throughput={throughput} of peer {peer!r} must be > 0")
        self.ban(peer)
        busy = self._heap[0].busy_until if self._heap else 0.0
        self._throughput[peer], self._start[peer] = Throughput(), throughput
        heapq.heappush(self._heap, _Entry(busy, self._dice.random(), peer))

    def ban(self, peer: Hashable) -> None:
        """Remove a peer that has responded with an error or has left. The peer can be announced
        again later.
        """
        if self._throughput.pop(peer, None) is not None:
            self._heap = [entry for entry in self._heap if entry.peer != peer]
            heapq.heapify(self._heap)

    def choose(self, size: float = 1.0, *, but: frozenset[Hashable] = frozenset()) -> Hashable:
        """Return the peer to which the next task should be sent.

        Args:
            size: size of the task, in an arbitrary unit. Defaults to 1.
            but: peers to exclude, because they did not respond to this task in time.

        Raises:
            LookupError: If all peers are excluded, or if there are no peers. The caller should
                announce an additional peer, or wait.
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
        """Record that a peer has finished a task. If the peer has been banned in the meantime, this
        has no effect.
        """
        if peer in self._throughput:
            self._throughput[peer].add(size, seconds)

    def throughput(self, peer: Hashable) -> float:
        """Return the throughput that is assumed for a peer.

        The announced throughput is used until the peer finishes its first task, and the measured
        average afterwards.
        """
        measured = self._throughput[peer].value
        return self._start[peer] if measured is None else measured


def butterfly_weights(bandwidths: Sequence[float]) -> list[float]:
    """For a butterfly all-reduce of n peers, return the fraction w_i of the vector that each peer i
    sums.

    For given bandwidths b_i, the fractions minimize the maximum of `(1 + (n - 2) w_i) / b_i`. All
    fractions are >= 0 and their sum is 1. In a time T, peer i can sum the fraction
    `(T b_i - 1) / (n - 2)` of the vector. There is a closed form for the smallest T at which these
    fractions sum to 1. The closed form contains only the fastest peers, namely those with
    `T b_i > 1`. A peer with `b_i < 1 / T` sums nothing, but still has to send its own vector. With
    two peers, the fractions are proportional to the bandwidths.
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
