"""`Topology`: which ranks of a group share a node, and how many network cards each node has."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_plugin.utils.messages import short

# variables in which launchers tell a process the index of its node (torchrun, Slurm)
_NODE_INDEX = ("GROUP_RANK", "SLURM_NODEID")


def node_name(environment: Mapping[str, str] | None = None) -> str:
    """The launcher's node index, if it sets one, and the host name.

    Two processes share a node where both are equal: containers on different hosts may have the same
    host name, and a launcher may start several agents on one host, which count as nodes.

    environment: of the process; None: `os.environ`.
    """
    environment = os.environ if environment is None else environment
    index = next((f"{name}={environment[name]}" for name in _NODE_INDEX if name in environment), "")
    return f"{index}@{socket.gethostname()}"


def node_key(size: int) -> bytes:
    """A digest of the node's name, `size` bytes long."""
    return hashlib.sha256(node_name().encode()).digest()[:size]


@dataclass(frozen=True)
class Topology:
    """Nodes of a group of ranks.

    Ranks need not be numbered node by node, and nodes need not be equal.

    Attributes:
        nodes: for each node the ranks (indices in the group) on it, ascending; nodes in order of
            their first rank.
        nics: network cards per node.
        source: where this came from, for messages.
    Raises: ValueError: a rank is missing or twice, a node is empty, or nics < 1.
    """

    nodes: tuple[tuple[int, ...], ...]
    nics: int = 1
    source: str = field(default="given", compare=False)

    def __post_init__(self) -> None:
        nodes = tuple(sorted(tuple(sorted(node)) for node in self.nodes))
        ranks = sorted(rank for node in nodes for rank in node)
        if not ranks or ranks != list(range(len(ranks))) or not all(nodes):
            raise ValueError(
                f"topology nodes={short(self.nodes)} must hold each rank 0..n-1 exactly once and "
                "no empty node; list the ranks node by node")
        if self.nics < 1:
            raise ValueError(
                f"topology nics={self.nics} must be >= 1; give the number of network cards of a "
                "node"
            )
        object.__setattr__(self, "nodes", nodes)

    @classmethod
    def one_node(cls, size: int) -> Topology:
        """All ranks on one node."""
        return cls((tuple(range(size)),), source="one node")

    @classmethod
    def uniform(cls, size: int, per_node: int, nics: int = 1, source: str = "given") -> Topology:
        """Nodes of `per_node` ranks in rank order; the last one has the remaining ranks."""
        if per_node < 1:
            raise ValueError(
                f"ranks per node={per_node} must be >= 1; give the number of ranks of a node")
        nodes = tuple(
            tuple(range(start, min(start + per_node, size))) for start in range(0, size, per_node))
        return cls(nodes, nics, source)

    @classmethod
    def from_keys(cls, keys: Sequence[Hashable], nics: int = 1,
                  source: str = "detected") -> Topology:
        """Ranks with equal keys (host names, say) share a node."""
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
        """For each rank the index of its node."""
        where = {rank: index for index, node in enumerate(self.nodes) for rank in node}
        return tuple(where[rank] for rank in range(self.size))

    @cached_property
    def local_of(self) -> tuple[int, ...]:
        """For each rank its local rank on its node."""
        where = {rank: local for node in self.nodes for local, rank in enumerate(node)}
        return tuple(where[rank] for rank in range(self.size))

    @cached_property
    def uniform_nodes(self) -> bool:
        """Whether all nodes have the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    @cached_property
    def two_steps(self) -> bool:
        """Whether collectives in two steps can be faster: several equal nodes of several ranks."""
        return self.uniform_nodes and self.why_flat() is None

    @cached_property
    def node_major(self) -> bool:
        """Whether rank order is node order."""
        return [rank for node in self.nodes for rank in node] == list(range(self.size))

    @cached_property
    def regular(self) -> bool:
        """Equal nodes in rank order."""
        return self.uniform_nodes and self.node_major

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks on the node of `rank`, itself included."""
        return self.nodes[self.node_of[rank]]

    def same_node(self, one: int, other: int) -> bool:
        """Whether two ranks share a node."""
        return self.node_of[one] == self.node_of[other]

    def restrict(self, ranks: Sequence[int]) -> Topology:
        """The topology of a subgroup of these ranks, by its own rank numbers."""
        return Topology.from_keys([self.node_of[rank] for rank in ranks], self.nics, self.source)

    def why_flat(self) -> str | None:
        """Why no hierarchical exchange can be faster here; None where one can."""
        if len(self.nodes) == 1:
            return f"all {self.size} ranks are on one node"
        if all(len(node) == 1 for node in self.nodes):
            return "every node has one rank"
        return None

    def __str__(self) -> str:
        sizes = sorted({len(node) for node in self.nodes})
        each = str(sizes[0]) if self.uniform_nodes else f"{sizes[0]} to {sizes[-1]}"
        order = "" if self.node_major else ", not in rank order"
        return f"{len(self.nodes)} node(s) of {each} rank(s){order} ({self.source})"
