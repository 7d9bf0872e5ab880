"""Max-flows and min-cuts with integer capacities, computed by igraph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# igraph computes with doubles, which represent every integer up to here exactly
LARGEST = 1 << 53
Capacities = Mapping[tuple[int, int], int]


class Flows:
    """A graph with fixed arcs, for many flows with changing capacities.

    Args:
        nodes: number of nodes.
        arcs: (from, to) of each arc. Methods expect capacities in the same order.
    """

    def __init__(self, nodes: int, arcs: Sequence[tuple[int, int]]) -> None:
        self._graph = _library().Graph(nodes, arcs, directed=True)

    def value(self, source: int, sink: int, capacities: Sequence[int]) -> int:
        """Return the value of a maximum flow."""
        return round(self._graph.maxflow_value(source, sink, capacities))

    def cut(self, source: int, sink: int, capacities: Sequence[int]) -> tuple[int, list[int]]:
        """Return the value of a minimum cut, and the nodes on the side of the source."""
        minimum = self._graph.maxflow(source, sink, capacities)
        return round(minimum.value), list(minimum.partition[0])

    def arcs(self, source: int, sink: int, capacities: Sequence[int]) -> list[int]:
        """Return the amount of a maximum flow on each arc."""
        return [round(amount) for amount in self._graph.maxflow(source, sink, capacities).flow]


class Demand:
    """Test of whether every rank can receive from all roots at the same time.

    For each rank v, the test needs a flow of all the roots' weights from a common source to v.

    Args:
        nodes: number of nodes without the source. Ranks are the nodes 0 to len(roots) - 1.
        capacities: capacities of the arcs.
        roots: weight of each rank.
    """

    def __init__(self, nodes: int, capacities: Capacities, roots: Sequence[int]) -> None:
        self._arcs = [arc for arc, capacity in capacities.items() if capacity]
        self._inside = [capacities[arc] for arc in self._arcs]
        self._roots, self._source, self.total = list(roots), nodes, sum(roots)
        check_exact(self._inside, self.total * (len(self._roots) + 1))
        self._flows = Flows(
            nodes + 1, [*self._arcs, *((nodes, rank) for rank in range(len(self._roots)))])

    def missing(self, enough: int | None = None, first: Iterable[int] = ()) -> tuple[int, int]:
        """Return the largest deficit of any cut and a rank behind the cut, or (0, -1).

        Ranks that are known to receive everything join the source. Cuts that separate such a rank
        have already been checked, and the flows to other ranks are then found sooner.

        Args:
            enough: stop at a deficit of this size. Defaults to no limit.
            first: ranks to test first, such as the ranks of earlier deficits.
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
    """Raise `ValueError` if sums of capacities would be rounded."""
    total = sum(capacities) + more
    if total >= LARGEST:
        raise ValueError(
            f"the bandwidths of the network need integers up to {total} for an exact result, but "
            f"only integers below {LARGEST} are exact. Write bandwidths with fewer digits, or "
            "request fewer trees (--trees)")


def _library() -> Any:
    try:
        import igraph
    except ImportError as error:
        raise ValueError("tree schedules need igraph; run pip install 'moe-plugin[forest]'"
                         ) from error
    return igraph
