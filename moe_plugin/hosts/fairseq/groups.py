"""Process groups of the ranks that share experts, and communicators for the MoE layers."""

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
    """The process groups of one model.

    Attributes:
        expert: process group of the ranks that together store one copy of the experts.
        replicas: number of copies of the experts.
        world: number of data-parallel ranks.
    """

    expert: Comm
    replicas: int
    world: int


class MeasuredComm(TorchComm):
    """A `TorchComm` that can measure the time spent exchanging rows, or skip the exchange.

    The flags `--record-a2a-perf-stats` and `--dummy-a2a` use this class. For every exchange, the
    time on the host is measured. On a CUDA device, the time between two events is measured as well.
    Views of this group (created by `with_tag`) add their times to the same totals.
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
        """Call `TorchComm.all_to_all` and measure the time of the call."""
        if self.dummy and x.is_floating_point():
            rows = sum(piece_lengths(x.shape[0], self.size, recv, "all_to_all receive"))
            return x[:rows].clone() if rows <= x.shape[0] else torch.cat(
                [x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
        with self._timed(x):
            return super().all_to_all(x, send, recv)

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Call `TorchComm.send_receive` and measure the time of the call.

        With `--dummy-a2a`, only the exchange of rows is skipped. Row counts are still exchanged.
        """
        if self.dummy and all(x.is_floating_point() for _, x in (*sends, *recvs)):
            for _, buffer in recvs:
                buffer.zero_()
            return
        with self._timed(*(x for _, x in (*sends, *recvs))):
            super().send_receive(sends, recvs)

    @contextmanager
    def _timed(self, *tensors: Tensor) -> Iterator[None]:
        if not self.measured or self._inside:  # an all-to-all made of exchanges is counted once
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
        """Return the total times of all exchanges since the last call, in milliseconds, as (cpu_ms,
        cuda_ms). This method waits for the device.
        """
        if self._events:
            self._events[-1][1].synchronize()
        cpu_ms, cuda_ms = sum(self._cpu_s) * 1000, sum(
            begin.elapsed_time(end) for begin, end in self._events)
        self._cpu_s.clear()
        self._events.clear()
        return cpu_ms, cuda_ms


