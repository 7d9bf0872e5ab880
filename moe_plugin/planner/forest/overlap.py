"""The best rate of an all-reduce whose two halves share the wires, and who is root of how much.

Each piece of the data is summed along an inward tree to its root, and sent from there along an
outward tree, all of it at the same time. A tree enters every part of a partition of the ranks,
except its root's: with bandwidth C between the parts, at most C / (2 (parts - 1)) GB/s of pieces
get through. Half of each wire for either direction, and roots where the network wants them, reach
the least of these bounds (Frank's theorem on branchings with free roots): of a rate K, each set of
ranks X needs K - B(X) / 2 at roots of its own, B(X) the bandwidth into it. The least shares that do
so are found one rank after another, by one max-flow each; if their sum is more than K, the sets
that need them are a partition with a lower bound, from which the search goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from moe_plugin.planner.forest.flow import Flows, check_exact
from moe_plugin.planner.forest.optimum import Graph


@dataclass(frozen=True)
class Shares:
    """A rate and how it is shared.

    Attributes:
        rate: K, in the graph's units of capacity.
        roots: of each rank, their sum is K.
        parts: disjoint sets of nodes that prove that no rate is higher.
    """

    rate: Fraction
    roots: tuple[Fraction, ...]
    parts: tuple[frozenset[int], ...]


def best_shares(graph: Graph) -> Shares:
    """The highest rate; roots have equal shares where that costs nothing."""
    parts = tuple(frozenset([rank]) for rank in range(graph.ranks))
    while True:
        rate = _bound(graph, parts)
        found = _Search(graph, rate).run()
        if isinstance(found, list):
            return Shares(rate, tuple(found), parts)
        if _bound(graph, found) >= rate:
            raise AssertionError(f"{len(found)} parts do not lower the rate {rate}")
        parts = found


def _bound(graph: Graph, parts: Sequence[frozenset[int]]) -> Fraction:
    part_of = {node: i for i, part in enumerate(parts) for node in part}
    crossing = sum(c for (a, b), c in graph.capacity.items()
                   if b in part_of and part_of.get(a) != part_of[b])
    return Fraction(crossing, 2 * (len(parts) - 1))


class _Search:
    """The least shares for a given rate, in integers: of units 1 / (2 q) for a rate p / q, and
    N times finer, so that equal shares are integers.
    """

    def __init__(self, graph: Graph, rate: Fraction) -> None:
        p, q = rate.as_integer_ratio()
        self._graph, self._unit = graph, 2 * q * graph.ranks
        self._rate = 2 * p * graph.ranks
        self._inside = [c * q * graph.ranks for c in graph.capacity.values()]
        check_exact(self._inside, self._rate * (graph.ranks + 1))
        self._flows = Flows(graph.nodes + 1, [
            *graph.capacity, *((graph.nodes, v) for v in range(graph.ranks))])
        self._roots = [self._rate] * graph.ranks

    def run(self) -> list[Fraction] | tuple[frozenset[int], ...]:
        """Shares with the rate as their sum, or, where none do, parts with a lower bound."""
        ranks = range(self._graph.ranks)
        for rank in ranks:
            self._lower(rank, self._rate // self._graph.ranks)
        if sum(self._roots) > self._rate:
            needed = [side for rank in ranks if (side := self._lower(rank, 0))]
            if sum(self._roots) > self._rate:
                return _merged(needed, self._graph.ranks)
        more, equal = self._rate - sum(self._roots), self._rate // self._graph.ranks
        for rank in ranks:
            raised = min(more, max(0, equal - self._roots[rank]))
            self._roots[rank] += raised
            more -= raised
        self._roots[0] += more
        return [Fraction(share, self._unit) for share in self._roots]

    def _lower(self, rank: int, least: int) -> frozenset[int]:
        """Lower a rank's share as far as it can be; the set that needs it, if one does."""
        value, side = self._flows.cut(self._graph.nodes, rank, self._inside + self._roots)
        spare = value - self._rate
        self._roots[rank] = max(min(self._roots[rank], least), self._roots[rank] - spare)
        if not self._roots[rank] or self._roots[rank] < least:
            return frozenset()
        return frozenset(range(self._graph.nodes)) - frozenset(side)


def _merged(sets: Sequence[frozenset[int]], ranks: int) -> tuple[frozenset[int], ...]:
    """Sets that share a rank, united; without the switches that several share then."""
    parts: list[frozenset[int]] = []
    for each in sets:
        apart = [part for part in parts if not _share(part, each, ranks)]
        parts = [*apart, each.union(*(part for part in parts if _share(part, each, ranks)))]
    shared = {node for node, count in Counter(node for p in parts for node in p).items()
              if count > 1}
    return tuple(part - shared for part in parts)


def _share(a: frozenset[int], b: frozenset[int], ranks: int) -> bool:
    return any(node < ranks for node in a & b)
