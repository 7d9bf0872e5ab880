"""The peers of a swarm, which may come, fail and move, and the stage that each computes.
Micro-batches are sent through the stages. The trainers that join a swarm are defined here, too.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_plugin.planner.peer_choice import BACKWARD, Wiring
from moe_plugin.training.resilience.swarm.messages import (
    Access,
    Address,
    Connections,
    Message,
    PeerError,
    packed,
)

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
        """Choose the peer that runs a task of a micro-batch; see `Wiring.choose`. Return None if no
        other peer is left.
        """
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


log = logging.getLogger(__name__)
ROUNDS = 3  # rounds in which slow peers are asked again, if the stage has no other peers
BEATS = 10  # times per timeout at which a trainer or peer reports its presence
MicroBatches = Sequence[tuple[Tensor, Any]]
RoundId = tuple[str, int, int]  # "train" or "evaluate", step, index within the step


@dataclass
class Driven:
    """The result of processing one micro-batch.

    Attributes:
        loss: loss of the micro-batch, including balance losses.
        logged: additional values that the loss function returned.
    """

    loss: float
    logged: Message


class Driver:
    """Sends the micro-batches of one trainer through the stages.

    Args:
        stages: number of pipeline stages.
        members: the peers, with the load that this trainer causes on each of them.
        connections: open connections to peers.
        took: function that is called with (stage, micro-batch, peer, request) after a peer has
            answered. The function must return true if the leading trainer counts the backward pass.
            Otherwise, another peer repeats the backward pass.
        lost: function that is called with (stage, peer, reason) when a peer has failed.
        run: settings of the run; see `Swarm`.
    """

    def __init__(self, stages: int, members: SwarmMembers, connections: Connections,
                 took: Callable[[int, int, Address, Message], bool],
                 lost: Callable[[int, Address, object], None], run: Message) -> None:
        self.stages, self.members, self.connections = stages, members, connections
        self.took, self.lost, self.run = took, lost, run
        self.resent, self._counting = 0, threading.Lock()

    def journey(self, kind: str, step: int, number: int, micro_batch: tuple[Tensor, Any]) -> Driven:
        """Send a micro-batch (input, target) forward through all stages and, in training, also
        backward.

        Raises:
            RuntimeError: If no peer of a stage completes a task. The error message states the
                reasons.
        """
        x, target = micro_batch
        inputs, last = [packed(x, self.run["wire"])], self.stages - 1

        def given(stage: int) -> Any:
            return target if stage == last or self.run["target_to_all"] else None

        for stage in range(last):
            inputs.append(self.task(stage, step, number, "forward", {
                "x": inputs[-1], "target": given(stage), "train": kind == "train"})["x"])
        if kind == "evaluate":
            answer = self.task(last, step, number, "evaluate", {"x": inputs[last],
                                                                "target": target})
            return Driven(answer["loss"], answer["logged"])
        grad, loss = None, 0.0
        logged: Message = {}
        for stage in range(last, -1, -1):
            answer = self.task(stage, step, number, "backward", {
                "x": inputs[stage], "grad": grad, "target": given(stage)})
            grad, loss, logged = answer["x"], loss + answer["loss"], {**logged, **answer["logged"]}
        return Driven(loss, logged)

    def task(self, stage: int, step: int, number: int, what: str, values: Message) -> Message:
        """Run a task on a peer of the stage, or on another peer if the first does not answer."""
        size = BACKWARD if what == "backward" else 1.0
        reasons: dict[Address, str] = {}
        rounds = 0
        while True:
            address = self.members.choose(stage, number, size, set(reasons))
            if address is None and self.members.stages[stage] and rounds < ROUNDS:
                rounds, reasons = rounds + 1, {}  # the peers may be slow rather than lost
                continue
            if address is None:
                raise RuntimeError(
                    f"{what} of micro-batch {number}: no peer of stage {stage} completed it: "
                    f"{'; '.join(reasons.values()) or 'no peer is left'}")
            start = time.perf_counter()
            try:
                with self.connections.to(address) as connection:
                    answer = connection.ask(what, task=(step, number), **values)
                taken_s = time.perf_counter() - start - answer["queued"]
                if what == "backward" and not self.took(stage, number, address, values):
                    raise ConnectionError("the peer was lost together with its results")
            except (OSError, PeerError) as error:
                with self._counting:
                    self.resent += 1
                reasons[address] = f"{address}: {error}"
                if not isinstance(error, TimeoutError):
                    self.lost(stage, address, error)
                continue
            self.members.done(stage, address, size, taken_s)
            return answer


class JoinedTrainer:
    """A trainer that processes some of the micro-batches of a swarm's leading trainer.

    A joined trainer reads the same data as the leading trainer, and may join, leave or fail at any
    time.

    If a joined trainer fails, the leading trainer processes the micro-batches that were not
    completed.

    Args:
        address: address of the leading trainer (a `Swarm`).
        in_flight: number of micro-batches that are processed at the same time. If 0, two
            micro-batches per peer are processed at the same time.
        timeout_s: maximum time to wait for an answer from the leading trainer, in seconds.
        secret: see `Swarm`.
        message_bytes: see `Swarm`.
    Raises:
        OSError: If no trainer answers within `timeout_s`.

    Attributes:
        steps: number of steps that the swarm has completed. The next call of `step` must receive
            the data of step number `steps`, counted from 0.
        driven: number of micro-batches that this trainer has processed.
    """

    def __init__(self, address: Address, *, in_flight: int = 0, timeout_s: float = 60.0,
                 secret: str | None = None, message_bytes: int = Access.message_bytes) -> None:
        self.address, self.in_flight, self.timeout_s = address, in_flight, timeout_s
        self._access, self.name = Access(secret, message_bytes), uuid.uuid4().hex[:8]
        self._leader = Connections(timeout_s, self._access)
        about = self._join()
        self.steps, self.driven = int(about["steps"]), 0
        self._evaluations, self._at = 0, threading.local()  # current round of each thread
        self.members = SwarmMembers(about["stages"], hash(self.name))
        self._driver = Driver(about["stages"], self.members, Connections(
            about["run"]["timeout_s"], self._access), self._took, self._lost, about["run"])

    def _join(self) -> Message:
        end = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._ask("join")
            except ConnectionRefusedError:  # the leading trainer may start later
                if time.monotonic() > end:
                    raise
                time.sleep(self.timeout_s / BEATS / BEATS)

    def step(self, micro_batches: MicroBatches) -> Message:
        """Process some of the micro-batches of the next step.

        Args:
            micro_batches: all micro-batches of the step, including those that other trainers
                process.
        Returns: The result of `Swarm.accumulate`, with `losses`, `logged` and `norm`.
        Raises:
            OSError: If the leading trainer does not answer.
        """
        result = self._round(("train", self.steps, 0), micro_batches)
        self.steps, self._evaluations = self.steps + 1, 0
        return result

    def evaluate(self, micro_batches: MicroBatches) -> Message:
        """Process some of the micro-batches of an evaluation; see `step`."""
        self._evaluations += 1
        return self._round(("evaluate", self.steps, self._evaluations), micro_batches)

    def _round(self, about: RoundId, micro_batches: MicroBatches) -> Message:
        ended = threading.Event()
        with ThreadPoolExecutor(self.in_flight or 64) as pool:
            first = pool.submit(self._work, about, micro_batches, ended)
            futures = [first]
            while not all(future.done() for future in futures):
                more = (self.in_flight or max(1, 2 * len(self.members))) - len(futures)
                futures += [pool.submit(self._work, about, micro_batches, ended)
                            for _ in range(min(more, 64 - len(futures)))]
                wait(futures, self.timeout_s / BEATS, FIRST_EXCEPTION)
                if not ended.is_set():
                    self._ask("beat")
        return next(result for result in (future.result() for future in futures) if result)

    def _work(self, about: RoundId, micro_batches: MicroBatches, ended: threading.Event
              ) -> Message | None:
        while True:
            given = self._ask("work", about=about, count=len(micro_batches))
            if "result" in given:
                ended.set()
                return given["result"]
            if given["number"] is None:
                continue
            self._follow(given["members"])
            self._at.serial, number = given["serial"], given["number"]
            try:
                driven = self._driver.journey(about[0], about[1], number, micro_batches[number])
            except RuntimeError as error:
                log.warning("micro-batch %d is returned to the leading trainer: %s", number, error)
                self._ask("back", serial=given["serial"], number=number)
                continue
            self.driven += 1
            self._ask("done", serial=given["serial"], number=number, loss=driven.loss,
                      logged=driven.logged)

    def _follow(self, members: list[list[tuple[Address, float, float]]]) -> None:
        """Connect to the same peers as the leading trainer."""
        for stage, (there, current) in enumerate(zip(members, self.members.stages, strict=True)):
            new: dict[Address, Any] = {
                (host, port): about for (host, port), *about in there}
            for address in set(current) - new.keys():
                self.members.leave(stage, address)
            for address in new.keys() - set(current):
                self.members.serve(Member(address, *new[address]), stage)

    def _took(self, stage: int, number: int, address: Address, values: Message) -> bool:
        return self._ask("took", serial=self._at.serial, stage=stage, number=number,
                         peer=address)["counted"]

    def _lost(self, stage: int, address: Address, why: object) -> None:
        self.members.leave(stage, address)
        self._driver.connections.close(address)
        self._ask("lost", serial=self._at.serial, stage=stage, peer=address, why=str(why))

    def _ask(self, what: str, **values: Any) -> Message:
        with self._leader.to(self.address) as connection:
            return connection.ask(what, trainer=self.name, **values)
