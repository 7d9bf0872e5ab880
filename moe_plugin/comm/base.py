"""`Comm`, the only interface through which a layer communicates with other ranks.

A `Comm` is a group of ranks that provides the collectives defined in this module. The collectives
of `Comm` do not support autograd. Versions that support autograd are in
`moe_plugin.comm.functional`. Hierarchical all-to-all algorithms send point-to-point messages
(`send_receive`) within the same group, so they do not need additional process groups.

In a group with one rank, every collective returns a copy of its input.
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
    """The backend's own collectives, which gather a layer's data from all ranks or sum it over
    ranks. Subclasses implement other algorithms.

    The data consists of expert parameters and their gradients, partial outputs of ranks that share
    the same tokens, and gradients of replicas. The plans and measurements of an algorithm are
    stored in the group's state. Small values on which the ranks must agree (counts, capacities,
    losses) are always sent with the group's own collectives.
    """

    name = "native"

    @classmethod
    def make(cls, comm: Comm, network: FindNetwork, cluster: Cluster | None) -> Collectives:
        """Create the collectives for a group for which `prepare` has been called. All ranks must
        call this method.

        network: function that returns a description of the network between the ranks of the group.
        cluster: optional. Cluster description from which the fastest collectives are predicted. By
        default, the collectives are timed instead.
        """
        return NATIVE

    def all_gather(self, comm: Comm, x: Tensor) -> Tensor:
        """Concatenate the tensors `x` [n, ...] of all ranks to a tensor [size * n, ...]. `x` must
        have the same shape on all ranks.
        """
        return comm.all_gather(x)

    def reduce_scatter(self, comm: Comm, x: Tensor) -> Tensor:
        """Sum the tensors `x` [size * n, ...] over ranks, and return this rank's part [n, ...]."""
        return comm.reduce_scatter(x)

    def all_reduce(self, comm: Comm, x: Tensor) -> Tensor:
        """Return the sum of `x` [...] over ranks as a new tensor, which is equal on all ranks."""
        _count_all_reduce(comm, x)
        return comm.all_reduce(x)

    def start_all_reduce(self, comm: Comm, x: Tensor) -> Callable[[], Tensor]:
        """Start summing `x` over ranks. `x` may be overwritten; see `Comm.start_all_reduce`."""
        _count_all_reduce(comm, x)
        return comm.start_all_reduce(x)

    def part(self, ranks: Sequence[int]) -> Collectives:
        """Return the collectives for the subgroup that consists of `ranks` (indices in this group).
        """
        return self

    def seconds(self, comm: Comm, kind: str, size: int) -> float | None:
        """Predict the time of a collective in seconds. `kind` is all_gather, reduce_scatter or
        all_reduce.

        size: size in bytes of the whole tensor, over all ranks.

        Returns None if the collective times in the cluster file apply to this backend unchanged.
        """
        return None

    def active(self, comm: Comm) -> str:
        """Return the name that statistics use for the collectives of a group."""
        return self.name

    def describe(self, comm: Comm) -> str:
        """Describe which collectives are used in a group and why they were chosen."""
        return "native, the backend's own"


