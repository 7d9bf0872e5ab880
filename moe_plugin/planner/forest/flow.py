"""Maximum flows and minimum cuts for integer capacities, computed by igraph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
