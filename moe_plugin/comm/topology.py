"""`Topology`, which describes the node of each rank and the number of network cards per node."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_plugin.utils.messages import short

# environment variables in which launchers pass the index of the node (torchrun, Slurm)
_NODE_INDEX = ("GROUP_RANK", "SLURM_NODEID")


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """Return the host name and the launcher's index of this node, if the launcher sets an index.

    Two processes run on the same node if both the host names and the indices are equal. The index
    is needed because containers on different hosts may have the same host name. A launcher may also
    start several agents on one host. Each agent on a host is treated as a separate node.

    Args:
        environment: optional. Environment variables of the process. Defaults to `os.environ`.
    """
    environment = os.environ if environment is None else environment
    index = next((f"{name}={environment[name]}" for name in _NODE_INDEX if name in environment), "")
    return f"{index}@{socket.gethostname()}"


def node_key(size: int) -> bytes:
    """Return a digest of the node's name with `size` bytes."""
    return hashlib.sha256(node_name().encode()).digest()[:size]


@dataclass(frozen=True)
class Topology:
    """The nodes of a group of ranks.

    Ranks do not need to be numbered node by node, and nodes may have different numbers of ranks.

    Attributes:
        nodes: for each node, the ranks (indices in the group) that run on the node, in ascending
            order. Nodes are ordered by their first rank.
        nics: number of network cards per node.
        source: description of how the topology was obtained, for use in messages.
    Raises:
        ValueError: If a rank is missing or appears twice, a node is empty, or `nics` is below 1.
    """

    nodes: tuple[tuple[int, ...], ...]
    nics: int = 1
    source: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        nodes = tuple(sorted(tuple(sorted(node)) for node in self.nodes))
        ranks = sorted(rank for node in nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(nodes):
            raise ValueError(
                f"topology nodes={short(self.nodes)} must contain each rank 0..n-1 exactly once "
                "and no empty node; list the ranks node by node")
        if self.nics < 1:
            raise ValueError(
                f"topology nics={self.nics} must be >= 1; give the number of network cards per "
                "node"
            )
        object.__setattr__(self, "nodes", nodes)

    @classmethod
    def one_node(cls, size: int) -> Topology:
        """Create a topology in which all ranks run on one node."""
        return cls((tuple(range(size)),), source="one node")

    @classmethod
    def uniform(cls, size: int, per_node: int, nics: int = 1, source: str = "given") -> Topology:
        """Create a topology with `per_node` consecutive ranks per node; the last may have fewer."""
        if per_node < 1:
            raise ValueError(
                f"ranks per node={per_node} must be >= 1; give the number of ranks on each node")
        nodes = tuple(
            tuple(range(start, min(start + per_node, size))) for start in range(0, size, per_node))
        return cls(nodes, nics, source)

    @classmethod
    def from_keys(cls, keys: Sequence[Hashable], nics: int = 1,
                  source: str = "detected") -> Topology:
        """Create a topology in which ranks with equal keys (such as host names) share a node."""
        nodes: dict[Any, list[int]] = {}
        for rank, key in enumerate(keys):
            nodes.setdefault(key, []).append(rank)
        return cls(tuple(tuple(node) for node in nodes.values()), nics, source)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Node index of each rank."""
        where = {rank: index for index, node in enumerate(self.nodes) for rank in node}
        return tuple(where[rank] for rank in range(self.size))

    @cached_property
    def local_of(self) -> tuple[int, ...]:
        """Local rank of each rank, that is, its index among the ranks of its node."""
        where = {rank: local for node in self.nodes for local, rank in enumerate(node)}
        return tuple(where[rank] for rank in range(self.size))

    @cached_property
    def uniform_nodes(self) -> bool:
        """True if all nodes have the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    @cached_property
    def two_steps(self) -> bool:
        """True if collectives in two steps can be faster than a ring.

        Requires several nodes with the same number of ranks, and at least two ranks per node.
        """
        return self.uniform_nodes and self.why_flat() is None

    @cached_property
    def node_major(self) -> bool:
        """True if ranks are numbered node by node."""
        return [rank for node in self.nodes for rank in node] == list(range(self.size))

    @cached_property
    def regular(self) -> bool:
        """True if all nodes have the same number of ranks, and ranks are numbered node by node."""
        return self.uniform_nodes and self.node_major

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return all ranks on the node of `rank`, including `rank` itself."""
        return self.nodes[self.node_of[rank]]

    def same_node(self, one: int, other: int) -> bool:
        """Return whether two ranks run on the same node."""
        return self.node_of[one] == self.node_of[other]

    def restrict(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of the subgroup of `ranks`, with ranks numbered as in the subgroup.
        """
        return Topology.from_keys([self.node_of[rank] for rank in ranks], self.nics, self.source)

    def why_flat(self) -> str | None:
        """Return the reason why hierarchical exchanges cannot be faster than flat exchanges in this
        topology, or None if they can be faster.
        """
        if len(self.nodes) == 1:
            return f"all {self.size} ranks are on one node"
        if all(len(node) == 1 for node in self.nodes):
            return "every node has one rank"
        return None

    def __str__(self) -> str:
        sizes = sorted({len(node) for node in self.nodes})
        per_node = str(sizes[0]) if self.uniform_nodes else f"{sizes[0]} to {sizes[-1]}"
        order = "" if self.node_major else ", not in rank order"
        return f"{len(self.nodes)} node(s) of {per_node} rank(s){order} ({self.source})"
