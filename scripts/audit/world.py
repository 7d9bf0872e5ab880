"""Processes that run the training steps of an audit, and report where they hang."""

from __future__ import annotations

import os
import pickle
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from scripts.audit.contract import Batch, Parts, Target, gradient, local, places
from scripts.emulate.ranks import RankProcess, fork, stop

GRACE_S = 2.0  # the time that other ranks have after one rank has failed
_PYTHON = sysconfig.get_paths()["stdlib"]
_TORCH = os.path.dirname(torch.__file__)


@dataclass
class RankStep:
    """The result of a training step on one rank.

    Attributes:
        loss: the loss that the step returned.
        norm: the gradient norm that the step returned.
        grads: for each tensor name, a list of pairs (positions in the flattened unsharded tensor,
            gradient at these positions), both [n]. The gradient is None if this slice of the tensor
            has no gradient.
        error: the last line of an exception, and the location at which it was raised.
        stuck: the function in which the rank was waiting when the time limit expired, and where it
            was called.
        late: whether another rank had failed earlier.
    """

    rank: int
    loss: float | None = None
    norm: float | None = None
    grads: dict[str, list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)
    error: str | None = None
    stuck: str | None = None
    late: bool = False

    @property
    def ended(self) -> bool:
        """Whether the rank completed its training step."""
        return self.error is None and self.stuck is None


class World:
    """A context manager that forks the processes of an audit. The forked processes form one gloo
    group, and each process builds the target's model.

    Args:
        ranks: the number of processes to fork.
        ep: the size of the expert-parallel groups.
        timeout_s: the time limit in seconds, both for building the model and for each step.
    """

    def __init__(self, target: Target, ranks: int, ep: int, timeout_s: float) -> None:
        self.target, self.ranks, self.ep, self.timeout_s = target, ranks, ep, timeout_s
        self.pipes: list[Connection] = []
        self.processes: list[RankProcess] = []
        self.alive = False

    def __enter__(self) -> World:
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.ranks):
            ours, theirs = Pipe()
            self.processes.append(fork(lambda r=rank, p=theirs: self._rank(r, p), None, rank))
            theirs.close()
            self.pipes.append(ours)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        stop(self.processes)
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    def built(self) -> list[RankStep]:
        """Wait until every rank has built its model or reported an error."""
        return self._answers()

    def step(self, weights: dict[str, Tensor], batches: Sequence[Batch]) -> list[RankStep]:
        """Run one training step on every rank, and return the results ordered by rank.

        If a rank does not complete the step, `alive` is set to False.

        Args:
            weights: the unsharded weights by name.
            batches: one batch per rank.
        """
        for pipe, batch in zip(self.pipes, batches, strict=True):
            pipe.send_bytes(pickle.dumps((weights, batch)))
        return self._answers()

    def _answers(self) -> list[RankStep]:
        found: dict[int, RankStep] = {}
        deadline = time.monotonic() + self.timeout_s + GRACE_S
        while len(found) < self.ranks and time.monotonic() < deadline:
            waiting = [p for rank, p in enumerate(self.pipes) if rank not in found]
            for pipe in wait(waiting, timeout=0.5):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                late = any(step.error is not None for step in found.values())
                found[rank] = replace(_received(rank, self.pipes[rank]), late=late)
                if found[rank].error is not None:  # the other ranks may wait for this rank forever
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in range(self.ranks):
            found.setdefault(rank, RankStep(rank, stuck="its step", late=True))
        self.alive = all(answer.ended for answer in found.values())
        return [found[rank] for rank in range(self.ranks)]

    def _rank(self, rank: int, pipe: Connection) -> None:
        import torch.distributed as dist

        os.dup2(2, 1)  # output of packages must not mix with the audit's own output
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(self.ranks),
                          LOCAL_WORLD_SIZE=str(self.ranks), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT="29500")
        dist.init_process_group("gloo", init_method=f"file://{self.folder.name}/store", rank=rank,
                                world_size=self.ranks)
        with _Reporting(rank, pipe, self.timeout_s) as answer:
            parts = self.target.build(*[self.ranks, self.ep][: 1 + self.target.takes_ep])
            answer(RankStep(rank))
        while True:
            weights, batch = pickle.loads(pipe.recv_bytes())
            with _Reporting(rank, pipe, self.timeout_s) as answer:
                answer(one_step(self.target, parts, weights, batch, rank))


def one_step(target: Target, parts: Parts, weights: dict[str, Tensor], batch: Batch,
             rank: int = 0) -> RankStep:
    """Set the weights, run a training step in this process, and return the loss, the norm and the
    gradients.
    """
    held = list(places(parts, {name: w.shape for name, w in weights.items()}))
    with torch.no_grad():
        for name, part, where in held:
            part.tensor.grad = None
            local(part).copy_(weights[name].flatten()[where])
    said = target.step(batch)
    answer = RankStep(rank, float(said["loss"]),
                      float(said["norm"]) if said.get("norm") is not None else None)
    for name, part, where in held:
        found = gradient(part)
        answer.grads.setdefault(name, []).append(
            (where.flatten(), None if found is None else found.double().flatten().clone()))
    return answer


class _Reporting:
    """Send the result of a rank to the parent process. If the time limit expires, send the current
    location of the rank instead.
    """

    def __init__(self, rank: int, pipe: Connection, timeout_s: float) -> None:
        self.rank, self.pipe, self.sent = rank, pipe, threading.Lock()
        self.thread = threading.get_ident()
        self.timer = threading.Timer(timeout_s, self._stuck)
        self.timer.daemon = True

    def __enter__(self) -> Any:
        self.timer.start()
        return self._send

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.timer.cancel()
        if error is not None:
            traceback.print_exception(error)
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
            self._send(RankStep(self.rank, error=f"{text} ({_place(traceback.extract_tb(trace))})"))

    def _send(self, answer: RankStep) -> None:
        if self.sent.acquire(blocking=False):  # only the first message is sent
            self.pipe.send_bytes(pickle.dumps(answer))

    def _stuck(self) -> None:
        frames = traceback.extract_stack(sys._current_frames()[self.thread])
        call = next((f.name for f in reversed(frames) if _is_collective(f)), None)
        said = frames[-1].name if call is None else call
        self._send(RankStep(self.rank, stuck=f"{said} ({_place(frames)})"))


def _is_collective(frame: traceback.FrameSummary) -> bool:
    return (f"{_TORCH}/distributed" in frame.filename
            and not frame.name.startswith(("_", "wrapper")))


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the file and line of the innermost stack frame outside of torch and the audit."""
    theirs = [f for f in frames if not f.filename.startswith((_TORCH, __file__, "<"))
              and ("site-packages" in f.filename or not f.filename.startswith(_PYTHON))]
    frame = (theirs or [*frames])[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}, {frame.name}"


def _received(rank: int, pipe: Connection) -> RankStep:
    try:
        answer: RankStep = pickle.loads(pipe.recv_bytes())
        return answer
    except (EOFError, ConnectionResetError):
        return RankStep(rank, error="the process ended without an answer")
