"""`RankGroup`, which describes the ranks of a group and their nodes. The module also defines keys
that identify groups, and error messages.
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
    """Create a new key for `owner`, which is valid for as long as `owner` exists."""
    key = f"{type(owner).__name__} {next(_NUMBERS)}"
    _BY_KEY[key] = owner
    return key


def owner_of(key: str) -> Any:
    """Return the object registered under `key`."""
    return _BY_KEY[key]


class CommError(RuntimeError):
    """Error that is raised when a collective fails or cannot run. The error message names the rank,
    the collective and the sizes.
    """


@contextmanager
def advice(text: str) -> Iterator[None]:
    """Append `text` (a common cause and its remedy) to any `CommError` raised inside the block."""
    try:
        yield
    except CommError as error:
        raise CommError(f"{error}; {text}") from error


class RankGroup(ABC):
    """A group of `size` ranks that includes this process (or this thread, in a simulated group).

    Args:
        rank: index of this process or thread in the group.
        size: number of ranks in the group.
        name: name of the group, which appears in messages.
        state: optional. State that all objects for the same group share. Defaults to a new state.

    Attributes:
        ranks: global rank of each rank of the group.
        separate: True if the ranks are separate processes, so that their settings may differ; see
            `comm.agreement`.
        fails_later: True if a collective may fail after its call has returned, so that a later
            collective raises the error.
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
        """Device for the tensors of this group's collectives."""
        return torch.device("cpu")

    @property
    def by_nodes(self) -> bool:
        """True if all-gather and reduce-scatter run in two steps; see `comm.by_nodes`."""
        return False

    @property
    def topology(self) -> Topology:
        """The group's topology, which describes which ranks run on the same node.

        Raises:
            CommError: If `prepare` has not been called.
        """
        if self.state.topology is None:
            raise self.error("the topology is not known; call comm.prepare() on all ranks of the "
                             "group first")
        return self.state.topology

    def prepare(self, topology: Topology | None = None) -> Topology:
        """Determine a topology of the group that is equal on all ranks. This method is collective:
        all ranks must call it with equal arguments.

        Measurements made under a different topology are discarded.

        Args:
            topology: optional. New topology of the group, that is, which ranks share a node. By
                default, the current topology is kept. If the group has no topology yet, the
                topology is detected.
        Returns:
            The group's topology.
        Raises:
            ValueError: If the number of ranks in the topology differs from the size of the group.
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
        """Detect which ranks run on the same node.

        All ranks must call this method. This base class assumes that all ranks run on one node.
        """
        return Topology.one_node(self.size)

    def error(self, text: str) -> CommError:
        """Create a `CommError` whose message begins with the rank and the group."""
        return CommError(f"rank {self.rank} of {self.size} in group {self.name!r}: {text}")

    def store(self) -> Any:
        """Return a key-value store that all ranks share, or None if the group has no store. The
        store uses a separate connection.
        """
        return None

    def missing_ranks(self) -> str:
        """Return the reason why another rank stopped the job, as text for an error message. If no
        rank stopped the job, return the watchdog's report on ranks without heartbeats.

        If there is neither a reason nor a report, return an empty string.
        """
        watchdog = self.state.watchdog
        peer_reason = reason() if self.separate else ""
        return peer_reason or (f"; {watchdog.report()}" if watchdog is not None else "")
