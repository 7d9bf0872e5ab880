"""`Comm`: the only way in which a layer talks to other ranks.

A `Comm` is a group of ranks with the collectives below, without autograd; the differentiable forms
are written once, on top, in `moe_plugin.comm.functional`. The hierarchical all-to-all algorithms
are sets of point-to-point messages of the group that is already there (`exchange`), so they need no
further process groups.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.topology import Topology

TAGS = 1 << 20


class CommError(RuntimeError):
    """A collective failed. The message names rank, collective and sizes."""


@dataclass
class Counters:
    """What this rank sent to other ranks of a group, views of it included.

    exchanges: all-to-alls by the algorithm that really ran, which is `linear` where a hierarchical
    one has nothing to gain.
    """

    bytes: int = 0
    messages: int = 0
    exchanges: dict[str, int] = field(default_factory=dict)


class Comm(ABC):
    """A group of `size` ranks, of which this process (or thread) is `rank`.

    receive_first: whether point-to-point messages with all receives posted first are the better
    linear all-to-all here.
    threaded: whether exchanges may run in a thread beside this one (on `tagged` views).
    tag: tells apart exchanges that are under way at the same time, see `tagged`.
    """

    rank: int
    size: int
    name: str
    receive_first: bool = False
    threaded: bool = False
    tag: int = 0

    @abstractmethod
    def all_to_all(self, x: Tensor, send: Sequence[int] | None = None,
                   recv: Sequence[int] | None = None) -> Tensor:
        """Exchange along dimension 0, the backend's own way. Rank i's j-th piece becomes rank j's
        i-th piece.

        Args:
            x: contiguous, `sum(send)` long in dimension 0.
            send: lengths of the pieces to each rank; None: equal pieces.
            recv: lengths of the pieces from each rank; None: equal pieces.
        Returns: a new tensor, `sum(recv)` long in dimension 0, pieces in rank order.
        """

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """A new tensor, equal on all ranks: element-wise `sum` or `max` over ranks."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """A new tensor: all ranks' `x` (equal shapes) concatenated along dimension 0."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """A new tensor: this rank's 1/size piece (dimension 0) of the sum over ranks."""

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """A new tensor equal to `x` of rank `root`."""

    @abstractmethod
    def exchange(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int,
                                                                                  Tensor]]) -> None:
        """Point to point: send each (peer, contiguous tensor), fill each (peer, contiguous buffer).
        All receives are posted first.

        Every rank of the group calls it, with empty lists where it has nothing to send or receive.
        Any dtype; no empty tensors.
        """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> Comm | None:
        """The `Comm` of these ranks (indices in this group); None on ranks outside. All ranks must
        call it, in one order.
        """

    def run_of(self, size: int) -> Comm:
        """The subgroup of this rank's run of `size` consecutive ranks; `size` divides the group's.
        Made once; the first use is collective.

        What is sent in it counts as sent in this group.
        """
        runs: dict[int, Comm] = self.memo.setdefault("runs", {})
        if size not in runs:
            made = [
                self.subgroup(range(start, start + size)) for start in range(0, self.size, size)
            ]
            runs[size] = made[self.rank // size]
            runs[size]._counters = self.counters
        return runs[size]

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @property
    def device(self) -> torch.device:
        """Where tensors of this group must lie."""
        return torch.device("cpu")

    @property
    def memo(self) -> dict[str, Any]:
        """What is found out once for a group and kept with it (topology, measurements); shared by
        `tagged` views.
        """
        return self.__dict__.setdefault("_memo", {})

    @property
    def counters(self) -> Counters:
        """Bytes and messages sent so far."""
        return self.__dict__.setdefault("_counters", Counters())

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks of the group."""
        return self.counters.bytes

    @property
    def topology(self) -> Topology:
        """Which ranks share a node: as set, else detected. The first use is collective: all ranks
        must make it.
        """
        if "topology" not in self.memo:
            self.memo["topology"] = self.detect_topology()
        return self.memo["topology"]

    @topology.setter
    def topology(self, topology: Topology) -> None:
        if topology.size != self.size:
            raise ValueError(
                f"topology of {topology.size} ranks does not fit {self.name!r} with {self.size}; "
                "give one node list for all ranks of the group"
            )
        if topology != self.memo.get("topology"):
            self.memo["topology"] = topology
            # what was measured and planned, was so for another placement
            for known in ("chooser", "2dh"):
                self.memo.pop(known, None)

    def detect_topology(self) -> Topology:
        """Ask the ranks where they run; collective. Here: all on one node."""
        return Topology.one_node(self.size)

    def tagged(self, tag: int) -> Comm:
        """A view of this group whose exchanges do not mix with those of other tags, for use from
        another thread.
        """
        self.memo, self.counters  # noqa: B018 - made here, so that views share them
        view = copy.copy(self)
        view.tag = tag
        return view

    def next_tag(self) -> int:
        """A tag for an exchange in the background. Ranks start these in one order, so they draw
        alike.
        """
        return next(self.memo.setdefault("tags", itertools.count())) % (TAGS - 1) + 1

    def exchange_ints(self, sends: Mapping[int, Sequence[int]],
                      recvs: Mapping[int, int]) -> dict[int, list[int]]:
        """Exchange host integers: `sends[peer]` out, `recvs[peer]` many in. What is meant for this
        rank itself stays here.
        """
        def others(items: Mapping[int, Any]) -> list[int]:
            return [peer for peer in items if peer != self.rank]

        out = [(p, torch.tensor(list(sends[p]), dtype=torch.int64, device=self.device))
               for p in others(sends) if len(sends[p])]
        buffers = [(p, torch.empty(recvs[p], dtype=torch.int64, device=self.device))
                   for p in others(recvs) if recvs[p]]
        self.exchange(out, buffers)
        # one copy to the host for all peers
        values = torch.cat([b for _, b in buffers]).tolist() if buffers else []
        ends = list(itertools.accumulate((len(b) for _, b in buffers), initial=0))
        got = {peer: values[ends[i] : ends[i + 1]] for i, (peer, _) in enumerate(buffers)}
        got |= {p: [] for p in recvs if not recvs[p]}
        if self.rank in sends:
            got[self.rank] = list(sends[self.rank])
        return got

    def agree_max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over ranks, equal on all of them; by point-to-point messages alone
        (log2 of size rounds).
        """
        mine = torch.tensor(list(values), dtype=torch.float64)
        step = 1
        while step < self.size:
            theirs = torch.empty_like(mine, device=self.device)
            self.exchange([((self.rank + step) % self.size, mine.to(self.device))],
                          [((self.rank - step) % self.size, theirs)])
            mine = torch.maximum(mine, theirs.cpu())
            step *= 2
        return mine.tolist()

    @contextmanager
    def explained(self, what: Callable[[], str]) -> Iterator[None]:
        """Turn any failure inside into a `CommError` that names rank, group, collective and sizes.
        """
        try:
            yield
        except CommError:
            raise
        except (RuntimeError, ValueError) as error:
            raise CommError(
                f"rank {self.rank} of {self.size} in group {self.name!r}: {what()} failed: "
                f"{error}{self.who_is_missing()}"
            ) from error

    def store(self) -> Any:
        """A key-value store that all ranks share, on a connection of its own; None where there is
        none.
        """
        return None

    def who_is_missing(self) -> str:
        """What is known of ranks that gave no sign of life, for an error message; empty where
        nothing watches.
        """
        watchdog = self.memo.get("watchdog")
        return f"; {watchdog.report()}" if watchdog is not None else ""

    def ran(self, algorithm: str) -> None:
        """Called by an all-to-all algorithm that runs: it is counted by its name."""
        self.counters.exchanges[algorithm] = self.counters.exchanges.get(algorithm, 0) + 1

    def _count(self, messages: int, size: int) -> None:
        self.counters.messages += messages
        self.counters.bytes += size


def pieces(length: int, size: int, splits: Sequence[int] | None, what: str) -> list[int]:
    """Lengths of the pieces: `splits`, or equal ones. A `ValueError` names what does not add up."""
    if splits is not None:
        if len(splits) != size:
            raise ValueError(
                f"{what} splits {list(splits)} name {len(splits)} ranks; the group has {size}")
        return list(splits)
    if length % size:
        raise ValueError(f"{what}: {length} rows cannot be cut in {size} equal pieces; pass splits")
    return [length // size] * size


class Exchange(ABC):
    """An all-to-all algorithm. One object serves all groups: state of a group is in `Comm.state`.

    in_background: whether it may run in another thread or on a side stream while this rank computes.
    """

    in_background: bool = True

    @abstractmethod
    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        """Exchange rows of `x` along dimension 0, see `Comm.all_to_all`. All ranks call it."""

    def resolve(self, comm: Comm, x: Tensor, send: Sequence[int] | None,
                recv: Sequence[int] | None) -> Exchange:
        """What runs for this call. Called in program order on all ranks, so it may be collective.

        Args: as for the exchange itself; `x` is only looked at for its shape and dtype.
        """
        return self


class FunctionExchange(Exchange):
    """A plain function `(comm, x, send, recv) -> rows` as an `Exchange`."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.__doc__ = function.__doc__  # the summary in lists of algorithms

    def __call__(self, comm: Comm, x: Tensor, send: Sequence[int] | None = None,
                 recv: Sequence[int] | None = None) -> Tensor:
        """See `Exchange`."""
        return self.function(comm, x, send, recv)
