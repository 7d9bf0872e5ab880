"""Which ranks share experts, and the communication of one model's MoE layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm import Comm, LocalComm, TorchComm
from moe_plugin.comm.base import Messages, piece_lengths
from moe_plugin.hosts.fairseq.compat.launch import shorten_timeouts
from moe_plugin.observe.features import DropCount
from moe_plugin.utils.machine import record_event

_evaluation: ContextVar[Evaluation | None] = ContextVar("moe_plugin_fairseq_evaluation",
                                                        default=None)


@dataclass(frozen=True)
class FairseqGroups:
    """Which ranks share what.

    Attributes:
        expert: the ranks that store one copy of the experts.
        replicas: how many copies there are.
        world: data-parallel ranks.
    """

    expert: Comm
    replicas: int
    world: int


class MeasuredComm(TorchComm):
    """A `TorchComm` that measures the exchange of rows, or leaves it out.

    For `--record-a2a-perf-stats` and `--dummy-a2a`.

    Host time is measured around every exchange; on a CUDA device also the time between events on
    the stream. Views of this group (`with_tag`) add to the same totals.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, measured: bool,
                 dummy: bool) -> None:
        super().__init__(group, timeout_s)
        self.measured, self.dummy = measured, dummy
        self._inside = False
        self._cpu_s: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """As `TorchComm.all_to_all`, measured."""
        if self.dummy and x.is_floating_point():
            rows = sum(piece_lengths(x.shape[0], self.size, recv, "all_to_all receive"))
            return x[:rows].clone() if rows <= x.shape[0] else torch.cat(
                [x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
        with self._timed(x):
            return super().all_to_all(x, send, recv)

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """As `TorchComm.send_receive`, measured. Counts are exchanged also under `--dummy-a2a`."""
        if self.dummy and all(x.is_floating_point() for _, x in (*sends, *recvs)):
            for _, buffer in recvs:
                buffer.zero_()
            return
        with self._timed(*(x for _, x in (*sends, *recvs))):
            super().send_receive(sends, recvs)

    @contextmanager
    def _timed(self, *tensors: Tensor) -> Iterator[None]:
        if not self.measured or self._inside:  # an all-to-all made of exchanges counts once
            yield
            return
        device = next((x.device for x in tensors if x.is_cuda), None)
        self._inside, start = True, time.perf_counter()
        begun = None if device is None else record_event(device)
        try:
            yield
        finally:
            self._inside = False
            self._cpu_s.append(time.perf_counter() - start)
            if device is not None and begun is not None:
                self._events.append((begun, record_event(device)))

    def take_times(self) -> tuple[float, float]:
        """(cpu_ms, cuda_ms) since the last call; waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        cpu_ms, cuda_ms = sum(self._cpu_s) * 1000, sum(
            begin.elapsed_time(end) for begin, end in self._events)
        self._cpu_s.clear()
        self._events.clear()
        return cpu_ms, cuda_ms


class Turns:
    """Which MoE layer is computed next, agreed by all ranks that evaluate together.

    A layer's call is collective, but evaluating ranks do not make the same calls: one has more
    batches, another decodes longer sentences. So a rank waits for its turn before each call. The
    layer with the lowest number that any rank waits for is next; ranks that wait for another one,
    or have nothing left, take part in it without tokens.

    Args:
        comm: all ranks that evaluate together, those with copies of the same experts too.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._layers: list[Callable[[], object]] = []

    def add_layer(self, take_part: Callable[[], object]) -> int:
        """Number of a layer; all ranks add the same layers in one order.

        take_part: a call of the layer without tokens.
        """
        self._layers.append(take_part)
        return len(self._layers) - 1

    def wait_for(self, number: int) -> None:
        """Take part in other calls until it is layer `number`'s turn. All ranks that wait for it
        then call it.
        """
        while (turn := self._next(number)) != number:
            self._layers[turn]()

    def end(self) -> None:
        """Take part in other ranks' calls until all ranks have ended. Collective."""
        if self._layers:
            self.wait_for(len(self._layers))

    def _next(self, number: int) -> int:
        return -int(self.comm.agree_max([-number])[0])


@dataclass
class Evaluation:
    """How models are built and loaded that only evaluate.

    Attributes:
        ranks: processes that evaluate together, each a part of the batches.
        asked: ranks that share one copy of the experts; 0: as many as fit.
        turns: of these processes, made with the first model whose experts are spread over them.
        drops: of this process's batches.
    """

    ranks: int = 1
    asked: int = 0
    turns: Turns | None = None
    drops: DropCount = field(default_factory=DropCount)

    def expert_ranks(self, experts: int) -> int:
        """Ranks that share one copy of a model's experts: the most that divide both numbers.

        Raises:
            ValueError: another number was asked for, and it does not fit.
        """
        if not self.asked:
            return math.gcd(self.ranks, experts)
        size = self.asked
        if size < 1 or self.ranks % size or (experts % size and size % experts):
            raise ValueError(
                f"moe_expert_parallel_size={size} is out of bounds: must divide the {self.ranks} "
                f"evaluating processes, and divide or be a multiple of num_experts={experts}; use "
                f"{math.gcd(self.ranks, experts)}, or leave it out")
        return size

    @property
    def rank(self) -> int:
        """This process among them."""
        return dist.get_rank() if self.ranks > 1 else 0

    def groups(self, experts: int, timeout_s: float) -> FairseqGroups:
        """The groups of a model that is built now. All ranks call it, in one order."""
        size = self.expert_ranks(experts)
        if size == 1:
            return FairseqGroups(LocalComm(), 1, 1)
        shorten_timeouts(timeout_s)
        if self.turns is None:
            self.turns = Turns(TorchComm(None, timeout_s))
        return FairseqGroups(TorchComm(_consecutive(size, timeout_s), timeout_s), 1, size)


@contextmanager
def evaluating(ranks: int = 1) -> Iterator[Evaluation]:
    """Models built inside only evaluate: validation, scoring, generation from a checkpoint.

    Where a whole command evaluates, its models take part in one `Evaluation`.

    Args:
        ranks: processes of the default group that evaluate together; 1: this process has all
            experts.
    """
    known = _evaluation.get()
    token = _evaluation.set(known or Evaluation(ranks))
    try:
        yield _evaluation.get()  # type: ignore[misc]
    finally:
        _evaluation.reset(token)


def current_evaluation() -> Evaluation | None:
    """Set while models are built that only evaluate."""
    return _evaluation.get()


def make_groups(expert_parallel_size: int, timeout_s: float, *, measured: bool = False,
                dummy: bool = False) -> FairseqGroups:
    """The groups of a model that is built now. All ranks call it, in one order.

    Args:
        expert_parallel_size: ranks that share one copy of the experts (consecutive ranks); 0: all.
        timeout_s: of these groups, and the longest that fairseq's own may have.
    Raises:
        ValueError: a size that does not divide the world.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        if expert_parallel_size > 1:
            raise ValueError(
                f"--moe-expert-parallel-size {expert_parallel_size} is out of bounds: must divide "
                "the 1 data-parallel rank; use 0"
            )
        return FairseqGroups(LocalComm(), 1, 1)
    shorten_timeouts(timeout_s)
    size = expert_parallel_size or world
    if size < 1 or world % size:
        raise ValueError(
            f"--moe-expert-parallel-size {expert_parallel_size} is out of bounds: must divide the "
            f"{world} data-parallel ranks; "
            "use 0 for all of them")
    if size == 1:
        return FairseqGroups(LocalComm(), world, world)
    group = _consecutive(size, timeout_s)
    mine = MeasuredComm(group, timeout_s, measured, dummy) if measured or dummy else TorchComm(
        group, timeout_s)
    return FairseqGroups(mine, world // size, world)


def _consecutive(size: int, timeout_s: float) -> dist.ProcessGroup:
    """This rank's group of `size` consecutive ranks of the job. Collective. It is made once, so
    that changes back and forth between sizes open no new connections.
    """
    part = TorchComm(None, timeout_s).contiguous_subgroup(size)
    assert isinstance(part, TorchComm)
    return part.group
