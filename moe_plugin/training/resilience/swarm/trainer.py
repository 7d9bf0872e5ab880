"""`Swarm` trains a pipeline on peers of unequal speed (SWARM, Ryabinin and others, 2023).

Peers compute the stages. Peers may join or leave at any time. In each stage, a micro-batch is
assigned to the peer that is expected to be free first (`planner.peer_choice.Wiring`). If a peer
does not answer a task in time, the task is sent to another peer. The trainer stores the inputs of
every stage until the end of the step, so that other peers can recompute the gradients of a lost
peer. If other trainers have processed a micro-batch (see `rounds`), it is processed again to obtain
these inputs. At the end of a step, the peers of each stage sum their gradients (a butterfly
all-reduce, weighted by bandwidth) and update the weights.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moe_plugin.training.resilience.swarm.journeys import (
    Alarm,
    Driven,
    Driver,
    Member,
    MicroBatches,
    RoundId,
    SwarmMembers,
)
from moe_plugin.training.resilience.swarm.messages import (
    OPEN,
    WIRES,
    Access,
    Address,
    Connections,
    Message,
    MessageServer,
    PeerError,
    SwarmStep,
    ask,
)
from moe_plugin.training.resilience.swarm.rounds import SharedRounds
from moe_plugin.training.resilience.swarm.stage import load_swarm, save_swarm
from moe_plugin.utils.folder_lock import FolderLock, hold_saved

log = logging.getLogger(__name__)
# by (stage, micro-batch): peer that ran the backward pass, and its request if this trainer sent it
_Taken = dict[tuple[int, int], tuple[Address, Message | None]]


class Swarm:
    """The trainer of a swarm. If there are several trainers, `Swarm` is the leading trainer and the
    others are `JoinedTrainer`s.

    Args:
        stages: number of pipeline stages.
        host, port: address under which peers can reach the trainer. If the port is 0, an arbitrary
            free port is used.
        wire: format of the tensors that are sent between stages: `none`, `bf16`, `fp16`, `fp8` or
            `mxfp8`. For error bounds, see `dispatch.wire`.
        dtype: dtype of the tensors between stages after decoding.
        in_flight: number of micro-batches that are processed at the same time, or 0 for two
            micro-batches per peer.
        clip: maximum L2 norm of all gradients together, or None for no clipping.
        timeout_s: time in seconds after which a task without an answer is sent to another peer.
        rebalance_s: interval in seconds at which peers may change their stage. After each interval,
            between two steps, one peer may move to the slowest stage if this would increase the
            throughput of the pipeline enough. None: never.
        seed: random seed of the initial weights and of random numbers during training.
        target_to_all: whether the modules of all stages receive the target as their second
            argument.
        resume: optional. A folder that `save` has written.
        secret: optional. A secret string that peers must know in order to connect. Without a
            secret, any machine that can reach `host` can join.
        message_bytes: maximum size of a message (such as the weights of a stage), in bytes.
        members: optional. The object that assigns peers to stages and micro-batches to peers.
            Defaults to `SwarmMembers(stages, seed)`.

    Attributes:
        address: address to pass to `StagePeer`.
        members: the peers of each stage.
        steps: number of completed steps.
    Raises:
        ValueError: If an argument is out of bounds, or if the folder `resume` was not written by
            `save`.
    """

    def __init__(self, stages: int, *, host: str = "127.0.0.1", port: int = 0, wire: str = "fp8",
                 dtype: torch.dtype = torch.float32, in_flight: int = 0, clip: float | None = None,
                 timeout_s: float = 60.0, rebalance_s: float | None = 60.0, seed: int = 0,
                 target_to_all: bool = False,
                 resume: str | os.PathLike[str] | None = None, secret: str | None = None,
                 message_bytes: int = OPEN.message_bytes,
                 members: SwarmMembers | None = None) -> None:
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
        self.members = SwarmMembers(stages, seed) if members is None else members
        self._clock = Alarm(rebalance_s)
        self._locks: dict[str, FolderLock | None] = {}  # locks of the folders of `save`
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
        """Wait up to `timeout_s` for `peers` peers to connect, or raise a `TimeoutError`."""
        if not self.members.wait_for(peers, self.timeout_s):
            raise TimeoutError(f"{len(self.members)} of {peers} peers have connected to "
                               f"{self.address} within {self.timeout_s} s")

    def step(self, micro_batches: MicroBatches) -> SwarmStep:
        """Run `accumulate` and `update` with micro-batches (input [B, ...], target)."""
        result = self.accumulate(micro_batches)
        self.update()
        return result

    def accumulate(self, micro_batches: MicroBatches) -> SwarmStep:
        """Run the forward and backward passes of a step. The gradients stay on the peers until
        `update` is called.

        If a stage has no peer, or if all of its peers have failed, a `RuntimeError` that states the
        reason is raised.
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
        """Clip the gradients of `accumulate`, and update the weights on all peers.

        Args:
            skip: whether to leave all weights and optimizer states unchanged.
            groups: new option values for the optimizers' parameter groups, such as `{"lr": 0.1}`.
                If a dictionary in `groups` contains `wd_mult`, it applies only to parameter groups
                with the same value of `wd_mult`.
        """
        norm = self._result.norm
        scale = 1.0 if self.clip is None else min(1.0, self.clip / (norm + 1e-6))
        self._ask_members("apply", lambda stage, me: {
            "step": self.steps, "scale": None if skip else scale, "groups": list(groups)})
        self.steps, self._whole, self._first = self.steps + 1, True, [None] * self.stages
        self._evaluations = 0

    def evaluate(self, micro_batches: MicroBatches) -> SwarmStep:
        """Compute the losses of micro-batches without training, in evaluation mode."""
        self._result, self._evaluations = SwarmStep(), self._evaluations + 1
        self._place()
        with self._round(("evaluate", self.steps, self._evaluations), micro_batches):
            return self._result

    @contextlib.contextmanager
    def _round(self, about: RoundId, micro_batches: MicroBatches
               ) -> Iterator[Callable[[int], object]]:
        """Process all micro-batches with all trainers, and send them the result."""
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
            results = [now.found[number] for number in range(now.count)]
            result.losses = [driven.loss for driven in results]
            result.logged = [driven.logged for driven in results]
            result.by = [now.by[number] for number in range(now.count)]
            yield again
            done = True
        finally:
            self._rounds.end(about, {"losses": result.losses, "logged": result.logged,
                                     "norm": result.norm} if done else None, result.by)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write all weights and optimizer states to a folder, which stays locked until `close` is
        called.

        If the process is killed during saving, the previous files stay valid. If another run uses
        the folder, a `ValueError` is raised.
        """
        if (name := os.path.realpath(folder)) not in self._locks:
            self._locks[name] = hold_saved(folder)
        return save_swarm(folder, self.steps, [self._state(stage) for stage in range(self.stages)])

    def close(self) -> None:
        """Wait until joined trainers have the last result, and end training on the peers."""
        for lock in filter(None, self._locks.values()):
            lock.release()
        self._locks.clear()
        self._rounds.wait_until_known()
        waiting = (member.address for member in self.members.newcomers)
        for address in itertools.chain(*self.members.stages, waiting):
            try:
                ask(address, "stop", self.timeout_s, self._access)
            except (OSError, PeerError):
                log.debug("peer %s no longer answers", address)
        self._server.close()

    # -- assignment of peers to stages

    def _answer(self, request: Message) -> Message:
        what = request.pop("do")
        if what in SharedRounds.REQUESTS:
            return self._rounds.answer(what, request)
        self.members.here(Member(tuple(request["address"]), request["bandwidth"],
                                 request["throughput"]))
        return {}

    def _place(self) -> None:
        """Assign new peers to the slowest stage, and then move at most one other peer to it."""
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
            log.warning("peer %s could not load stage %d: %s", member.address, stage, error)
            self._refused = f"; {member.address} could not load it: {error}"
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
            "its weights were lost with its peers; resume from the last folder of `save`"
            if lost else "start a peer for each stage, and call `wait_for`") + self._refused)

    # -- tasks

    def _took(self, stage: int, number: int, address: Address, values: Message | None) -> bool:
        """Count a backward pass, unless the micro-batch was already counted for this stage."""
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

    # -- end of a step

    def _reduce(self, again: Callable[[int], object]) -> float:
        """Sum the gradients over the peers of each stage, and return the norm of all gradients."""
        norms: dict[int, float] = {}
        for attempt in range(1 + len(self.members)):
            left = [stage for stage in range(self.stages) if stage not in norms]
            self._redo(left, again)
            members = self.members.stages
            stage_norms = self._ask_members("reduce", lambda stage, me: {
                "key": (self.steps, attempt), "members": members[stage], "me": me,
                "micro_batches": self._taken_by(stage, members[stage][me]),
                "bandwidths": self.members.bandwidths(stage)}, left, members)
            norms.update({stage: norm for stage, norm in stage_norms.items()
                          if not self._missing([stage], members)})
            if len(norms) == self.stages:
                return sum(norm ** 2 for norm in norms.values()) ** 0.5
        raise RuntimeError(f"the gradients of stages {left} could not be summed; see the log")

    def _taken_by(self, stage: int, address: Address) -> list[int]:
        return [n for (s, n), (peer, _) in self._taken.items() if (s, peer) == (stage, address)]

    def _missing(self, stages: Sequence[int], members: list[list[Address]]
                 ) -> list[tuple[int, int]]:
        """Return the pairs (stage, micro-batch) whose gradients none of these members stores."""
        with self._ledger:
            return [(stage, n) for (stage, n), (address, _) in self._taken.items()
                    if stage in stages and address not in members[stage]]

    def _redo(self, stages: Sequence[int], again: Callable[[int], object]) -> None:
        """Recompute the gradients of lost peers. If more peers are lost in the meantime, continue
        until no gradients are missing.
        """
        while lost := self._missing(stages, self.members.stages):
            stage, number = lost[0]
            values = self._taken[stage, number][1]
            if values is None:  # another trainer stored the inputs
                again(number)
            else:
                self._driver.task(stage, self.steps, number, "backward", values)
            self._result.redone += 1

    def _ask_members(self, what: str, values: Callable[[int, int], Message],
                     stages: Iterable[int] | None = None,
                     members: list[list[Address]] | None = None) -> dict[int, float]:
        """Send a request to all members of these stages. Members that do not answer are removed.

        Return the reported norm for each stage in which all members answered.
        """
        members = members or self.members.stages
        chosen = range(self.stages) if stages is None else stages
        with ThreadPoolExecutor(max(1, len(self.members))) as pool:
            # three timeouts, because a peer may wait for a second peer that waits for a third one
            asked = {(stage, address): pool.submit(ask, address, what, 3 * self.timeout_s,
                                                   self._access, **values(stage, me))
                     for stage in chosen for me, address in enumerate(members[stage])}
        norms, failed = {}, set()
        for (stage, address), future in asked.items():
            try:
                answer = future.result()
                if not answer.get("complete", True):
                    raise ConnectionError("gradients computed by this peer are missing")
                norms[stage] = answer.get("norm", 0.0)
            except (OSError, PeerError) as error:
                failed.add(stage)
                # a peer that cannot sum has waited for another peer, which is removed instead
                if what != "reduce" or isinstance(error, OSError):
                    self._ban(stage, address, error)
        self._all_served()
        return {stage: norm for stage, norm in norms.items() if stage not in failed}

    def _state(self, stage: int) -> Message:
        while True:
            self._all_served()
            address = self.members.stages[stage][0]
            try:
                return ask(address, "state", self.timeout_s, self._access)["state"]
            except (OSError, PeerError) as error:
                self._ban(stage, address, error)


def _results(futures: list[Future]) -> list[Any]:
    """Return the results of all futures. If one fails, cancel those that have not started."""
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise
