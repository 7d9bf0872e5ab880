"""`Comm`, the only interface through which a layer communicates with other ranks.

A `Comm` is a group of ranks with the collectives that are defined below. The collectives do not
support autograd. The differentiable versions are in `moe_plugin.comm.functional`. Hierarchical
all-to-all algorithms send point-to-point messages in the same group (`send_receive`), so they do
not need additional process groups.

In a group of one rank, every collective is a copy.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_plugin.comm.group import CommError, RankGroup, key_of
from moe_plugin.comm.new_group import too_many
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.forest.network import Network
from moe_plugin.utils.registry import Registry

__all__ = ["Comm", "CommError", "Messages", "piece_lengths"]
Messages = Sequence[tuple[int, Tensor]]
# Returns the network of a group, and a description of where the network comes from.
FindNetwork = Callable[[], tuple[Network, str]]


class Collectives:
    """The collectives that gather and sum a layer's data over ranks. This class uses the
    collectives of the backend.

    The data consists of expert parameters and their gradients, partial results of ranks with the
    same tokens, and gradients of replicas. Subclasses implement different algorithms. An
    algorithm's plans and measurements are stored in the group's state. Numbers on which ranks agree
    (counts, capacities, losses) are small, and are always sent with the group's own collectives.
    """

    name = "native"

    @classmethod
    def make(cls, comm: Comm, network: FindNetwork, cluster: Cluster | None) -> Collectives:
        """Return the collectives for a prepared group. All ranks must call this method.

        network: function that returns the network between the ranks of the group.
        cluster: optional. Cluster description that is used to predict which collectives are faster.
        By default the collectives are measured instead.
        """
        return NATIVE

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        """Concatenate the tensors `x` [n, ...] of all ranks to [size * n, ...]. All shapes must be
        equal.
        """
        return comm.all_gather(x)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        """Sum the tensors `x` [size * n, ...] over ranks, and return this rank's part [n, ...]."""
        return comm.reduce_scatter(x)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        """Return the sum of `x` [...] over ranks, a new tensor that is equal on all ranks."""
        _count_all_reduce(comm, x)
        return comm.all_reduce(x)

    def start_all_reduce(self, comm: Comm, x: Tensor) -> Callable[[], Tensor]:
        """Start to sum `x` over ranks. `x` may be overwritten; see `Comm.start_all_reduce`."""
        _count_all_reduce(comm, x)
        return comm.start_all_reduce(x)

    def part(self, ranks: Sequence[int]) -> Collectives:
        """Return the collectives for the subgroup of `ranks` (indices in this group)."""
        return self

    def seconds(self, comm: Comm, kind: str, size: int) -> float | None:
        """Predict the time in seconds of a collective (`kind`: all_gather, reduce_scatter or
        all_reduce).

        size: size in bytes of the whole tensor, over all ranks.

        The result is None if the collective times in the cluster file for this backend can be used
        unchanged.
        """
        return None

    def active(self, comm: Comm) -> str:
        """Return the name under which statistics report the collectives that are used in a
        group."""
        return self.name

    def describe(self, comm: Comm) -> str:
        """Describe the collectives that are used in a group, and the reason for their choice."""
        return "native, the backend's own"


