"""`Comm`: the only interface through which a layer communicates with other ranks.

A `Comm` is a group of ranks with the collectives below, without autograd; the differentiable forms
are in `moe_plugin.comm.functional`. Hierarchical all-to-all
algorithms are sets of point-to-point messages in the same group (`send_receive`), so they need no
further process groups.

A group of one rank: every collective is a copy.
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


# the network of a group, and where it comes from in words
FindNetwork = Callable[[], tuple[Network, str]]


class Collectives:
    """How the data of a layer is gathered and summed over ranks: expert parameters and their
    gradients, the parts of ranks that have the same tokens, gradients of replicas. These are the
    backend's own.

    Others are subclasses. What is planned or measured for a group is kept with the group. Numbers
    on which ranks agree (counts, capacities, losses) do not pass here: they are small, and go as
    the group itself does it.
    """

    name = "native"

    @classmethod
    def make(cls, comm: Comm, network: FindNetwork, cluster: Cluster | None) -> Collectives:
        """Those of a prepared group; collective.

        Args:
            network: gives the network between its ranks.
            cluster: by which to predict what is faster; None: measure.
        """
        return NATIVE

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        """All ranks' `x` along dimension 0: [n, ...], alike on all ranks, to [size * n, ...]."""
        return comm.all_gather(x)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        """This rank's part of the sum over ranks: [size * n, ...] to [n, ...]."""
        return comm.reduce_scatter(x)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        """The sum of `x` over ranks, any shape, a new tensor equal on all ranks."""
        _count_all_reduce(comm, x)
        return comm.all_reduce(x)

    def start_all_reduce(self, comm: Comm, x: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of `x`, which may be overwritten; see `Comm.start_all_reduce`."""
        _count_all_reduce(comm, x)
        return comm.start_all_reduce(x)

    def part(self, ranks: Sequence[int]) -> Collectives:
        """Those of a subgroup of these ranks (indices in the group)."""
        return self

    def seconds(self, comm: Comm, kind: str, size: int) -> float | None:
        """Predicted seconds of `kind` (all_gather, reduce_scatter, all_reduce) for `size` bytes of
        the whole; None: those that a cluster file gives for the backend's own.
        """
        return None

    def active(self, comm: Comm) -> str:
        """Name of what runs in a group, for statistics."""
        return self.name

    def describe(self, comm: Comm) -> str:
        """What runs in a group and why, in words."""
        return "native, the backend's own"


def _count_all_reduce(comm: Comm, x: Tensor) -> None:
    """Count the bytes that each rank sends in a ring all-reduce; backends do not report theirs."""
    comm.counters.sent(2 * (comm.size - 1), 2 * (comm.size - 1) * x.nbytes // comm.size)


NATIVE = Collectives()
collective_kinds: Registry[type[Collectives]] = Registry("collectives", base=Collectives)
collective_kinds.register("native")(Collectives)


class Comm(RankGroup):
    """A group of ranks and its collectives.

    Attributes:
        receive_first: whether point-to-point messages with all receives posted first are the
            faster linear all-to-all here.
        threaded: whether exchanges may run in another thread (on views made by `with_tag`).
        key: by which operations of torch find the group (`comm.graph_ops`); None: they do not.
        tag: tells apart exchanges that run at the same time, see `with_tag`.
        collectives: how data is gathered and summed here, see `with_collectives`.
    """

    receive_first: bool = False
    threaded: bool = False
    key: str | None = None
    tag: int = 0
    collectives: Collectives = NATIVE

    @abstractmethod
    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """Exchange along dimension 0 by the backend's own all-to-all.

        Rank i's j-th piece becomes rank j's i-th piece.

        Args:
            x: [sum(send), ...], contiguous, any dtype.
            send: lengths of the pieces to each rank; None: equal pieces.
            recv: lengths of the pieces from each rank; None: equal pieces.
        Returns: a new tensor [sum(recv), ...] of the same dtype, pieces in rank order.
        """

    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin to exchange equal pieces; what is returned waits for it and gives them.

        x: as for `all_to_all`, left alone until then. All ranks start theirs in the same order.
        """
        received = self.all_to_all(x)
        return lambda: received

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """A new tensor like `x`, equal on all ranks: element-wise `sum` or `max` over ranks.

        x: any shape, the same on all ranks.
        """

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begin the sum of `x` over ranks; what is returned waits for it and gives it.

        x: any shape, the same on all ranks; it may be overwritten. All ranks start their
        collectives in the same order. Here the sum is complete on return.
        """
        total = self.all_reduce(x)
        return lambda: total

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x` concatenated along dimension 0.

        x: [n, ...], the same shape on all ranks. Returns: a new tensor [size * n, ...].
        """

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's piece of the sum over ranks.

        x: [size * n, ...], the same shape on all ranks. Returns: a new tensor [n, ...].
        """

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """A new tensor equal to `x` of rank `root`.

        x: any shape, the same on all ranks.
        """

    @abstractmethod
    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Point-to-point messages. All receives are posted before any send.

        Every rank of the group calls it, with empty lists where it has nothing to send or receive.

        Args:
            sends: (peer, contiguous tensor) for each message out; any dtype, not empty.
            recvs: (peer, contiguous buffer to fill) for each message in.
        """

    def post(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Begin point-to-point messages; what is returned waits for them.

        Any rank may call it, in any order; only messages with one tag between two ranks meet in
        the order in which they are posted. Here they are complete on return.

        sends, recvs: see `send_receive`; tensors must not change until the end.
        """
        self.send_receive(sends, recvs)
        return lambda: None

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """The `Comm` of these ranks (indices in this group); None on other ranks.

        Collective: all ranks call it, in the same order. It has its part of this group's topology.
        """

    @contextmanager
    def error_context(self, describe: Callable[[], str]) -> Iterator[None]:
        """Raise a failure inside as a `CommError` that names rank, group, collective and sizes.

        describe: the collective and its sizes in words; called only after a failure, except where
            it may also be the cause of a later one.
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
        """The collectives of which a failure may be, where one fails later than it is called."""
        before = list(self.state.started)[:-1]
        return f"; started before it, and perhaps the cause: {'; '.join(before)}" if before else ""

    def contiguous_subgroup(self, size: int) -> Comm:
        """The subgroup of `size` consecutive ranks that this rank is in.

        size: divides the size of this group. The first use of a size is collective. What is sent
        in the subgroup counts in this group's counters.
        """
        ranks = [range(first, first + size) for first in range(0, self.size, size)]
        view = copy.copy(self._own_part(ranks))
        view.counters = self.counters
        return view.with_collectives(self.collectives.part(ranks[self.rank // size]))

    def strided_subgroup(self, stride: int) -> Comm:
        """The subgroup of this rank and all those a multiple of `stride` ranks away.

        stride: divides the size of this group. The first use of a stride is collective.
        """
        return self._own_part([range(first, self.size, stride) for first in range(stride)])

    def _own_part(self, parts: Sequence[range]) -> Comm:
        """The subgroup of the part that this rank is in; its first use is collective."""
        own = next(part for part in parts if self.rank in part)
        if own not in self.state.subgroups:
            made = {part: self.subgroup(part) for part in parts}
            self.state.subgroups[own] = made[own]
        found: Comm = self.state.subgroups[own]
        return found

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @property
    def hosts(self) -> Comm:
        """These ranks for numbers that hosts know: its tensors are in host memory.

        This group, where that takes such tensors; else another one over the same ranks, whose first
        use is collective. Hosts wait for each other in it, and for no device.
        """
        return self

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks of the group."""
        return self.counters.bytes

    def with_tag(self, tag: int) -> Comm:
        """A view of this group for another thread: its messages do not mix with other tags'."""
        view = copy.copy(self)
        view.tag = tag
        return view

    def with_collectives(self, collectives: Collectives) -> Comm:
        """A view of this group whose data is gathered and summed by `collectives`."""
        if collectives is self.collectives:
            return self
        view = copy.copy(self)
        view.collectives = collectives
        if self.key is not None:
            view.key = key_of(view)
        return view

    def agree_max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks of numbers of the hosts, equal on all of them.

        Uses point-to-point messages between `hosts` only (log2 of size rounds).
        """
        mine = torch.tensor(list(values), dtype=torch.float64)
        step = 1
        while step < self.size:
            theirs = torch.empty_like(mine)
            self.hosts.send_receive([((self.rank + step) % self.size, mine)],
                                    [((self.rank - step) % self.size, theirs)])
            mine = torch.maximum(mine, theirs)
            step *= 2
        return mine.tolist()

def piece_lengths(length: int, size: int, splits: Sequence[int] | None, what: str) -> list[int]:
    """Lengths of the pieces of `length` rows for `size` ranks: `splits`, or equal ones.

    what: the argument's name, for the message.
    Raises: ValueError: another number of splits than ranks, or rows that cannot be split equally.
    """
    if splits is not None:
        if len(splits) != size:
            raise ValueError(
                f"{what} splits {list(splits)} name {len(splits)} ranks; the group has {size}")
        return list(splits)
    if length % size:
        raise ValueError(
            f"{what}: {length} rows cannot be split into {size} equal pieces; pass splits")
    return [length // size] * size


# collectives by name: what runs, and the number of rows that come out of n rows on W ranks
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
    """The group of this rank alone; nothing is sent."""

    def __init__(self) -> None:
        super().__init__(0, 1, "local")

    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """A copy of x, [n, ...]."""
        return x.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """A copy of x, any shape."""
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        """A copy of x, [n, ...]."""
        return x.clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A copy of x, [n, ...]."""
        return x.clone()

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """A copy of x, any shape."""
        return x.clone()

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Copy each tensor of `sends` to the buffer of `recvs` at the same index."""
        for (_, source), (_, target) in zip(sends, recvs, strict=True):
            target.copy_(source)

    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """This group, for ranks [0]; else None."""
        return self if list(ranks) == [0] else None

    def barrier(self) -> None:
        """Return at once."""
