"""Maximum flows and minimum cuts by igraph, and the packing of spanning trees.

The packing follows the constructive proof of Edmonds' theorem. Each tree is extended one edge at a
time. Consider an edge x -> y, and all sets of ranks that contain y but not x. A tree may use the
edge only if every such set keeps enough incoming capacity for all trees that have not reached the
set yet. The maximum flow from x to y determines how many trees may use the edge. If fewer trees may
use the edge than the weight of the tree, the tree is split into two trees. A set without spare
capacity never regains capacity, so each edge has to be tested at most once per tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# igraph computes with doubles, which represent every integer up to here exactly
LARGEST = 1 << 53
Capacities = Mapping[tuple[int, int], int]


class Flows:
    """A graph with fixed arcs, for which flows with different capacities are computed.

    Args:
        nodes: number of nodes.
        arcs: list of arcs, each a pair (from, to). All methods expect capacities in the same order
            as `arcs`.
    """

    def __init__(self, nodes: int, arcs: Sequence[tuple[int, int]]) -> None:
        self._graph = _library().Graph(nodes, arcs, directed=True)

    def value(self, source: int, sink: int, capacities: Sequence[int]) -> int:
        """Return the value of a maximum flow."""
        return round(self._graph.maxflow_value(source, sink, capacities))

    def cut(self, source: int, sink: int, capacities: Sequence[int]) -> tuple[int, list[int]]:
        """Return the value of a minimum cut and the nodes on the source side of the cut."""
        minimum = self._graph.maxflow(source, sink, capacities)
        return round(minimum.value), list(minimum.partition[0])

    def arcs(self, source: int, sink: int, capacities: Sequence[int]) -> list[int]:
        """Return the flow on each arc for a maximum flow."""
        return [round(amount) for amount in self._graph.maxflow(source, sink, capacities).flow]


class Demand:
    """A test of whether every rank can receive from all roots at the same time.

    For each rank v, the test computes a maximum flow from a common source node to v. Rank v can
    receive from all roots if this flow equals the sum of the roots' weights.

    Args:
        nodes: number of nodes, not counting the common source node. The ranks are the nodes 0 to
            len(roots) - 1.
        capacities: mapping from arcs (from, to) to capacities.
        roots: for each rank, the amount of data that every other rank must receive from this rank.
    """

    def __init__(self, nodes: int, capacities: Capacities, roots: Sequence[int]) -> None:
        self._arcs = [arc for arc, capacity in capacities.items() if capacity]
        self._inside = [capacities[arc] for arc in self._arcs]
        self._roots, self._source, self.total = list(roots), nodes, sum(roots)
        check_exact(self._inside, self.total * (len(self._roots) + 1))
        self._flows = Flows(
            nodes + 1, [*self._arcs, *((nodes, rank) for rank in range(len(self._roots)))])

    def missing(self, enough: int | None = None, first: Iterable[int] = ()) -> tuple[int, int]:
        """Return the largest deficit of any cut, and a rank that this cut separates from the
        source. Return (0, -1) if no cut has a deficit.

        Once a rank is known to receive all data, it is merged with the common source node, because
        all cuts that separate the rank have been checked. Merging ranks makes the flow computations
        for the remaining ranks faster.

        Args:
            enough: the search stops as soon as it finds a deficit of this size or larger. By
                default, all ranks are searched.
            first: ranks to test first, for example the ranks that had a deficit in an earlier test.
        """
        most, where, open_roots = 0, -1, list(self._roots)
        order = dict.fromkeys([*first, *range(len(open_roots))])
        for rank in order:
            lack = self.total - self._flows.value(self._source, rank, self._inside + open_roots)
            if lack <= 0:
                open_roots[rank] = self.total
            elif lack > most:
                most, where = lack, rank
                if enough is not None and most >= enough:
                    break
        return most, where


def check_exact(capacities: Iterable[int], more: int = 0) -> None:
    """Raise a `ValueError` if a sum of capacities is too large for an exact representation."""
    total = sum(capacities) + more
    if total >= LARGEST:
        raise ValueError(
            f"an exact result for this network requires integers up to {total}, but only integers "
            f"below {LARGEST} can be represented exactly. Write bandwidths with fewer digits, or "
            "request fewer trees (--trees)")


def _library() -> Any:
    try:
        import igraph
    except ImportError as error:
        raise ValueError("tree schedules need igraph; run pip install 'moe-plugin[forest]'"
                         ) from error
    return igraph


Arc = tuple[int, int]


@dataclass
class Partial:
    """A growing tree.

    Attributes:
        root: rank that is the root of the tree.
        weight: number of identical trees that this object represents.
        nodes: ranks that the tree contains, in the order in which they were added.
        edges: edges of the tree.
        blocked: edges that the tree can no longer use.
    """

    root: int
    weight: int
    nodes: list[int]
    edges: list[Arc] = field(default_factory=list)
    blocked: set[Arc] = field(default_factory=set)

    def split(self, weight: int) -> Partial:
        """Reduce the weight of this tree to `weight`, and return a copy with the remaining
        weight."""
        rest = Partial(self.root, self.weight - weight, list(self.nodes), list(self.edges),
                       set(self.blocked))
        self.weight = weight
        return rest


def pack(ranks: int, capacity: Mapping[Arc, int], roots: Sequence[int]) -> list[Partial]:
    """Return spanning trees that together do not exceed the capacity of any edge.

    Args:
        ranks: number of ranks. All nodes of the graph are ranks.
        capacity: capacity of each edge, in trees. The capacities must allow every rank to receive
            from all roots at the same time (`flow.Demand`).
        roots: for each rank, the number of trees whose root is this rank.
    """
    return _Packing(ranks, capacity, roots).run()


class _Packing:
    def __init__(self, ranks: int, capacity: Mapping[Arc, int], roots: Sequence[int]) -> None:
        self._ranks = ranks
        self._arcs = list(capacity)
        self._left = [capacity[arc] for arc in self._arcs]
        self._out: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (target, index of arc)
        for index, (source, target) in enumerate(self._arcs):
            self._out[source].append((target, index))
        total = sum(roots)
        check_exact(self._left, total * 4 * (ranks + 1))
        self._starts = list(roots)  # weight of the trees that consist of a single node, by root
        self._waiting: list[Partial] = []  # unfinished trees that have edges
        self._others = total  # total weight of `_starts` and `_waiting`
        self._flows: Flows | None = None

    def run(self) -> list[Partial]:
        """Return all trees."""
        done: list[Partial] = []
        for root in range(self._ranks):
            if not self._starts[root]:
                continue
            self._waiting.append(Partial(root, self._starts[root], [root]))
            self._starts[root] = 0
            while self._waiting:
                tree = self._waiting.pop()
                self._others -= tree.weight
                self._flows = None
                while len(tree.nodes) < self._ranks:
                    self._grow(tree)
                done.append(tree)
        return done

    def _grow(self, tree: Partial) -> None:
        """Add one edge to the tree. The edge starts at the earliest node that has a usable edge,
        and edges with the highest remaining capacity are preferred.
        """
        inside = set(tree.nodes)
        for source in tree.nodes:
            ahead = [(-self._left[arc], target, arc) for target, arc in self._out[source]
                     if self._left[arc] and target not in inside
                     and (source, target) not in tree.blocked]
            for _, target, arc in sorted(ahead):
                count = min(tree.weight, self._left[arc])
                count = max(0, min(count, self._room(source, target, count)))
                if count < tree.weight:
                    tree.blocked.add((source, target))
                if count:
                    self._add(tree, (source, target), arc, count)
                    return
        raise AssertionError(f"no edge continues the tree of root {tree.root}")

    def _add(self, tree: Partial, edge: Arc, arc: int, count: int) -> None:
        if count < tree.weight:
            rest = tree.split(count)
            self._waiting.append(rest)
            self._others += rest.weight
            self._flows = None
        self._left[arc] -= count
        tree.nodes.append(edge[1])
        tree.edges.append(edge)

    def _room(self, source: int, target: int, most: int) -> int:
        """Return how many trees may use an edge. If more than `most` trees may use the edge, any
        number >= `most` may be returned.
        """
        if self._flows is None:
            more = [(self._ranks, v) for v in range(self._ranks)]
            for index, tree in enumerate(self._waiting):
                node = self._ranks + 1 + index
                more += [(self._ranks, node), *((node, v) for v in tree.nodes)]
            self._flows = Flows(self._ranks + 1 + len(self._waiting), [*self._arcs, *more])
            self._grown = [weight for tree in self._waiting
                           for weight in [tree.weight] * (len(tree.nodes) + 1)]
        starts = self._starts.copy()
        starts[source] = self._others + most
        value = self._flows.value(self._ranks, target, self._left + starts + self._grown)
        return value - self._others
