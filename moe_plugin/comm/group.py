"""`RankGroup`: the ranks of a group and their nodes, the keys by which operations find a group, and
the form of its errors.
"""

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
    """Create a new key by which operations find `owner` as long as it exists."""
    key = f"{type(owner).__name__} {next(_NUMBERS)}"
    _BY_KEY[key] = owner
    return key


def owner_of(key: str) -> Any:
    """Return the object registered under `key`."""
    return _BY_KEY[key]


class CommError(RuntimeError):
    """A collective failed or cannot run. The message names the rank, the collective and the sizes.
    """


@contextmanager
def advice(text: str) -> Iterator[None]:
    """Add `text`, the usual cause and its remedy, to a `CommError` raised inside the block."""
    try:
        yield
    except CommError as error:
        raise CommError(f"{error}; {text}") from error


class RankGroup(ABC):
    """A group of `size` ranks. This process (or thread) is `rank`.

    Args:
        rank: this rank's index in the group.
        size: number of ranks in the group.
        name: name of the group, for messages.
        state: optional. State shared by all objects for the same group. Defaults to a new state.

    Attributes:
        ranks: for each rank of the group, its rank in the job.
        separate: whether the ranks are separate processes, whose settings may differ, see
            `comm.agreement`.
        fails_later: whether a collective may fail after it has returned. A later collective then
            raises the error.
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
        """Device on which tensors of this group must be."""
        return torch.device("cpu")

    @property
    def by_nodes(self) -> bool:
        """Whether all-gather and reduce-scatter use two steps in this group, see `comm.by_nodes`.
        """
        return False

    @property
    def topology(self) -> Topology:
        """Which ranks share a node.

        Raises:
            CommError: `prepare` has not been called.
        """
        if self.state.topology is None:
            raise self.error("the topology is not known; call comm.prepare() on all ranks of the "
                             "group first")
        return self.state.topology

    def prepare(self, topology: Topology | None = None) -> Topology:
        """Agree on the group's topology. Collective: all ranks call this method with equal
        arguments.

        Measurements under a previous, different topology are discarded.

        Args:
            topology: optional. Which ranks share a node. Defaults to the current topology, or else
                the topology is detected.
        Returns:
            The topology of the group.
        Raises:
            ValueError: the topology has a different number of ranks.
        """
        if topology is None:
            topology = self.state.topology or self.detect_topology()
        if topology.size != self.size:
            raise ValueError(
                f"topology of {topology.size} ranks does not fit group {self.name!r} with "
                f"{self.size} ranks; give a topology of all ranks of the group"
            )
        if topology != self.state.topology:
            self.state.set_topology(topology)
            for ranks, subgroup in self.state.subgroups.items():
                subgroup.prepare(topology.restrict(ranks))
        return topology

    def detect_topology(self) -> Topology:
        """Detect which ranks share a node; collective. This base class assumes one node for all
        ranks.
        """
        return Topology.one_node(self.size)

    def error(self, text: str) -> CommError:
        """Return a `CommError` with a message that begins with the rank and the group."""
        return CommError(f"rank {self.rank} of {self.size} in group {self.name!r}: {text}")

    def store(self) -> Any:
        """Return a key-value store shared by all ranks, on a separate connection, or None if there
        is no store.
        """
        return None

    def missing_ranks(self) -> str:
        """Return the reason why a rank gave up, or else the watchdog's report on ranks without
        heartbeats, for an error message.

        The text is empty if neither is known.
        """
        watchdog = self.state.watchdog
        peer_reason = reason() if self.separate else ""
        return peer_reason or (f"; {watchdog.report()}" if watchdog is not None else "")