def _count_all_reduce(comm: Comm, x: Tensor) -> None:
    """Count the bytes of a ring all-reduce, because backends do not report them."""
    comm.counters.sent(2 * (comm.size - 1), 2 * (comm.size - 1) * x.nbytes // comm.size)


NATIVE = Collectives()
collective_kinds: Registry[type[Collectives]] = Registry("collectives", base=Collectives)
collective_kinds.register("native")(Collectives)


class Comm(RankGroup):
    """A group of ranks and its collectives.

    Attributes:
        receive_first: True if the fastest direct all-to-all on this backend uses point-to-point
            messages and posts all receives before any send.
        threaded: True if exchanges may run in another thread, on views created by `with_tag`.
        key: key that torch operations use to look up the group (see `comm.graph_ops`), or None.
        tag: number that distinguishes the messages of concurrent exchanges; see `with_tag`.
        collectives: object that gathers and sums data over ranks; see `with_collectives`.
    """

    receive_first: bool = False
    threaded: bool = False
    key: str | None = None
    tag: int = 0
    collectives: Collectives = NATIVE

    @abstractmethod
    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """Exchange pieces of `x` along dimension 0 with the backend's all-to-all.

        The j-th piece of rank i becomes the i-th piece of rank j.

        Args:
            x: contiguous tensor [sum(send), ...] of any dtype.
            send: optional. Lengths of the pieces sent to each rank. Defaults to equal lengths.
            recv: optional. Lengths of the pieces received from each rank. By default, all pieces
                have the same length.
        Returns:
            A new tensor [sum(recv), ...] of the same dtype that contains the pieces in rank order.
        """

    def start_all_to_all(self, x: Tensor) -> Callable[[], Tensor]:
        """Start an all-to-all of pieces of `x` that have equal length, and return a function that
        waits for the received pieces and returns them.

        All ranks must start their exchanges in the same order. `x` [size * n, ...] must be
        contiguous and must not change until the exchange completes.
        """
        received = self.all_to_all(x)
        return lambda: received

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Return the element-wise `sum` or `max` over ranks as a new tensor, which is equal on all
        ranks. `x` may have any shape, which must be the same on all ranks.
        """

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Start summing `x` over ranks, and return a function that waits for and returns the sum.

        All ranks must start their collectives in the same order. `x` must have the same shape on
        all ranks and may be overwritten. The base class returns only after the sum is complete.
        """
        total = self.all_reduce(x)
        return lambda: total

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors `x` [n, ...] of all ranks, concatenated to a new tensor [size * n,
        ...]. `x` must have the same shape on all ranks.
        """

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's piece [n, ...] of the sum of `x` [size * n, ...], as a new tensor."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return a copy of rank `root`'s tensor `x`. `x` must have the same shape on all ranks."""

    @abstractmethod
    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Exchange point-to-point messages. All receives are posted before any send.

        Every rank of the group must call this method, with empty lists if it has no messages.

        Args:
            sends: list of pairs (peer, contiguous nonempty tensor of any dtype), one per message.
            recvs: list of pairs (peer, contiguous buffer to fill), one for each message to receive.
        """

    def post(self, sends: Messages, recvs: Messages) -> Callable[[], None]:
        """Start messages as in `send_receive`, and return a function that waits for them.

        Only the ranks that send or receive messages need to call this method. The ranks may call
        this method in any order. If messages between the same two ranks have the same tag, they are
        matched in the order in which they are posted. The tensors must not change until the
        messages complete. The base class returns only after the messages are complete.
        """
        self.send_receive(sends, recvs)
        return lambda: None

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """Create a `Comm` for some ranks of this group. The method returns the `Comm` on these
        ranks and None on all other ranks.

        The method is collective: all ranks must call it in the same order. The subgroup's topology
        is this group's topology, restricted to the subgroup's ranks.
        """

    @contextmanager
    def error_context(self, describe: Callable[[], str]) -> Iterator[None]:
        """Convert a failure inside the block to a `CommError`, whose message names the rank, the
        group, the collective and the sizes.

        describe: function that returns a description of the collective and its sizes. The function
        is called only after a failure. If a collective may fail asynchronously, the function is
        also called at the start of the block.
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
        """List earlier collectives that may have caused a failure reported asynchronously."""
        before = list(self.state.started)[:-1]
        return f"; started before it, and perhaps the cause: {'; '.join(before)}" if before else ""

    def contiguous_subgroup(self, size: int) -> Comm:
        """Return the subgroup of `size` consecutive ranks that contains this rank.

        `size` must divide the size of this group. The first call with a given size is collective.
        Traffic in the subgroup is added to this group's counters.
        """
        ranks = [range(first, first + size) for first in range(0, self.size, size)]
        view = copy.copy(self._own_part(ranks))
        view.counters = self.counters
        return view.with_collectives(self.collectives.part(ranks[self.rank // size]))

    def strided_subgroup(self, stride: int) -> Comm:
        """Return the subgroup of all ranks whose index differs from this rank's by a multiple of
        `stride`.

        `stride` must divide the size of this group. The first call with a given stride is
        collective.
        """
        return self._own_part([range(first, self.size, stride) for first in range(stride)])

    def _own_part(self, parts: Sequence[range]) -> Comm:
        """Return the subgroup that contains this rank. The first call is collective."""
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
        """A group of the same ranks for collectives on tensors in host memory. Collectives in this
        group do not make the host wait for the device.

        If this group accepts CPU tensors, `hosts` is the group itself. Otherwise, `hosts` is a
        separate group, which a collective call creates on first use.
        """
        return self

    @property
    def bytes_sent(self) -> int:
        """Number of bytes that this rank has sent to other ranks of the group."""
        return self.counters.bytes

    def with_tag(self, tag: int) -> Comm:
        """Return a view of this group that can be used in another thread. Messages with different
        tags are never matched with each other.
        """
        view = copy.copy(self)
        view.tag = tag
        return view

    def with_collectives(self, collectives: Collectives) -> Comm:
        """Return a view of this group that uses `collectives` to gather and sum data."""
        if collectives is self.collectives:
            return self
        view = copy.copy(self)
        view.collectives = collectives
        if self.key is not None:
            view.key = key_of(view)
        return view

    def agree_max(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise maximum over ranks of a list of numbers in host memory. All ranks
        receive the same maxima.

        The maximum is computed in log2(size) rounds of messages within the `hosts` group.
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
    """Return the lengths of the pieces when `length` rows are split into one piece per rank.

    what: name of the collective, which is used in error messages.

    Raises a `ValueError` if the number of splits differs from the number of ranks, or if no splits
    are passed and the rows cannot be split equally.
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
        return x.clone()

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor) -> Tensor:
        return x.clone()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x.clone()

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.clone()

    def send_receive(self, sends: Messages, recvs: Messages) -> None:
        """Copy each tensor in `sends` to the buffer at the same index in `recvs`."""
        for (_, source), (_, target) in zip(sends, recvs, strict=True):
            target.copy_(source)

    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        return self if list(ranks) == [0] else None

    def barrier(self) -> None:
        """Return immediately."""
