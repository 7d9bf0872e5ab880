"""Simulated time: what messages cost on a cluster of given links, with ranks that share their
node's network cards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_plugin.comm.topology import Topology
from moe_plugin.planner.cluster import Cluster


@dataclass
class Clock:
    """One clock a rank, in seconds.

    A rank issues its messages one after another, each for the alpha of its link. Between nodes a
    message then holds its sender's network card, and its receiver's, for alpha + bytes * beta;
    inside a node it holds the two ranks' own ports. A round ends for a rank when its own messages
    have left and those for it have arrived, `phase_s` later.
    """

    cluster: Cluster
    topology: Topology
    now: list[float] = field(init=False)
    _free: dict[tuple, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.now = [0.0] * self.topology.size

    @property
    def elapsed(self) -> float:
        """The latest rank's time."""
        return max(self.now)

    def charge(self, messages: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """One round: for each source rank its (destination rank, bytes), in the order in which they
        are issued.
        """
        issue = {rank: self.now[rank] for rank in messages}
        done = dict(issue)
        queues = {
            rank: [m for m in reversed(queue) if m[0] != rank and m[1]]
            for rank, queue in messages.items()
        }
        while waiting := [rank for rank, queue in queues.items() if queue]:
            # in order of time: a card takes the message that is there first
            source = min(waiting, key=lambda rank: self._start(rank, queues[rank][-1][0], issue))
            target, size = queues[source].pop()
            left, arrived = self._send(source, target, size, issue)
            done[source] = max(done[source], left)
            done[target] = max(done.get(target, self.now[target]), arrived)
        for rank, time in done.items():
            self.now[rank] = max(self.now[rank],
                                 time + (self.cluster.phase_s if time > self.now[rank] else 0.0))

    def _send(self, source: int, target: int, size: int, issue: dict[int,
                                                                     float]) -> tuple[float, float]:
        """(when it has left, when it has arrived)."""
        inside = self.topology.same_node(source, target)
        link = self.cluster.intra if inside else self.cluster.inter
        start = self._start(source, target, issue)
        out, into = self._ports(source, target)
        issue[source] += link.alpha_s
        left = start + link.alpha_s + size * link.beta_s
        self._free[out] = left
        # cut-through, one message at a time
        arrived = max(left, self._free.get(into, 0.0) + link.alpha_s + size * link.beta_s)
        self._free[into] = arrived
        return left, arrived

    def _start(self, source: int, target: int, issue: dict[int, float]) -> float:
        return max(issue[source], self._free.get(self._ports(source, target)[0], 0.0))

    def _ports(self, source: int, target: int) -> tuple[tuple, tuple]:
        """What a message holds on its way out and in: ports of ranks inside a node, else network
        cards.
        """
        if self.topology.same_node(source, target):
            return ("out", source), ("in", target)
        return self._card("tx", source), self._card("rx", target)

    def _card(self, way: str, rank: int) -> tuple:
        return way, self.topology.node_of[rank], self.topology.local_of[rank] % self.cluster.nics
