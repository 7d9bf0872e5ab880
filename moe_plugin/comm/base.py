"""`Comm`: the only interface through which a layer communicates with other ranks.

A `Comm` is a group of ranks with the collectives below, without autograd; the differentiable forms
are in `moe_plugin.comm.functional` and `moe_plugin.comm.regions`. Hierarchical all-to-all
algorithms are sets of point-to-point messages in the same group (`send_receive`), so they need no
further process groups.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.collectives import NATIVE, Collectives
from moe_plugin.comm.compiled import key_of
from moe_plugin.comm.job_abort import reason
from moe_plugin.comm.state import GroupState
from moe_plugin.comm.topology import Topology

Messages = Sequence[tuple[int, Tensor]]


class CommError(RuntimeError):
    """A collective failed or cannot run. The message names rank, collective and sizes."""


@dataclass
class Counters:
    """What this rank sent to other ranks through one `Comm`, its views and its subgroups.

    bytes, messages: totals. exchanges: number of all-to-alls by the algorithm that ran, which is
    `linear` where a hierarchical one falls back to it.
    """

    bytes: int = 0
    messages: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)

    def exchange(self, algorithm: str) -> None:
        """An all-to-all by this algorithm runs."""
        self.exchanges[algorithm] = self.exchanges.get(algorithm, 0) + 1

    def sent(self, messages: int, size: int) -> None:
        """So many messages of `size` bytes together leave this rank."""
        self.messages += messages
        self.bytes += size


class Comm(ABC):
    """A group of `size` ranks, of which this process (or thread) is `rank`.

    Args:
        rank, size: this rank's index in the group, and the number of ranks.
        name: of the group, for messages.
        state: what is known of the group; None: nothing yet.

    receive_first: whether point-to-point messages with all receives posted first are the faster
        linear all-to-all here.
    threaded: whether exchanges may run in another thread (on views made by `with_tag`).
    separate: whether ranks are processes of their own, whose settings may differ, see `agreement`.
    fails_later: whether a collective may fail after it has returned, so that the error is raised by
        another one.
    key: by which operations of torch find the group (`comm.compiled`); None: they do not.
    tag: tells apart exchanges that run at the same time, see `with_tag`.
    ranks: of the job, by rank of the group.
    collectives: how data is gathered and summed here, see `with_collectives`.
    """

    receive_first: bool = False
    threaded: bool = False
    separate: bool = False
    fails_later: bool = False
    key: str | None = None
    tag: int = 0
    ranks: Sequence[int] = (0,)
    collectives: Collectives = NATIVE

    def __init__(self, rank: int, size: int, name: str, state: GroupState | None = None) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.state = GroupState() if state is None else state
        self.counters = Counters()
        if size == 1 and self.state.topology is None:
            self.state.set_topology(Topology.one_node(1))

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

    def contiguous_subgroup(self, size: int) -> Comm:
        """The subgroup of `size` consecutive ranks that this rank is in.

        size: divides the size of this group. The first use of a size is collective. What is sent
        in the subgroup counts in this group's counters.
        """
        if size not in self.state.subgroups:
            made = [self.subgroup(range(start, start + size))
                    for start in range(0, self.size, size)]
            own = made[self.rank // size]
            assert own is not None  # this rank is in it
            self.state.subgroups[size] = own
        view = copy.copy(self.state.subgroups[size])
        view.counters = self.counters
        first = self.rank // size * size
        return view.with_collectives(self.collectives.part(range(first, first + size)))

    def strided_subgroup(self, stride: int) -> Comm:
        """The subgroup of this rank and all those a multiple of `stride` ranks away.

        stride: divides the size of this group. The first use of a stride is collective.
        """
        if stride not in self.state.strided:
            made = [self.subgroup(range(first, self.size, stride)) for first in range(stride)]
            own = made[self.rank % stride]
            assert own is not None  # this rank is in it
            self.state.strided[stride] = own
        return self.state.strided[stride]

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @property
    def device(self) -> torch.device:
        """Where tensors of this group must be."""
        return torch.device("cpu")

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

    @property
    def by_nodes(self) -> bool:
        """Whether all-gather and reduce-scatter go in two steps here, see `comm.by_nodes`."""
        return False

    @property
    def topology(self) -> Topology:
        """Which ranks share a node. Raises: CommError: `prepare` has not been called."""
        if self.state.topology is None:
            raise self.error("the topology is not known; call comm.prepare() on all ranks of the "
                             "group first")
        return self.state.topology

    def prepare(self, topology: Topology | None = None) -> Topology:
        """Agree on the group's topology. Collective: all ranks call it with equal arguments.

        topology: which ranks share a node; None: the one that is known, else it is detected.
        Another topology than before discards what was measured under that one.
        Raises: ValueError: the topology has another number of ranks.
        """
        if topology is None:
            topology = self.state.topology or self.detect_topology()
        if topology.size != self.size:
            raise ValueError(
                f"topology of {topology.size} ranks does not fit {self.name!r} with {self.size}; "
                "give one node list for all ranks of the group"
            )
        if topology != self.state.topology:
            self.state.set_topology(topology)
            for size, subgroup in self.state.subgroups.items():
                first = self.rank // size * size
                subgroup.prepare(topology.restrict(range(first, first + size)))
        return topology

    def detect_topology(self) -> Topology:
        """Ask the ranks on which node they run; collective. Here: all on one node."""
        return Topology.one_node(self.size)

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

    def exchange_ints(self, sends: Mapping[int, Sequence[int]],
                      recvs: Mapping[int, int]) -> dict[int, list[int]]:
        """Exchange integers between hosts (`hosts`). Those for this rank itself are not sent.

        Args:
            sends: by peer, the integers to send.
            recvs: by peer, how many integers it sends to this rank.
        Returns: by peer, the received integers.
        """
        def others(items: Mapping[int, Any]) -> list[int]:
            return [peer for peer in items if peer != self.rank]

        out = [(p, torch.tensor(list(sends[p]), dtype=torch.int64))
               for p in others(sends) if len(sends[p])]
        buffers = [(p, torch.empty(recvs[p], dtype=torch.int64))
                   for p in others(recvs) if recvs[p]]
        self.hosts.send_receive(out, buffers)
        got = {peer: buffer.tolist() for peer, buffer in buffers}
        got |= {p: [] for p in recvs if not recvs[p]}
        if self.rank in sends:
            got[self.rank] = list(sends[self.rank])
        return got

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
            raise self.error(f"{describe()} failed: {error}{self._started_before()}"
                             f"{self.missing_ranks()}") from error

    def _started_before(self) -> str:
        """The collectives of which a failure may be, where one fails later than it is called."""
        before = list(self.state.started)[:-1]
        return f"; started before it, and perhaps the cause: {'; '.join(before)}" if before else ""

    def error(self, text: str) -> CommError:
        """A `CommError` that begins with rank and group."""
        return CommError(f"rank {self.rank} of {self.size} in group {self.name!r}: {text}")

    def store(self) -> Any:
        """A key-value store that all ranks share, on its own connection; None: there is none."""
        return None

    def missing_ranks(self) -> str:
        """Why a rank gave up, or else the watchdog's report on ranks without heartbeats, for an
        error message; empty: neither is known.
        """
        watchdog = self.state.watchdog
        said = reason() if self.separate else ""
        return said or (f"; {watchdog.report()}" if watchdog is not None else "")


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
