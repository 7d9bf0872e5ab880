"""`Swarm`: trains a pipeline whose stages are served by peers that differ in speed, come and go
(SWARM, Ryabinin et al. 2023).

Every micro-batch takes a way of its own: at each stage the peer that is free first
(`planner.peer_choice.Wiring`). A task that gets no answer is sent again, to another peer. The
trainer keeps the inputs of every stage until the step ends, so that the others of its stage compute
again what a lost peer had summed; micro-batches that another trainer drove (`rounds`) are driven
again for that. At a step's end the peers of a stage sum their gradients (a
butterfly all-reduce, by bandwidth) and step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_plugin.training.resilience.swarm.journeys import Driven, Driver, MicroBatches, RoundId
from moe_plugin.training.resilience.swarm.members import Alarm, Member, SwarmMembers
from moe_plugin.training.resilience.swarm.messages import (
    OPEN,
    WIRES,
    Access,
    Address,
    Connections,
    Message,
    MessageServer,
    PeerError,
    ask,
)
from moe_plugin.training.resilience.swarm.rounds import SharedRounds
from moe_plugin.training.resilience.swarm.stage import load_swarm, save_swarm
from moe_plugin.utils.folder_lock import FolderLock, hold_saved

log = logging.getLogger(__name__)
# by (stage, micro-batch): who did the backward pass, and what it got, if this trainer asked for it
_Taken = dict[tuple[int, int], tuple[Address, Message | None]]


@dataclass
class SwarmStep:
    """What became of a step.

    Attributes:
        losses: of each micro-batch, balance losses included.
        norm: of all gradients, before clipping.
        logged: what the loss function returned in addition, for each micro-batch.
        by: which trainer drove each micro-batch; empty text: this one.
        resent: tasks that were sent again.
        redone: backward passes whose gradients were lost with a peer, and computed by another.
        gone: addresses of peers that were lost.
        moved: (address, stage it left, stage it serves).
    """

    losses: list[float] = field(default_factory=list)
    norm: float = 0.0
    logged: list[Message] = field(default_factory=list)
    by: list[str] = field(default_factory=list)
    resent: int = 0
    redone: int = 0
    gone: list[Address] = field(default_factory=list)
    moved: list[tuple[Address, int, int]] = field(default_factory=list)


class Swarm:
    """The trainer of a swarm, or the leading one of several (`JoinedTrainer`).

    Args:
        stages: number of them.
        host, port: where peers find it; port 0: any, see `address`.
        wire: how boundaries travel: `none`, `bf16`, `fp16`, `fp8` or `mxfp8`, with the bounds of
            `dispatch.wire`.
        dtype: of boundaries in memory.
        in_flight: micro-batches at a time; 0: two for each peer.
        clip: the largest norm of all gradients together; None: any.
        timeout_s: without an answer, after which a task is sent to another peer.
        rebalance_s: after so many seconds, between two steps, a peer moves to the slowest stage, if
            the pipeline gets 1.1 times faster by it; None: never.
        seed: of weights and random numbers.
        target_to_all: send a micro-batch's target to all stages, whose modules are called with it
            as their second argument.
        resume: a folder that `save` wrote.
        secret: that peers must know, too. Optional; without one, anybody who reaches `host` can
            take part.
        message_bytes: the largest message, such as a stage's weights and optimizer state.

    Attributes:
        address: for `StagePeer`.
        members: who serves which stage.
        steps: done.
    Raises:
        ValueError: an argument is out of bounds, or `resume` is not a folder of `save`.
    """

    def __init__(self, stages: int, *, host: str = "127.0.0.1", port: int = 0, wire: str = "fp8",
                 dtype: torch.dtype = torch.float32, in_flight: int = 0, clip: float | None = None,
                 timeout_s: float = 60.0, rebalance_s: float | None = 60.0, seed: int = 0,
                 target_to_all: bool = False,
                 resume: str | os.PathLike[str] | None = None, secret: str | None = None,
                 message_bytes: int = OPEN.message_bytes) -> None:
        if stages < 1 or in_flight < 0 or timeout_s <= 0:
            raise ValueError(f"swarm: stages={stages} must be >= 1, in_flight={in_flight} >= 0 and "
                             f"timeout_s={timeout_s} > 0")
        if wire not in WIRES:
            raise ValueError(f"swarm: unknown wire {wire!r}; known: {', '.join(WIRES)}")
        self.stages, self.in_flight, self.clip, self.timeout_s = stages, in_flight, clip, timeout_s
        self.steps = 0
        self._first: list[Message | None] = [None] * stages
        if resume is not None:
            self.steps, self._first = load_swarm(resume, stages)
        self._run = {"seed": seed, "wire": wire, "dtype": dtype, "timeout_s": timeout_s,
                     "target_to_all": target_to_all}
        self.members, self._clock = SwarmMembers(stages, seed), Alarm(rebalance_s)
        self._locks: dict[str, FolderLock | None] = {}  # of the folders of `save`
        self._access = Access(secret, message_bytes)
        self._connections = Connections(timeout_s, self._access)
        self._taken: _Taken = {}
        self._result, self._whole, self._refused = SwarmStep(), True, ""
        self._ledger, self._evaluations = threading.Lock(), 0
        self._rounds = SharedRounds(lambda: self.members, self._run, lambda: self.steps,
                                    self._took, self._ban)
        self._driver = Driver(stages, self.members, self._connections, self._took, self._ban,
                              self._run)
        self._server = MessageServer(host, port, self._answer, self._access)
        self.address = self._server.address

    def wait_for(self, peers: int) -> None:
        """Wait until so many peers are here, for `timeout_s`.

        Raises: TimeoutError: there are fewer.
        """
        if not self.members.wait_for(peers, self.timeout_s):
            raise TimeoutError(f"{len(self.members)} of {peers} peers have come to {self.address} "
                               f"within {self.timeout_s} s")

    def step(self, micro_batches: MicroBatches) -> SwarmStep:
        """A step with micro-batches (input [B, ...], target): `accumulate` and `update`."""
        result = self.accumulate(micro_batches)
        self.update()
        return result

    def accumulate(self, micro_batches: MicroBatches) -> SwarmStep:
        """The passes of a step; its gradients wait at the peers for `update`.

        Raises: RuntimeError: a stage has no peer, or each one of its peers fails, with the reason.
        """
        self._result = result = SwarmStep()
        self._taken, self._driver.resent = {}, 0
        if not self._whole:
            self._ask_members("forget", lambda stage, me: {})
        self._whole = False
        self._place()
        with self._round(("train", self.steps, 0), micro_batches) as again:
            result.norm = self._reduce(again)
        result.resent = self._driver.resent
        return result

    def update(self, skip: bool = False, groups: Sequence[Message] = ()) -> None:
        """Let all peers step with the gradients of `accumulate`, clipped.

        Args:
            skip: no weight and no state of an optimizer changes.
            groups: new values of the optimizers' parameter groups, such as `{"lr": 0.1}`; one with
                `wd_mult` is for groups with the same `wd_mult` alone.
        """
        norm = self._result.norm
        scale = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        self._ask_members("apply", lambda stage, me: {
            "step": self.steps, "scale": None if skip else scale, "groups": list(groups)})
        self.steps, self._whole, self._first = self.steps + 1, True, [None] * self.stages
        self._evaluations = 0

    def evaluate(self, micro_batches: MicroBatches) -> SwarmStep:
        """Losses of micro-batches, without training, by stages in evaluation mode."""
        self._result, self._evaluations = SwarmStep(), self._evaluations + 1
        self._place()
        with self._round(("evaluate", self.steps, self._evaluations), micro_batches):
            return self._result

    @contextlib.contextmanager
    def _round(self, about: RoundId, micro_batches: MicroBatches
               ) -> Iterator[Callable[[int], object]]:
        """Drive all micro-batches, with the trainers that have joined. They get the result at the
        end of the block, which may drive a micro-batch again.
        """
        now, result, done = self._rounds.begin(about, len(micro_batches)), self._result, False

        def again(number: int) -> Driven:
            return self._driver.journey(*about[:2], number, micro_batches[number])

        def work() -> None:
            try:
                for number in now.numbers(self.timeout_s):
                    now.done(number, again(number))
            except BaseException:
                now.end()
                raise

        try:
            threads = min(now.count, self.in_flight or 2 * len(self.members))
            with ThreadPoolExecutor(threads) as pool:
                _results([pool.submit(work) for _ in range(threads)])
            found = [now.found[number] for number in range(now.count)]
            result.losses = [driven.loss for driven in found]
            result.logged = [driven.logged for driven in found]
            result.by = [now.by[number] for number in range(now.count)]
            yield again
            done = True
        finally:
            self._rounds.end(about, {"losses": result.losses, "logged": result.logged,
                                     "norm": result.norm} if done else None, result.by)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write every stage's weights and optimizer, for `resume`; a killed save leaves what was
        there. The folder is this trainer's until `close`.

        Raises: ValueError: another run has the folder, see `moe_plugin.utils.folder_lock`.
        """
        if (name := os.path.realpath(folder)) not in self._locks:
            self._locks[name] = hold_saved(folder)
        return save_swarm(folder, self.steps, [self._state(stage) for stage in range(self.stages)])

    def close(self) -> None:
        """Tell the peers that training has ended, once the other trainers know the last result."""
        for lock in filter(None, self._locks.values()):
            lock.release()
        self._locks.clear()
        self._rounds.wait_until_known()
        waiting = (member.address for member in self.members.newcomers)
        for address in itertools.chain(*self.members.stages, waiting):
            try:
                ask(address, "stop", self.timeout_s, self._access)
            except (OSError, PeerError):
                log.debug("peer %s does not answer any more", address)
        self._server.close()

    # -- who serves what

    def _answer(self, request: Message) -> Message:
        what = request.pop("do")
        if what in SharedRounds.REQUESTS:
            return self._rounds.answer(what, request)
        self.members.here(Member(tuple(request["address"]), request["bandwidth"],
                                 request["throughput"]))
        return {}

    def _place(self) -> None:
        """Newcomers go where the throughput is least; then one peer may move there."""
        for member in self.members.newcomers:
            self._become(member, self.members.place(member))
        self._all_served()
        move = self.members.best_move() if self._clock.rings() else None
        if move is not None:
            member, stage, slow = move
            self.members.leave(stage, member.address)
            if self._become(member, slow):
                self._result.moved.append((member.address, stage, slow))
                log.info("peer %s moves from stage %d to stage %d", member.address, stage, slow)

    def _become(self, member: Member, stage: int) -> bool:
        others = self.members.stages[stage]
        if not others and self.steps and self._first[stage] is None:
            raise self._lost(stage)
        try:
            ask(member.address, "become", 2 * self.timeout_s, self._access, number=stage,
                step=self.steps, source=others[0] if others else None,
                state=None if others else self._first[stage], **self._run)
        except (OSError, PeerError) as error:
            log.warning("peer %s did not take stage %d: %s", member.address, stage, error)
            self._refused = f"; {member.address} did not take it: {error}"
            self.members.leave(stage, member.address)
            return False
        self.members.serve(member, stage)
        return True

    def _ban(self, stage: int, address: Address, why: object) -> None:
        if self.members.leave(stage, address) is not None:
            self._result.gone.append(address)
            self._connections.close(address)
            log.warning("peer %s of stage %d is lost: %s", address, stage, why)

    def _all_served(self) -> None:
        for stage, members in enumerate(self.members.stages):
            if not members:
                raise self._lost(stage)

    def _lost(self, stage: int) -> RuntimeError:
        lost = self.steps and self._first[stage] is None
        return RuntimeError(f"stage {stage} of {self.stages} has no peer; " + (
            "its weights are gone with them: continue from the last folder of `save`"
            if lost else "start a peer for each stage, and `wait_for` them") + self._refused)

    # -- tasks

    def _took(self, stage: int, number: int, address: Address, values: Message | None) -> bool:
        """Count a backward pass, if none of this micro-batch counts at this stage yet."""
        with self._ledger:
            before = self._taken.get((stage, number))
            if before is not None and before[0] in self.members.stages[stage]:
                return True
            self._taken[stage, number] = (address, values)
        try:
            with self._connections.to(address) as connection:
                connection.send({"do": "count", "task": (self.steps, number)})
        except OSError as error:
            self._ban(stage, address, error)
            return False
        return True

    # -- a step's end

    def _reduce(self, again: Callable[[int], object]) -> float:
        """Let the peers of each stage sum; returns the norm of all. again: drives a micro-batch."""
        norms: dict[int, float] = {}
        for attempt in range(1 + len(self.members)):
            left = [stage for stage in range(self.stages) if stage not in norms]
            self._redo(left, again)
            members = self.members.stages
            found = self._ask_members("reduce", lambda stage, me: {
                "key": (self.steps, attempt), "members": members[stage], "me": me,
                "micro_batches": self._taken_by(stage, members[stage][me]),
                "bandwidths": self.members.bandwidths(stage)}, left, members)
            norms.update({stage: norm for stage, norm in found.items()
                          if not self._missing([stage], members)})
            if len(norms) == self.stages:
                return sum(norm ** 2 for norm in norms.values()) ** 0.5
        raise RuntimeError(f"the gradients of stages {left} could not be summed; see the log")

    def _taken_by(self, stage: int, address: Address) -> list[int]:
        return [n for (s, n), (peer, _) in self._taken.items() if (s, peer) == (stage, address)]

    def _missing(self, stages: Sequence[int], members: list[list[Address]]
                 ) -> list[tuple[int, int]]:
        """(stage, micro-batch) of the gradients that none of these members has."""
        with self._ledger:
            return [(stage, n) for (stage, n), (address, _) in self._taken.items()
                    if stage in stages and address not in members[stage]]

    def _redo(self, stages: Sequence[int], again: Callable[[int], object]) -> None:
        """Compute again what peers that are lost had summed, until no such gradient is left: the
        peer that is asked may be lost, too, with what it had summed before.
        """
        while lost := self._missing(stages, self.members.stages):
            stage, number = lost[0]
            values = self._taken[stage, number][1]
            if values is None:  # another trainer had the inputs
                again(number)
            else:
                self._driver.task(stage, self.steps, number, "backward", values)
            self._result.redone += 1

    def _ask_members(self, what: str, values: Callable[[int, int], Message],
                     stages: Iterable[int] | None = None,
                     members: list[list[Address]] | None = None) -> dict[int, float]:
        """Ask all members of these stages at once, and ban those that do not answer.

        Returns: by stage whose members have all done it, the norm that they tell.
        """
        members = members or self.members.stages
        chosen = range(self.stages) if stages is None else stages
        with ThreadPoolExecutor(max(1, len(self.members))) as pool:
            # a peer may wait for another one, and that one for what a third one sends
            asked = {(stage, address): pool.submit(ask, address, what, 3 * self.timeout_s,
                                                   self._access, **values(stage, me))
                     for stage in chosen for me, address in enumerate(members[stage])}
        found, failed = {}, set()
        for (stage, address), future in asked.items():
            try:
                answer = future.result()
                if not answer.get("complete", True):
                    raise ConnectionError("gradients that it computed are missing")
                found[stage] = answer.get("norm", 0.0)
            except (OSError, PeerError) as error:
                failed.add(stage)
                # one that cannot sum waited for another, which is banned
                if what != "reduce" or isinstance(error, OSError):
                    self._ban(stage, address, error)
        self._all_served()
        return {stage: norm for stage, norm in found.items() if stage not in failed}

    def _state(self, stage: int) -> Message:
        while True:
            self._all_served()
            address = self.members.stages[stage][0]
            try:
                return ask(address, "state", self.timeout_s, self._access)["state"]
            except (OSError, PeerError) as error:
                self._ban(stage, address, error)


def _results(futures: list[Future]) -> list[Any]:
    """Of all; where one fails, those that have not begun are cancelled."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
