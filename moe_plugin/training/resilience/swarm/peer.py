"""A peer of a swarm. A peer computes one stage of a pipeline for all trainers. The peer stores the
weights and the optimizer of its stage, and sums its gradients with those of the other peers of the
stage.

A backward pass recomputes the stage from its input, so any peer of the stage can run the backward
pass of any micro-batch. The gradient of a backward pass is counted only after the trainer has
confirmed that it used the answer. Gradients of duplicate or late answers are discarded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from moe_plugin.planner.peer_choice import butterfly_weights
from moe_plugin.planner.spill import round_shares
from moe_plugin.training.resilience.swarm.journeys import BEATS
from moe_plugin.training.resilience.swarm.messages import (
    OPEN,
    Access,
    Address,
    Connection,
    Message,
    MessageServer,
    ask,
    packed,
    unpacked,
)
from moe_plugin.training.resilience.swarm.stage import (
    Loss,
    MakeOptimizer,
    MakeStage,
    ServedStage,
    make_stage,
)

log = logging.getLogger(__name__)
REQUESTS = {"become", "forward", "backward", "evaluate", "count", "forget", "reduce", "part",
            "apply", "state", "stop"}


class StagePeer:
    """A peer that computes one stage for a trainer.

    Args:
        trainer: address of the trainer (a `Swarm`).
        stages: for each stage, a function that creates the module of the stage. The module maps a
            tensor [B, ...] to a tensor or, like an MoE block, to (tensor, loss). All peers must use
            the same functions.
        optimizer: function that creates an optimizer for a list of parameters. If the optimizer
            clips gradients, it clips by the norm of its own stage. For clipping by the norm over
            all stages, see `Swarm`.
        loss: function of the last stage's output and the target. The function returns the
            contribution of a micro-batch to the loss of the step. The function may also return a
            tuple of this loss and a dictionary of additional values for the trainer.
        host: address under which the trainer and the other peers can reach this machine.
        device: device that computes the stage.
        bandwidth: network bandwidth of this machine, in any unit, as long as all peers use the same
            unit. The bandwidth determines the fraction of the gradients that this peer sums.
        throughput: tasks per second that the trainer assumes until it has measured this peer.
            Defaults to the mean throughput of the stage.
        timeout_s: time in seconds after which this peer terminates if it has no trainer. How long
            peers wait for each other is determined by the trainer.
        secret: see `Swarm`.
        message_bytes: see `Swarm`.
    """

    def __init__(self, trainer: Address, stages: Sequence[MakeStage], optimizer: MakeOptimizer,
                 loss: Loss, *, host: str = "127.0.0.1", device: str | torch.device = "cpu",
                 bandwidth: float = 1.0, throughput: float | None = None,
                 timeout_s: float = 60.0, secret: str | None = None,
                 message_bytes: int = OPEN.message_bytes) -> None:
        self.trainer, self.stages, self.loss = trainer, stages, loss
        self.optimizer, self.device = optimizer, torch.device(device)
        self.timeout_s = timeout_s
        self.stage: ServedStage | None = None
        self._wire = ("none", torch.float32)
        self._sums = _Sums()
        self._reduced: Tensor | None = None
        self._compute = threading.Lock()
        self._stopped = threading.Event()
        self._access = Access(secret, message_bytes)
        self._server = MessageServer(host, 0, self._answer, self._access)
        self.about = {"address": self._server.address, "bandwidth": bandwidth,
                      "throughput": throughput}

    def run(self) -> None:
        """Answer requests until the trainer terminates or has not answered for `timeout_s`.

        Raises:
            OSError: If no trainer answers at this address within `timeout_s`.
        """
        met, last = False, time.monotonic()
        while not self._stopped.is_set():
            try:
                connection = Connection.to(self.trainer, self.timeout_s, self._access)
                while not self._stopped.is_set():
                    connection.ask("here", **self.about)
                    met, last = True, time.monotonic()
                    self._stopped.wait(self.timeout_s / BEATS)
            except OSError:
                if time.monotonic() - last > self.timeout_s:
                    self.close()
                    if not met:
                        raise
                self._stopped.wait(self.timeout_s / BEATS)
        self._server.close()

    def close(self) -> None:
        """Leave immediately. The other peers continue without this peer."""
        self._stopped.set()
        self._server.close()

    def _answer(self, request: Message) -> Message | None:
        what = request.pop("do")
        if what not in REQUESTS:
            raise ValueError(f"unknown request {what!r}; known: {', '.join(sorted(REQUESTS))}")
        return getattr(self, f"_{what}")(**request)

    # -- requests of a trainer

    def _become(self, number: int, step: int, seed: int, wire: str, dtype: torch.dtype,
                timeout_s: float, target_to_all: bool, source: Address | None,
                state: Message | None) -> Message:
        self._sums.timeout_s = timeout_s
        if source is not None:
            state = ask(source, "state", timeout_s, self._access)["state"]
        with self._compute:
            last = number == len(self.stages) - 1
            stage = ServedStage(make_stage(self.stages, number, seed, self.device), self.optimizer,
                                self.loss if last else None, seed, step, target_to_all)
            if state is not None:
                stage.load(state)
            self.stage, self._wire = stage, (wire, dtype)
        return {}

    def _forward(self, task: tuple[int, int], x: list[Tensor], target: object = None,
                 train: bool = True) -> Message:
        return self._timed(lambda: {"x": packed(self._now(task[0]).forward(
            task[1], unpacked(x, *self._wire), target, train), self._wire[0])})

    def _backward(self, task: tuple[int, int], x: list[Tensor], grad: list[Tensor] | None,
                  target: object) -> Message:
        def work() -> Message:
            grad_x, loss, logged = self._now(task[0]).backward(
                task[1], unpacked(x, *self._wire),
                None if grad is None else unpacked(grad, *self._wire), target)
            return {"x": None if grad_x is None else packed(grad_x, self._wire[0]), "loss": loss,
                    "logged": logged}

        return self._timed(work)

    def _evaluate(self, task: tuple[int, int], x: list[Tensor], target: object) -> Message:
        return self._timed(lambda: dict(zip(("loss", "logged"), self._now(task[0]).evaluate(
            task[1], unpacked(x, *self._wire), target), strict=True)))

    def _timed(self, work: Callable[[], Message]) -> Message:
        """Run tasks one at a time. Add the waiting and working times, in seconds, to the answer."""
        start = time.perf_counter()
        with self._compute:
            begun = time.perf_counter()
            return {**work(), "queued": begun - start, "seconds": time.perf_counter() - begun}

    def _count(self, task: tuple[int, int]) -> None:
        if self.stage is not None and self.stage.step == task[0]:
            self.stage.count(task[1])

    def _forget(self) -> Message:
        with self._compute:
            if self.stage is not None:
                self.stage.forget()
        return {}

    def _reduce(self, key: tuple[int, int], micro_batches: list[int], members: list[Address],
                me: int, bandwidths: list[float]) -> Message:
        """Sum the gradients over all peers of the stage. Each peer sums one slice. The size of the
        slice is proportional to the bandwidth of the peer.

        `complete` is False if some of the gradients that the trainer expects are missing.
        """
        stage = self._now(key[0])
        if not self._has(stage, set(micro_batches)):
            return {"complete": False}
        sizes = round_shares(butterfly_weights(bandwidths), stage.size)

        def slice_of(member: Address, part: Tensor) -> Tensor:
            if not part.numel():
                return part
            # two timeouts, because the member may wait for a third peer
            return ask(member, "part", 2 * self._sums.timeout_s, self._access, key=key, source=me,
                       members=len(members), part=part.clone())["sum"]

        with ThreadPoolExecutor(len(members)) as pool:
            self._reduced = torch.cat(list(pool.map(slice_of, members,
                                                    stage.gradients.split(sizes))))
        return {"complete": True, "norm": stage.norm(self._reduced)}

    def _part(self, key: tuple[int, int], source: int, members: int, part: Tensor) -> Message:
        return {"sum": self._sums.add(key, source, members, part)}

    def _apply(self, step: int, scale: float | None, groups: list[Message]) -> Message:
        with self._compute:
            if self._reduced is None:
                raise ValueError(f"there is no sum of gradients for step {step}")
            self._now(step).apply(self._reduced, scale, groups)
            self._reduced = None
        self._sums.clear()
        return {}

    def _state(self) -> Message:
        with self._compute:
            if self.stage is None:
                raise ValueError("this peer has no stage")
            return {"state": self.stage.state()}

    def _stop(self) -> Message:
        self._stopped.set()
        return {}

    # -- parts

    def _now(self, step: int) -> ServedStage:
        if self.stage is None or self.stage.step != step:
            raise ValueError(f"a task of step {step} has arrived too late")
        return self.stage

    def _has(self, stage: ServedStage, wanted: set[int]) -> bool:
        """Wait until exactly the requested backward passes have been counted. Return false if this
        does not happen in time.

        Waiting is necessary because the trainer sends its confirmations on other connections, which
        may be slower.
        """
        end = time.monotonic() + self._sums.timeout_s
        while stage.counted != wanted:
            if time.monotonic() > end:
                return False
            time.sleep(1e-3)
        return True


class _Sums:
    """The gradient slices that this peer sums for all members of its stage."""

    def __init__(self) -> None:
        self.timeout_s = 0.0
        self._parts: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._changed = threading.Condition()

    def add(self, key: tuple[int, int], source: int, members: int, part: Tensor) -> Tensor:
        """Add the slice from one member, wait for the slices from all members, and return their
        sum. The slices are summed in the order of the members.

        Args:
            key: index of the step, and index of the attempt within the step.
            source: index of the member that sent the slice.
            members: number of members that send a slice.
            part: slice that the member sent.
        """
        with self._changed:
            parts = self._parts.setdefault((key[0], key[1]), {})
            parts[source] = part
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(parts) == members, self.timeout_s):
                missing = sorted(set(range(members)) - set(parts))
                raise TimeoutError(f"members {missing} sent no gradients within {self.timeout_s} s")
        return torch.stack([parts[i] for i in range(members)]).sum(0)

    def clear(self) -> None:
        """Discard all slices. Discard all slices. Called before the next step starts."""
        with self._changed:
            self._parts.clear()