class Turns:
    """Makes all ranks that evaluate together agree on the MoE layer to compute next.

    Calling an MoE layer is a collective operation. However, ranks make different calls during
    evaluation, because they may have different numbers of batches or decode sentences of different
    lengths. Each rank therefore waits before each call of an MoE layer. The next layer to compute
    is the layer with the lowest index for which any rank waits. Ranks that wait for another layer,
    or that have already finished, take part in the call without tokens.

    Args:
        comm: communicator of all ranks that evaluate together. Ranks that store copies of the same
            experts are included.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._layers: list[Callable[[], object]] = []

    def add_layer(self, take_part: Callable[[], object]) -> int:
        """Register a layer, in the same order on all ranks, and return its index.

        take_part: function that calls the layer without tokens.
        """
        self._layers.append(take_part)
        return len(self._layers) - 1

    def wait_for(self, number: int) -> None:
        """Take part in the calls of other layers until all ranks agree to compute layer `number`.

        All ranks that wait for layer `number` then call the layer.
        """
        while (turn := self._next(number)) != number:
            self._layers[turn]()

    def end(self) -> None:
        """Take part in the calls of other ranks until all ranks have finished."""
        if self._layers:
            self.wait_for(len(self._layers))

    def _next(self, number: int) -> int:
        return -int(self.comm.agree_max([-number])[0])


@dataclass
class Evaluation:
    """Settings for building and loading models that are used only for evaluation.

    Attributes:
        ranks: number of processes that evaluate together. Each process evaluates a share of the
            batches.
        asked: number of ranks that share one copy of the experts, as requested by the user. If 0,
            each copy of the experts is distributed over as many ranks as possible.
        turns: the `Turns` object of these processes. The `Turns` object is created together with
            the first model whose experts are distributed over ranks.
        drops: counts of the tokens that were dropped in the batches of the current process.
    """

    ranks: int = 1
    asked: int = 0
    turns: Turns | None = None
    drops: DropCount = field(default_factory=DropCount)

    def expert_ranks(self, experts: int) -> int:
        """Return the number of ranks that share one copy of a model's experts.

        By default, this is the greatest common divisor of the numbers of ranks and experts.

        Raises:
            ValueError: If the number of ranks that the user requests is invalid.
        """
        if not self.asked:
            return math.gcd(self.ranks, experts)
        size = self.asked
        if size < 1 or self.ranks % size or (experts % size and size % experts):
            raise ValueError(
                f"moe_expert_parallel_size={size} is out of bounds. It must divide the "
                f"{self.ranks} evaluating processes, and divide or be a multiple of "
                f"num_experts={experts}. Use {math.gcd(self.ranks, experts)}, or leave it out")
        return size

    @property
    def rank(self) -> int:
        """The rank of the current process among the processes that evaluate together."""
        return dist.get_rank() if self.ranks > 1 else 0

    def groups(self, experts: int, timeout_s: float) -> FairseqGroups:
        """Create the process groups of a model, in the same order on all ranks."""
        size = self.expert_ranks(experts)
        if size == 1:
            return FairseqGroups(LocalComm(), 1, 1)
        shorten_timeouts(timeout_s)
        if self.turns is None:
            self.turns = Turns(TorchComm(None, timeout_s))
        return FairseqGroups(TorchComm(_consecutive(size, timeout_s), timeout_s), 1, size)


@contextmanager
def evaluating(ranks: int = 1) -> Iterator[Evaluation]:
    """Mark all models that are built inside the block as used only for evaluation.

    The marked models are loaded from a checkpoint for validation, scoring or generation. All models
    in a command share one `Evaluation` object.

    Args:
        ranks: number of processes that evaluate together. These processes form the default process
            group. A single process stores all experts.
    """
    outer = _evaluation.get()
    token = _evaluation.set(outer or Evaluation(ranks))
    try:
        yield _evaluation.get()  # type: ignore[misc]
    finally:
        _evaluation.reset(token)


def current_evaluation() -> Evaluation | None:
    """Return the current `Evaluation`, or None outside of `evaluating`."""
    return _evaluation.get()


def make_groups(expert_parallel_size: int, timeout_s: float, *, measured: bool = False,
                dummy: bool = False) -> FairseqGroups:
    """Create the process groups of a model, in the same order on all ranks.

    Args:
        expert_parallel_size: number of consecutive ranks that share one copy of the experts, or 0
            for all ranks.
        timeout_s: timeout of these process groups, in seconds. The timeout is also an upper bound
            for the timeouts of fairseq's own groups.
        measured: True to measure the time spent exchanging rows.
        dummy: True to skip exchanging rows.
    Raises:
        ValueError: If `expert_parallel_size` does not divide the number of ranks.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        if expert_parallel_size > 1:
            raise ValueError(
                f"--moe-expert-parallel-size {expert_parallel_size} is out of bounds. There is "
                "only 1 data-parallel rank. Use 0")
        return FairseqGroups(LocalComm(), 1, 1)
    shorten_timeouts(timeout_s)
    size = expert_parallel_size or world
    if size < 1 or world % size:
        raise ValueError(
            f"--moe-expert-parallel-size {expert_parallel_size} is out of bounds. It must divide "
            f"the {world} data-parallel ranks. Use 0 for all of them")
    if size == 1:
        return FairseqGroups(LocalComm(), world, world)
    group = _consecutive(size, timeout_s)
    comm = MeasuredComm(group, timeout_s, measured, dummy) if measured or dummy else TorchComm(
        group, timeout_s)
    return FairseqGroups(comm, world // size, world)


def _consecutive(size: int, timeout_s: float) -> dist.ProcessGroup:
    """Return the process group that consists of `size` consecutive ranks, including the current
    rank. This is a collective operation.

    Groups are cached. If the size changes back to an earlier value, no new connections are opened.
    """
    part = TorchComm(None, timeout_s).contiguous_subgroup(size)
    assert isinstance(part, TorchComm)
    return part.group
