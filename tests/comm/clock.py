"""Simulated time of messages on a cluster whose ranks share their node's network cards.

Not `planner.events`: there each resource runs tasks in issue order, while here a card takes the
message that is ready first, and a message occupies two cards at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_plugin.comm.topology import Topology
from moe_plugin.planner.cluster import Cluster


@dataclass
class Clock:
    """One clock per rank, in seconds; a `moe_plugin.comm.simulated.MessageClock`.

    A rank issues its messages one after another, each takes the alpha of its link. Between nodes a
    message then occupies its sender's and its receiver's network card for alpha + bytes * beta;
    inside a node it occupies a port of each rank. A round ends for a rank `phase_s` after its own
    messages have left and those for it have arrived.
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
        """One round: (destination rank, bytes) by source rank, in issue order."""
        issue = {rank: self.now[rank] for rank in messages}
        done = dict(issue)
        queues = {
            rank: [m for m in reversed(queue) if m[0] != rank and m[1]]
            for rank, queue in messages.items()
        }
        while waiting := [rank for rank, queue in queues.items() if queue]:
            # in order of time: a card takes the message that is ready first
            source = min(waiting, key=lambda rank: self._start(rank, queues[rank][-1][0], issue))
            target, size = queues[source].pop()
            left, arrived = self._send(source, target, size, issue)
            done[source] = max(done[source], left)
            done[target] = max(done.get(target, self.now[target]), arrived)
        for rank, time in done.items():
            self.now[rank] = max(self.now[rank],
                                 time + (self.cluster.phase_s if time > self.now[rank] else 0.0))

    def _send(self, source: int, target: int, size: int,
              issue: dict[int, float]) -> tuple[float, float]:
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
        """What a message occupies: ports of ranks inside a node, else network cards."""
        if self.topology.same_node(source, target):
            return ("out", source), ("in", target)
        return self._card("tx", source), self._card("rx", target)

    def _card(self, direction: str, rank: int) -> tuple:
        card = self.topology.local_of[rank] % self.cluster.nics
        return direction, self.topology.node_of[rank], card
