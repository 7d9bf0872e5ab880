"""Average gradients over the ranks that store the same parameters. Gradients are averaged in
buckets during the backward pass.

Each bucket is reduced by a single all-reduce. The all-reduce of a bucket starts as soon as all
gradients in the bucket are complete. In the meantime, backward computes the gradients of earlier
layers. All ranks start the all-reduces in the same order. Averaging gradients that are already
averaged does not change them. Gradients may therefore be averaged either after every backward pass
or only after the last one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.training.gradients.part_gradients import mark_gradient

BUCKET_BYTES = 25 * 2**20


def mark_replicas(parameter: Tensor, ranks: int) -> None:
    """Mark an expert parameter with the number of ranks that store it."""
    parameter.expert_replicas = ranks  # type: ignore[attr-defined]


def replicas_of(parameter: Tensor) -> int:
    """Return the number of ranks that store an expert parameter, or 1 if it is not marked."""
    return getattr(parameter, "expert_replicas", 1)


class _Groups:
    """The process groups that `replica_comm` has created.

    Each group is stored, by owner and ranks, for as long as its owner exists.
    """

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[object, dict[tuple[int, ...], Comm | None]] = (
            weakref.WeakKeyDictionary())


def replica_comm(experts: Comm, world: Comm, owner: object | None = None) -> Comm | None:
    """Return a process group of the ranks that store the same experts as this rank, or None if no
    other rank stores these experts.

    All ranks of `world` must call this function.

    Args:
        experts: expert-parallel group of this rank. If this group has only one rank, every rank
            stores all experts.
        world: group of all data-parallel ranks.
        owner: optional. The object to which the group belongs. Later calls with the same owner and
            ranks return the same group. A run that often changes its expert-parallel size therefore
            does not run out of connections. Without an owner, every call creates a new group.
    Raises:
        ValueError: If the expert-parallel groups do not cover all ranks of `world`.
    """
    if world.size == 1:
        return None
    position = torch.tensor([experts.rank, experts.size], dtype=torch.int64, device=world.device)
    places = world.all_gather(position).view(-1, 2).tolist()
    alike = [rank for rank, other in enumerate(places) if other == places[world.rank]]
    if len(alike) * experts.size != world.size:
        raise ValueError(
            f"an expert group of {experts.size} ranks times {len(alike)} replicas is "
            f"{experts.size * len(alike)} ranks, but the world has {world.size} ranks; every rank "
            "must be in one expert group, and all expert groups must have the same size")
    if len(alike) == 1:
        return None
    if owner is None:
        return world.subgroup(alike)
    known = world.state.get(_Groups).of.setdefault(owner, {})
    if tuple(alike) not in known:
        known[tuple(alike)] = world.subgroup(alike)
    return known[tuple(alike)]


class Bucket:
    """Parameters with the same dtype and device whose gradients are reduced together.

    Attributes:
        touched: whether any gradient in the bucket has changed since the last call of `finish`.
        started: whether the all-reduce has started and has not finished.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.touched = parameters, False
        self._passes: dict[nn.Parameter, int] = {}
        self._stale = False
        self._wait: Callable[[], Tensor] | None = None

    @property
    def started(self) -> bool:
        return self._wait is not None

    def ready(self, passes: int) -> bool:
        """Return true if every gradient contains the contributions of `passes` backward passes."""
        return all(self._passes.get(parameter, 0) >= passes for parameter in self.parameters)

    def add(self, parameter: nn.Parameter) -> None:
        """Record that a backward pass has contributed to the gradient of this parameter."""
        self._passes[parameter] = self._passes.get(parameter, 0) + 1
        self.touched, self._stale = True, self.started

    @torch.no_grad()
    def start(self, comm: Comm) -> None:
        """Start averaging the gradients over the ranks of `comm`. Missing gradients are zero."""
        flat_N = torch.cat([
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
            for p in self.parameters
        ])
        self._wait = comm.collectives.start_all_reduce(comm, flat_N.div_(comm.size))
        self._stale = False

    @torch.no_grad()
    def finish(self, comm: Comm) -> None:
        """Wait for the averages, and copy them to the gradients of the parameters."""
        if self._wait is not None and self._stale:  # changed after the start, on all ranks
            self._wait()
            self.start(comm)
        if self._wait is not None:
            parts = self._wait().split([p.numel() for p in self.parameters])
            for parameter, part_N in zip(self.parameters, parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = part_N.view_as(parameter).clone()
                    mark_gradient(parameter)
                else:
                    parameter.grad.copy_(part_N.view_as(parameter))
        self._reset()

    def forget(self) -> None:
        """Discard the contributions of a failed backward pass.

        If an all-reduce has already started, it is completed first, because the other ranks of the
        group also wait for it.
        """
        if self._wait is not None:
            self._wait()
        self._reset()

    def _reset(self) -> None:
        self._wait, self.touched, self._stale = None, False, False
        self._passes.clear()


def in_buckets(parameters: Iterable[nn.Parameter], size: int) -> list[list[nn.Parameter]]:
    """Group parameters that have the same dtype and device into lists of at most `size` bytes, in
    order.

    A parameter that is larger than `size` is placed in a separate list.
    """
    made: list[list[nn.Parameter]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        bytes_ = parameter.numel() * parameter.element_size()
        bucket, filled = open_.get(kind, ([], size))
        if filled + bytes_ > size:
            bucket, filled = [], 0
            made.append(bucket)
        bucket.append(parameter)
        open_[kind] = (bucket, filled + bytes_)
    return made


class ReplicaReducer:
    """Averages gradients over the ranks that store the same parameters, during backward.

    Args:
        parameters: parameters in the order of the forward pass. All ranks of `comm` must pass the
            same order.
        comm: the ranks. This group must not be used for other collectives.
        bucket_bytes: maximum size of the gradients in one all-reduce, in bytes.
        at_end_of_backward: whether gradients are complete when `backward` returns (True), or only
            after a call of `finish` (False).

    Attributes:
        passes: number of backward passes per optimizer step. The all-reduces start during the last
            backward pass before the optimizer step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], comm: Comm, *,
                 bucket_bytes: int = BUCKET_BYTES, at_end_of_backward: bool = True) -> None:
        self.comm, self.passes = comm, 1
        # The backward pass that will call `finish` at its end. A failed pass never calls `finish`.
        self._at_end, self._queued = at_end_of_backward, -1
        # autograd keeps a callback alive until its pass ends or fails
        self._open: weakref.WeakSet[functools.partial[None]] = weakref.WeakSet()
        # reversed, because backward reaches the last layer first
        self._buckets = [Bucket(each)
                         for each in in_buckets(reversed(list(parameters)), bucket_bytes)]
        self._next = 0
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def added(parameter: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if self._at_end and self._queued != task:
                self._begin(task)
            bucket.add(parameter)  # type: ignore[arg-type]
            self._start_ready()

        return added

    def _begin(self, task: int) -> None:
        """Register a callback that calls `finish` at the end of the backward pass `task`.

        If a reentrant backward pass runs inside an outer backward pass, the outer pass has not
        ended at that time.
        """
        if self._queued != -1 and not self._open:
            self.forget()
        self._queued, begun = task, functools.partial(self.finish)
        self._open.add(begun)
        torch.autograd.Variable._execution_engine.queue_callback(begun)

    def _start_ready(self) -> None:
        while self._next < len(self._buckets) and self._buckets[self._next].ready(self.passes):
            self._buckets[self._next].start(self.comm)
            self._next += 1

    def finish(self) -> None:
        """Complete all gradients that have changed since the last call.

        If there was a backward pass, all ranks must call this method. If a parameter has no
        gradient on this rank, it receives the average over all ranks, in which missing gradients
        count as zero.
        """
        self._queued = -1
        for bucket in self._touched():
            if not bucket.started:
                bucket.start(self.comm)
        for bucket in self._touched():
            bucket.finish(self.comm)
        self._next = 0

    def forget(self) -> None:
        """Discard the contributions of a backward pass that failed on all ranks.

        If `finish` runs at the end of backward, the next backward pass calls this method
        automatically. Collective.
        """
        for bucket in self._buckets:
            bucket.forget()
        self._next, self._queued = 0, -1

    def _touched(self) -> Iterator[Bucket]:
        return (bucket for bucket in self._buckets if bucket.touched)
