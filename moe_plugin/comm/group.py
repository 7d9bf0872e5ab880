"""`RankGroup`, the ranks of a group and their nodes, keys of groups, and error messages."""

from __future__ import annotations

import itertools
from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from moe_plugin.comm.state import Counters, GroupState
from moe_plugin.comm.topology import Topology
from moe_plugin.comm.watchdog import reason

_NUMBERS = itertools.count()
UNEQUAL_TEXTS = (
    "in evaluation the usual cause is that another rank makes fewer calls, because its texts or "
    "data ended earlier: call model.generate(..., synced_gpus=True) on all ranks, and give every "
    "rank as many batches as the others")
# Objects by key. The references are weak, so a key does not keep its object alive.
_BY_KEY: WeakValueDictionary[str, Any] = WeakValueDictionary()


def key_of(owner: object) -> str:
    """Create a new key by which operations can find the object `owner` as long as it exists."""
    key = f"{type(owner).__name__} {next(_NUMBERS)}"
    _BY_KEY[key] = owner
    return key


def owner_of(key: str) -> Any:
    """Return the object registered under `key`."""
    return _BY_KEY[key]


class CommError(RuntimeError):
    """Error that is raised if a collective failed or cannot run. The error message contains the
    rank, the collective and the sizes.
    """


@contextmanager
def advice(text: str) -> Iterator[None]:
    """Add `text`, a usual cause and its remedy, to a `CommError` raised inside the block."""
    try:
        yield
    except CommError as error:
        raise CommError(f"{error}; {text}") from error


class RankGroup(ABC):
    """A group of `size` ranks that contains this process (or thread). The index of this process (or
    thread) is `rank`.

    Args:
        rank: this rank's index in the group.
        size: number of ranks in the group.
        name: name of the group, which is used in messages.
        state: optional. State that is shared by all objects for the same group. By default a new
            state is created.

    Attributes:
        ranks: for each rank of the group, its global rank.
        separate: whether the ranks are separate processes, whose settings may differ; see
            `comm.agreement`.
        fails_later: whether a collective may fail after it has returned. The error is then raised
            by a later collective.
    """

    separate: bool = False
    fails_later: bool = False
    ranks: Sequence[int] = (0,)

    def __init__(self, rank: int, size: int, name: str, state: GroupState | None = None) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.state = GroupState() if state is None else state
        self.counters = Counters()
        if size == 1 and self.state.topology is None:
            self.state.set_topology(Topology.one_node(1))

    @property
    def device(self) -> torch.device:
        """Device on which tensors for collectives of this group must be."""
        return torch.device("cpu")

    @property
    def by_nodes(self) -> bool:
        """True if all-gather and reduce-scatter use two steps in this group; see `comm.by_nodes`.
        """
        return False

    @property
    def topology(self) -> Topology:
        """The topology of the group, which states which ranks share a node.

        Raises:
            CommError: If `prepare` has not been called.
        """
        if self.state.topology is None:
            raise self.error("the topology is not known; call comm.prepare() on all ranks of the "
                             "group first")
        return self.state.topology

    def prepare(self, topology: Topology | None = None) -> Topology:
        """Determine a topology of the group that is equal on all ranks. Collective: all ranks must
        call this method with equal arguments.

        Measurements that were made under a different topology are discarded.

        Args:
            topology: optional. The topology of the group, which states which ranks share a node. By
                default the current topology is kept, or the topology is detected if there is none.
        Returns:
            The new topology of the group.
        Raises:
            ValueError: If the topology has a different number of ranks.
        """
        if topology is None:
            topology = self.state.topology or self.detect_topology()
        if topology.size != self.size:
            raise ValueError(
                f"a topology of {topology.size} ranks cannot be used in group {self.name!r} of "
                f"{self.size} ranks; pass a topology of all ranks of the group"
            )
        if topology != self.state.topology:
            self.state.set_topology(topology)
            for ranks, subgroup in self.state.subgroups.items():
                subgroup.prepare(topology.restrict(ranks))
        return topology

    def detect_topology(self) -> Topology:
        """Detect which ranks share a node.

        All ranks must call this method. This base class assumes that all ranks are on one node.
        """
        return Topology.one_node(self.size)

    def error(self, text: str) -> CommError:
        """Return a `CommError` whose message begins with the rank and the group."""
        return CommError(f"rank {self.rank} of {self.size} in group {self.name!r}: {text}")

    def store(self) -> Any:
        """Return a key-value store that is shared by all ranks and uses a separate connection, or
        None if there is no store.
        """
        return None

    def missing_ranks(self) -> str:
        """Return the reason why a rank gave up, to be used in an error message. If no rank gave up,
        return the watchdog's report on ranks without heartbeats.

        The string is empty if there is no such reason and no report.
        """
        watchdog = self.state.watchdog
        peer_reason = reason() if self.separate else ""
        return peer_reason or (f"; {watchdog.report()}" if watchdog is not None else "")