def _count_all_reduce(comm: Comm, x: Tensor) -> None:
    """Count the bytes that each rank sends in a ring all-reduce, because backends do not report
    them.
    """
    comm.counters.sent(2 * (comm.size - 1), 2 * (comm.size - 1) * x.nbytes // comm.size)


NATIVE = Collectives()
collective_kinds: Registry[type[Collectives]] = Registry("collectives", base=Collectives)
collective_kinds.register("native")(Collectives)


class Comm(RankGroup):
    """A group of ranks and its collectives.

    Attributes:
        receive_first: True if the fastest linear all-to-all on this backend consists of
            point-to-point messages whose receives are all posted first.
        threaded: whether exchanges may run in a different thread (on views created by `with_tag`).
        key: key by which torch operations find the group (see `comm.graph_ops`), or None.
        tag: number that separates exchanges that run at the same time; see `with_tag`.
        collectives: implementation that gathers and sums data; see `with_collectives`.
    """

    receive_first: bool = False
    threaded: bool = False
    key: str | None = None
    tag: int = 0
    collectives: Collectives = NATIVE

    @abstractmethod
    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """Exchange pieces along dimension 0 using the backend's all-to-all.

        Rank i's j-th piece becomes rank j's i-th piece.

        Args:
            x: contiguous tensor [sum(send), ...] of any dtype.
            send: optional. Length of the piece sent to each rank. By default all lengths are equal.
            recv: optional. Length of the piece received from each rank. Defaults to equal lengths.
        Returns:
            A new tensor [sum(recv), ...] of the same dtype that contains the pieces in rank order.
        """

    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        """Start an all-to-all of equal pieces of `x`, and return a function that awaits the result.

        All ranks must start their exchanges in the same order. `x` [size * n, ...] must be
        contiguous and must not change until the exchange completes.
        """
        received = self.all_to_all(x)
        return lambda: received

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return the element-wise `sum` or `max` over ranks as a new tensor, equal on all ranks.

        x: tensor of any shape, which must be the same on all ranks.
        """

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to sum `x` over ranks, and return a function that waits for the sum and returns it.

        All ranks must start their collectives in the same order. `x` must have the same shape on
        all ranks and may be overwritten. In this base class the sum is complete when the method
        returns.
        """
        total = self.all_reduce(x)
        return lambda: total

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors `x` [n, ...] of all ranks, concatenated to a new tensor [size * n,
        ...]. All shapes must be equal.
        """

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum the tensors `x` [size * n, ...] over ranks, and return this rank's piece [n, ...] as
        a new tensor.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return a copy of `x` on rank `root`. The shape must be the same on all ranks."""

    @abstractmethod
    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Exchange point-to-point messages. All receives are posted before any send.

        Every rank of the group must call this method, with empty lists if it has no messages.

        Args:
            sends: the pair (peer, contiguous nonempty tensor of any dtype) for each message sent.
            recvs: the pair (peer, contiguous buffer to fill) for each incoming message.
        """

    def post(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Start point-to-point messages as in `send_receive`, and return a function that waits for
        them.

        Only the ranks that send or receive messages need to call this method. These ranks may call
        it in any order. Messages between the same two ranks are matched in the order in which they
        are posted if their tags are equal. The tensors must not change until the messages complete.
        In this base class the messages are complete when the method returns.
        """
        self.send_receive(sends, recvs)
        return lambda: None

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """Return the `Comm` of some ranks of this group on these ranks, and None on all other
        ranks.

        Collective: all ranks call this method, in the same order. The topology of the subgroup is
        the corresponding part of this group's topology.
        """

    @contextmanager
    def error_context(self, describe: Callable[[], str]) -> Iterator[None]:
        """Convert a failure inside the block to a `CommError` that contains the rank, group,
        collective and sizes.

        describe: function that returns a description of the collective and its sizes. The function
        is called only after a failure, or at the start if the collective may fail asynchronously.
        """
        if self.fails_later:
            self.state.started.append(describe())
        try:
            yield
        except CommError:
            raise
        except (RuntimeError, ValueError) as error:
            remedy = too_many(error)
            raise self.error(f"{describe()} failed: {error}{remedy and '; ' + remedy}"
                             f"{self._started_before()}"
                             f"{self.missing_ranks()}") from error

    def _started_before(self) -> str:
        """Return the collectives that may have caused a failure that is reported asynchronously."""
        before = list(self.state.started)[:-1]
        return f"; started before it, and perhaps the cause: {'; '.join(before)}" if before else ""

    def contiguous_subgroup(self, size: int) -> Comm:
        """Return the subgroup of `size` consecutive ranks that contains this rank.

        `size` must divide the size of this group. The first call with each size is collective.
        Traffic in the subgroup is counted in this group's counters.
        """
        ranks = [range(first, first + size) for first in range(0, self.size, size)]
        view = copy.copy(self._own_part(ranks))
        view.counters = self.counters
        return view.with_collectives(self.collectives.part(ranks[self.rank // size]))

    def strided_subgroup(self, stride: int) -> Comm:
        """Return the subgroup of all ranks whose distance from this rank is divisible by `stride`.

        `stride` must divide the size of this group. The first call with each stride is collective.
        """
        return self._own_part([range(first, self.size, stride) for first in range(stride)])

    def _own_part(self, parts: Sequence[range]) -> Comm:
        """Given the parts of this group, return the subgroup of the part that contains this rank.
        The first call for each part is collective.
        """
        own_part = next(part for part in parts if self.rank in part)
        if own_part not in self.state.subgroups:
            made = {part: self.subgroup(part) for part in parts}
            self.state.subgroups[own_part] = made[own_part]
        group: Comm = self.state.subgroups[own_part]
        return group

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called this method."""

    @property
    def hosts(self) -> Comm:
        """A group of the same ranks for numbers in host memory. Hosts do not wait for devices in
        this group.

        If this group accepts CPU tensors, the result is this group. Otherwise the result is a
        separate group, which is created collectively on first use.
        """
        return self

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that this rank has sent to other ranks of the group."""
        return self.counters.bytes

    def with_tag(self, tag: int) -> Comm:
        """Return a view of this group that can be used in a different thread. Messages with
        different tags are never confused.
        """
        view = copy.copy(self)
        view.tag = tag
        return view

    def with_collectives(self, collectives: Collectives) -> Comm:
        """Return a view of this group that uses `collectives` to gather and sum its data."""
        if collectives is self.collectives:
            return self
        view = copy.copy(self)
        view.collectives = collectives
        if self.key is not None:
            view.key = key_of(view)
        return view

    def agree_max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over ranks of numbers in host memory. The result is equal
        on all ranks.

        The maximum is computed with point-to-point messages in the group `hosts`, in log2(size)
        rounds.
        """
        maxima = torch.tensor(list(values), dtype=torch.float64)
        step = 1
        while step < self.size:
            received = torch.empty_like(maxima)
            self.hosts.send_receive([((self.rank + step) % self.size, maxima)],
                                    [((self.rank - step) % self.size, received)])
            maxima = torch.maximum(maxima, received)
            step *= 2
        return maxima.tolist()


def piece_lengths(length: int, size: int, splits: Sequence[int] | None, what: str) -> list[int]:
    """Return the lengths of the pieces into which `length` rows are split for `size` ranks.

    what: name of the argument, which is used in error messages.

    A `ValueError` is raised if the number of splits differs from the number of ranks, or if the
    rows cannot be split equally.
    """
    if splits is not None:
        if len(splits) != size:
            raise ValueError(
                f"{what} splits {list(splits)} have {len(splits)} entries, but the group has "
                f"{size} ranks; pass one entry per rank")
        return list(splits)
    if length % size:
        raise ValueError(
            f"{what}: {length} rows cannot be split into {size} equal pieces; pass splits")
    return [length // size] * size


# Collectives by name: the function, and the number of output rows for n input rows on W ranks.
COLLECTIVES: dict[str, tuple[Callable[[Comm, Tensor], Tensor], Callable[[int, int], int]]] = {
    "all_to_all": (lambda comm, x: comm.all_to_all(x), lambda n, size: n),
    "all_gather": (lambda comm, x: comm.collectives.all_gather(comm, x),
                   lambda n, size: n * size),
    "reduce_scatter": (lambda comm, x: comm.collectives.reduce_scatter(comm, x),
                       lambda n, size: n // size),
    "all_reduce": (lambda comm, x: comm.collectives.all_reduce(comm, x), lambda n, size: n),
    "all_max": (lambda comm, x: comm.all_reduce(x, "max"), lambda n, size: n),
    "own_part": (lambda comm, x: x.chunk(comm.size)[comm.rank].clone(),
                 lambda n, size: n // size),
}


class LocalComm(Comm):
    """A group that contains only this rank. Nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1, "local")

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """Return a copy of `x` [n, ...]."""
        return x.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return a copy of `x`, which may have any shape."""
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """Return a copy of `x` [n, ...]."""
        return x.clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return a copy of `x` [n, ...]."""
        return x.clone()

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return a copy of `x`, which may have any shape."""
        return x.clone()

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Copy each tensor of `sends` to the buffer of `recvs` with the same index."""
        for (_, source), (_, target) in zip(sends, recvs, strict=True):
            target.copy_(source)

    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """Return this group if `ranks` is [0], else None."""
        return self if list(ranks) == [0] else None

    def barrier(self) -> None:
        """Return immediately."""
