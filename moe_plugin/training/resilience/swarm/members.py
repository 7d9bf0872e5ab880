"""The peers of a swarm, which may come, fail and move, and the stage that each computes."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from moe_plugin.planner.peer_choice import Wiring
from moe_plugin.training.resilience.swarm.messages import Address

log = logging.getLogger(__name__)
# Least gain of the pipeline, as a fraction of the moved peer's throughput. A move costs time,
# because the peer loads the weights of its new stage.
WORTH = 0.5


@dataclass(frozen=True)
class Member:
    """A peer that computes a stage or waits to be assigned to a stage; see `StagePeer`."""

    address: Address
    bandwidth: float
    throughput: float | None


class SwarmMembers:
    """The peers that a trainer uses. All threads of the trainer share this object."""

    def __init__(self, stages: int, seed: int) -> None:
        self._wirings = [Wiring(seed + stage) for stage in range(stages)]
        self._of: list[dict[Address, Member]] = [{} for _ in range(stages)]
        self._newcomers: dict[Address, Member] = {}
        self._changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        """Return the total number of peers, including new peers without a stage."""
        return len(self._newcomers) + sum(map(len, self._of))

    @property
    def stages(self) -> list[list[Address]]:
        """For each stage, the addresses of its peers, in the same order for all trainers."""
        with self._changed:
            return [sorted(members) for members in self._of]

    @property
    def about(self) -> list[list[tuple[Address, float, float]]]:
        """For each stage, a tuple (address, bandwidth, throughput) for each of its peers."""
        with self._changed:
            return [[(address, member.bandwidth, self._wirings[stage].throughput(address))
                     for address, member in members.items()]
                    for stage, members in enumerate(self._of)]

    @property
    def newcomers(self) -> list[Member]:
        """New peers, which are not yet assigned to a stage."""
        with self._changed:
            return list(self._newcomers.values())

    def here(self, member: Member) -> None:
        """Register a peer that has announced itself, as a new peer if it has no stage."""
        with self._changed:
            if member.address in self._newcomers or any(member.address in m for m in self._of):
                return
            self._newcomers[member.address] = member
            self._changed.notify_all()
        log.info("peer %s has connected", member.address)

    def wait_for(self, number: int, timeout_s: float) -> bool:
        """Wait until `number` peers have connected. Return false if the timeout expires first."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self) >= number, timeout_s)

    def bandwidths(self, stage: int) -> list[float]:
        """Return the bandwidths of the peers in a stage, in the order of the peers."""
        with self._changed:
            return [self._of[stage][address].bandwidth for address in sorted(self._of[stage])]

    def place(self, member: Member) -> int:
        """Return the stage with the lowest throughput, which a new peer should compute."""
        return min(range(len(self._of)), key=self._throughput)

    def serve(self, member: Member, stage: int) -> None:
        """Assign a new peer to a stage."""
        with self._changed:
            self._newcomers.pop(member.address, None)
            mean = self._throughput(stage) / max(1, len(self._of[stage])) or 1.0
            self._of[stage][member.address] = member
            self._wirings[stage].announce(member.address, member.throughput or mean)

    def leave(self, stage: int, address: Address) -> Member | None:
        """Remove a peer from a stage.

        Returns:
            The peer, or None if the peer did not belong to the stage. If the removed peer is still
                alive, it announces itself again.
        """
        with self._changed:
            self._newcomers.pop(address, None)
            self._wirings[stage].ban(address)
            return self._of[stage].pop(address, None)

    def choose(self, stage: int, number: int, size: float, but: set[Address]) -> Address | None:
        """Choose the peer of a micro-batch's task; see `Wiring.choose`. None if none is left."""
        with self._changed:
            wiring = self._wirings[stage]
            left_out = frozenset(but & wiring.peers)
            peer: Any = wiring.choose(size, but=left_out) if wiring.peers - left_out else None
            return peer

    def done(self, stage: int, address: Address, size: float, seconds: float) -> None:
        """Record the duration of a task, excluding the time spent waiting for other tasks."""
        with self._changed:
            self._wirings[stage].done(address, size, seconds)

    def best_move(self) -> tuple[Member, int, int] | None:
        """Find the peer whose move to another stage would increase the pipeline's throughput most.

        Returns: (peer with its measured throughput, stage of the peer, slowest stage), or None if
            no move would increase the throughput.
        """
        with self._changed:
            speeds = [self._throughput(stage) for stage in range(len(self._of))]
            slow = speeds.index(min(speeds))
            best, move = speeds[slow], None
            for stage, members in enumerate(self._of):
                for member in members.values() if stage != slow and len(members) > 1 else ():
                    throughput = self._wirings[stage].throughput(member.address)
                    after = min(speeds[slow] + throughput, speeds[stage] - throughput,
                                *(s for i, s in enumerate(speeds) if i not in (slow, stage)))
                    if after > best and after - speeds[slow] >= WORTH * throughput:
                        moved = Member(member.address, member.bandwidth, throughput)
                        best, move = after, (moved, stage, slow)
            return move

    def _throughput(self, stage: int) -> float:
        return sum(self._wirings[stage].throughput(address) for address in self._of[stage])


class Alarm:
    """A timer that fires periodically.

    Args:
        every_s: interval of the timer in seconds. If `every_s` is None, the timer never fires.
    """

    def __init__(self, every_s: float | None) -> None:
        self.every_s, self._last = every_s, time.monotonic()

    def rings(self) -> bool:
        """Return true once per interval, otherwise false."""
        now = time.monotonic()
        if self.every_s is None or now - self._last < self.every_s:
            return False
        self._last = now
        return True
