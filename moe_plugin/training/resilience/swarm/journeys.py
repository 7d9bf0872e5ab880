"""How a trainer of a swarm drives micro-batches through the stages, and a trainer that joins the
leading one (`rounds`).
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

from moe_plugin.planner.peer_choice import BACKWARD
from moe_plugin.training.resilience.swarm.members import Member, SwarmMembers
from moe_plugin.training.resilience.swarm.messages import (
    Access,
    Address,
    Connections,
    Message,
    PeerError,
    packed,
)

log = logging.getLogger(__name__)
ROUNDS = 3  # in which silent peers are asked again, if the stage has no others
BEATS = 10  # of a time-out, in which a trainer or peer says that it is here
MicroBatches = Sequence[tuple[Tensor, Any]]
RoundId = tuple[str, int, int]  # "train" or "evaluate", step, number among those of this step


@dataclass
class Driven:
    """What a micro-batch's way through the stages gave: its loss, balance losses included, and what
    the loss function returned in addition.
    """

    loss: float
    logged: Message


class Driver:
    """Drives micro-batches through the stages, for one trainer.

    Args:
        stages: number of them.
        members: the peers, with the load that this trainer gives them.
        connections: to peers.
        took: (stage, micro-batch, peer, what the peer was asked): whether the leading trainer has
            counted a backward pass; False if another peer must do it.
        lost: (stage, peer, reason) is called for a peer that failed.
        run: the settings of the run; see `Swarm`.
    """

    def __init__(self, stages: int, members: SwarmMembers, connections: Connections,
                 took: Callable[[int, int, Address, Message], bool],
                 lost: Callable[[int, Address, object], None], run: Message) -> None:
        self.stages, self.members, self.connections = stages, members, connections
        self.took, self.lost, self.run = took, lost, run
        self.resent, self._counting = 0, threading.Lock()

    def journey(self, kind: str, step: int, number: int, micro_batch: tuple[Tensor, Any]) -> Driven:
        """Drive a micro-batch (input, target) through all stages and, to train, back.

        Raises: RuntimeError: a stage has no peer that does it, with the reasons.
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
        grad, loss, logged = None, 0.0, {}
        for stage in range(last, -1, -1):
            answer = self.task(stage, step, number, "backward", {
                "x": inputs[stage], "grad": grad, "target": given(stage)})
            grad, loss, logged = answer["x"], loss + answer["loss"], {**logged, **answer["logged"]}
        return Driven(loss, logged)

    def task(self, stage: int, step: int, number: int, what: str, values: Message) -> Message:
        """Let a peer of the stage do it, and another one if no answer comes."""
        size = BACKWARD if what == "backward" else 1.0
        reasons: dict[Address, str] = {}
        rounds = 0
        while True:
            address = self.members.choose(stage, number, size, set(reasons))
            if address is None and self.members.stages[stage] and rounds < ROUNDS:
                rounds, reasons = rounds + 1, {}  # they may be slow, not gone
                continue
            if address is None:
                raise RuntimeError(
                    f"{what} of micro-batch {number}: no peer of stage {stage} did it: "
                    f"{'; '.join(reasons.values()) or 'none is left'}")
            start = time.perf_counter()
            try:
                with self.connections.to(address) as connection:
                    answer = connection.ask(what, task=(step, number), **values)
                taken_s = time.perf_counter() - start - answer["queued"]
                if what == "backward" and not self.took(stage, number, address, values):
                    raise ConnectionError("it is gone, and with it what it has computed")
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
    """A further trainer of a swarm. It reads the data that the leading one reads, too, and drives
    some of the micro-batches of each step.

    It can join, leave and die at any time: the leading trainer drives what it leaves undone.

    Args:
        address: of the leading trainer, a `Swarm`.
        in_flight: micro-batches at a time; 0: two for each peer.
        timeout_s: without an answer of the leading trainer.
        secret, message_bytes: as of `Swarm`.
    Raises: OSError: no trainer answers within `timeout_s`.

    Attributes:
        steps: done by the swarm; the data of the next one must be given first.
        driven: micro-batches that this trainer drove.
    """

    def __init__(self, address: Address, *, in_flight: int = 0, timeout_s: float = 60.0,
                 secret: str | None = None, message_bytes: int = Access.message_bytes) -> None:
        self.address, self.in_flight, self.timeout_s = address, in_flight, timeout_s
        self._access, self.name = Access(secret, message_bytes), uuid.uuid4().hex[:8]
        self._leader = Connections(timeout_s, self._access)
        about = self._join()
        self.steps, self.driven = int(about["steps"]), 0
        self._evaluations, self._at = 0, threading.local()  # the round of each thread
        self.members = SwarmMembers(about["stages"], hash(self.name))
        self._driver = Driver(about["stages"], self.members, Connections(
            about["run"]["timeout_s"], self._access), self._took, self._lost, about["run"])

    def _join(self) -> Message:
        end = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._ask("join")
            except ConnectionRefusedError:  # it may start a little later than this one
                if time.monotonic() > end:
                    raise
                time.sleep(self.timeout_s / BEATS / BEATS)

    def step(self, micro_batches: MicroBatches) -> Message:
        """Help with the next step, of which these are all micro-batches.

        Returns: what `Swarm.accumulate` returns: `losses`, `logged` and `norm`.
        Raises: OSError: the leading trainer is gone.
        """
        result = self._round(("train", self.steps, 0), micro_batches)
        self.steps, self._evaluations = self.steps + 1, 0
        return result

    def evaluate(self, micro_batches: MicroBatches) -> Message:
        """Help with an evaluation; see `step`."""
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
        return next(found for found in (future.result() for future in futures) if found)

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
                log.warning("micro-batch %d goes back to the leading trainer: %s", number, error)
                self._ask("back", serial=given["serial"], number=number)
                continue
            self.driven += 1
            self._ask("done", serial=given["serial"], number=number, loss=driven.loss,
                      logged=driven.logged)

    def _follow(self, members: list[list[tuple[Address, float, float]]]) -> None:
        """Take the leading trainer's peers."""
        for stage, (there, here) in enumerate(zip(members, self.members.stages, strict=True)):
            new = {tuple(address): about for address, *about in there}
            for address in set(here) - new.keys():
                self.members.leave(stage, address)
            for address in new.keys() - set(here):
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
