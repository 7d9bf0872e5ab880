"""Who serves which stage of a swarm: newcomers, those that are lost, and who should move."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from moe_plugin.planner.peer_choice import Wiring
from moe_plugin.training.resilience.swarm.messages import Address

log = logging.getLogger(__name__)
WORTH = 0.5  # of a peer's throughput that the slowest stage must gain: to move it loads weights


@dataclass(frozen=True)
class Member:
    """A peer that serves a stage, or waits for one; see `StagePeer`."""

    address: Address
    bandwidth: float
    throughput: float | None


class SwarmMembers:
    """The peers of a trainer, for all of its threads."""

    def __init__(self, stages: int, seed: int) -> None:
        self._wirings = [Wiring(seed + stage) for stage in range(stages)]
        self._of: list[dict[Address, Member]] = [{} for _ in range(stages)]
        self._newcomers: dict[Address, Member] = {}
        self._changed = threading.Condition(threading.RLock())

    def __len__(self) -> int:
        """All peers, newcomers too."""
        return len(self._newcomers) + sum(map(len, self._of))

    @property
    def stages(self) -> list[list[Address]]:
        """By stage, those that serve it, in an order that all share."""
        with self._changed:
            return [sorted(members) for members in self._of]

    @property
    def about(self) -> list[list[tuple[Address, float, float]]]:
        """By stage, (address, bandwidth, throughput) of those that serve it."""
        with self._changed:
            return [[(address, member.bandwidth, self._wirings[stage].throughput(address))
                     for address, member in members.items()]
                    for stage, members in enumerate(self._of)]

    @property
    def newcomers(self) -> list[Member]:
        """Those that wait for a stage."""
        with self._changed:
            return list(self._newcomers.values())

    def here(self, member: Member) -> None:
        """A peer says that it is here: a newcomer, if it serves no stage."""
        with self._changed:
            if member.address in self._newcomers or any(member.address in m for m in self._of):
                return
            self._newcomers[member.address] = member
            self._changed.notify_all()
        log.info("peer %s has come", member.address)

    def wait_for(self, number: int, timeout_s: float) -> bool:
        """Whether so many are here in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self) >= number, timeout_s)

    def bandwidths(self, stage: int) -> list[float]:
        """Of a stage's members, in their order."""
        with self._changed:
            return [self._of[stage][address].bandwidth for address in sorted(self._of[stage])]

    def place(self, member: Member) -> int:
        """The stage where a newcomer goes: that of the least throughput."""
        return min(range(len(self._of)), key=self._throughput)

    def serve(self, member: Member, stage: int) -> None:
        """A newcomer serves a stage from now on."""
        with self._changed:
            self._newcomers.pop(member.address, None)
            mean = self._throughput(stage) / max(1, len(self._of[stage])) or 1.0
            self._of[stage][member.address] = member
            self._wirings[stage].announce(member.address, member.throughput or mean)

    def leave(self, stage: int, address: Address) -> Member | None:
        """It serves the stage no more; None: it did not. If it lives, it will say that it is here.
        """
        with self._changed:
            self._newcomers.pop(address, None)
            self._wirings[stage].ban(address)
            return self._of[stage].pop(address, None)

    def choose(self, stage: int, number: int, size: float, but: set[Address]) -> Address | None:
        """The peer for a task of a micro-batch; None: no other is left. See `Wiring.choose`."""
        with self._changed:
            wiring = self._wirings[stage]
            left_out = frozenset(but & wiring.peers)
            return wiring.choose(size, but=left_out) if wiring.peers - left_out else None

    def done(self, stage: int, address: Address, size: float, seconds: float) -> None:
        """A task took so long, without waiting for others."""
        with self._changed:
            self._wirings[stage].done(address, size, seconds)

    def best_move(self) -> tuple[Member, int, int] | None:
        """(a peer, its stage, the slowest stage) by which the pipeline gets fastest; None: no move
        helps. The peer's throughput is what was measured.
        """
        with self._changed:
            speeds = [self._throughput(stage) for stage in range(len(self._of))]
            slow = speeds.index(min(speeds))
            best, found = speeds[slow], None
            for stage, members in enumerate(self._of):
                for member in members.values() if stage != slow and len(members) > 1 else ():
                    own = self._wirings[stage].throughput(member.address)
                    after = min(speeds[slow] + own, speeds[stage] - own,
                                *(s for i, s in enumerate(speeds) if i not in (slow, stage)))
                    if after > best and after - speeds[slow] >= WORTH * own:
                        moved = Member(member.address, member.bandwidth, own)
                        best, found = after, (moved, stage, slow)
            return found

    def _throughput(self, stage: int) -> float:
        return sum(self._wirings[stage].throughput(address) for address in self._of[stage])


class Alarm:
    """Whether it is time again. every_s: None: never."""

    def __init__(self, every_s: float | None) -> None:
        self.every_s, self._last = every_s, time.monotonic()

    def rings(self) -> bool:
        """True once every so many seconds."""
        now = time.monotonic()
        if self.every_s is None or now - self._last < self.every_s:
            return False
        self._last = now
        return True
