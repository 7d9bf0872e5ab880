"""`RankGroup`: which ranks there are and on which nodes, by which keys they are found, and how
their errors read.
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
# Keys stand for objects of this process, which keeps none of them alive.
_BY_KEY: WeakValueDictionary[str, Any] = WeakValueDictionary()


def key_of(owner: object) -> str:
    """A new key by which operations find this object for as long as it lives."""
    key = f"{type(owner).__name__} {next(_NUMBERS)}"
    _BY_KEY[key] = owner
    return key


def owner_of(key: str) -> Any:
    """The object of a key."""
    return _BY_KEY[key]


class CommError(RuntimeError):
    """A collective failed or cannot run. The message names rank, collective and sizes."""


@contextmanager
def advice(text: str) -> Iterator[None]:
    """Add to a `CommError` raised inside what its usual cause here is and how to avoid it."""
    try:
        yield
    except CommError as error:
        raise CommError(f"{error}; {text}") from error


class RankGroup(ABC):
    """A group of `size` ranks, of which this process (or thread) is `rank`.

    Args:
        rank, size: this rank's index in the group, and the number of ranks.
        name: of the group, for messages.
        state: what is known of the group; None: nothing yet.

    Attributes:
        ranks: of the job, by rank of the group.
        separate: whether ranks are processes of their own, whose settings may differ, see
            `comm.agreement`.
        fails_later: whether a collective may fail after it has returned, so that the error is
            raised by another one.
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
        """Where tensors of this group must be."""
        return torch.device("cpu")

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
            for ranks, subgroup in self.state.subgroups.items():
                subgroup.prepare(topology.restrict(ranks))
        return topology

    def detect_topology(self) -> Topology:
        """Ask the ranks on which node they run; collective. Here: all on one node."""
        return Topology.one_node(self.size)

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
