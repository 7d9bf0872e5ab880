"""The least time of a collective: the cut of a network that lets data through most slowly.

From a set S of nodes, one shard of each of its ranks must leave, through bandwidth B(S), unless S
has all ranks: 1/x* = max over S of (ranks in S) / B(S), seconds per GB of a shard. A rate x is
possible where every rank can receive x from all ranks at once, which max-flows tell; where one
fails, its min-cut is a slower S, and the search goes on at that one's rate. Cuts only get slower,
so that each rank is asked until it succeeds, once more than cuts are found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from moe_plugin.planner.forest.flow import Demand, Flows, check_exact
from moe_plugin.planner.forest.network import Network


@dataclass(frozen=True)
class Graph:
    """A network with integers.

    Attributes:
        ranks: nodes 0 to ranks - 1; switches follow, up to nodes - 1.
        capacity: by (from, to).
        scale: integer units in 1 GB/s.
    """

    ranks: int
    nodes: int
    capacity: Mapping[tuple[int, int], int]
    scale: int

    @classmethod
    def of(cls, network: Network) -> Graph:
        """The graph of a network, in units in which all its bandwidths are integers."""
        index = {name: i for i, name in enumerate(network.nodes)}
        scale = lcm(*(wire.bandwidth.denominator for wire in network.wires))
        return cls(len(network.ranks), len(index), {
            (index[w.source], index[w.target]): int(w.bandwidth * scale)
            for w in network.wires}, scale)

    def reversed(self) -> Graph:
        """The graph with every arc turned round."""
        return Graph(self.ranks, self.nodes, {(b, a): c for (a, b), c in self.capacity.items()},
                     self.scale)


@dataclass(frozen=True)
class Optimum:
    """The best rate.

    Attributes:
        ratio: 1/x*, in seconds per unit of the graph's scale.
        cut: nodes that prove it.
    """

    ratio: Fraction
    cut: frozenset[int]


def optimum(graph: Graph) -> Optimum:
    """1/x* and a cut that proves it. The graph has 2 ranks or more, all connected."""
    entering: dict[int, int] = defaultdict(int)
    for (_, target), capacity in graph.capacity.items():
        entering[target] += capacity
    last = min(range(graph.ranks), key=entering.__getitem__)
    best = Optimum(Fraction(graph.ranks - 1, entering[last]),
                   frozenset(range(graph.nodes)) - {last})
    arcs = list(graph.capacity)
    flows = Flows(graph.nodes + 1, [*arcs, *((graph.nodes, v) for v in range(graph.ranks))])
    done: set[int] = set()
    # spread over the ranks: where the first of each part of the network fail, the rest are soon
    # found to be in order
    for rank in range(graph.ranks):
        while (slower := _slower(graph, flows, best.ratio, done, rank)) is not None:
            best = slower
        done.add(rank)
    return best


def _slower(graph: Graph, flows: Flows, ratio: Fraction, done: set[int],
            rank: int) -> Optimum | None:
    """A cut with a larger ratio that keeps data from `rank`, not from those that are done."""
    p, q = ratio.as_integer_ratio()
    need = q * graph.ranks
    inside = [capacity * p for capacity in graph.capacity.values()]
    check_exact(inside, need * (graph.ranks + 1))
    capacities = inside + [need if v in done else q for v in range(graph.ranks)]
    value, side = flows.cut(graph.nodes, rank, capacities)
    if value >= need:
        return None
    cut = frozenset(side) - {graph.nodes}
    leaving = sum(c for (a, b), c in graph.capacity.items() if a in cut and b not in cut)
    return Optimum(Fraction(sum(1 for v in cut if v < graph.ranks), leaving), cut)


def whole_trees(graph: Graph, ratio: Fraction) -> tuple[int, Fraction]:
    """k, the least number of trees per root at full rate, and how many of them one unit of
    capacity carries.
    """
    p, q = ratio.as_integer_ratio()
    divisor = gcd(q, *graph.capacity.values())
    return q // divisor, Fraction(p, divisor)


# -- with a given number of trees per root, which share a wire only in whole trees


def whole(graph: Graph, per_unit: Fraction) -> Graph:
    """The graph with the number of trees that each arc carries, `per_unit` for each unit of
    capacity, rounded down; each node sends as many as it receives.
    """
    counts = {arc: int(c * per_unit) for arc, c in graph.capacity.items()}
    return _balanced(Graph(graph.ranks, graph.nodes, counts, graph.scale))


def best_unit(graph: Graph, ratio: Fraction, trees: int) -> Fraction:
    """The fewest trees that a unit of capacity has to carry, so that each root has `trees`.

    It is at least ratio * trees, and it is reached where some arc can carry one tree more: those
    steps are searched by halves.

    Args:
        graph: whose capacities are rounded to whole trees.
        ratio: 1/x*, in the graph's units.
        trees: per root.
    """
    low, roots = ratio * trees, [trees] * graph.ranks

    def fits(per_unit: Fraction) -> bool:
        counted = whole(graph, per_unit)
        return not Demand(graph.nodes, counted.capacity, roots).missing(1)[0]

    if fits(low):
        return low
    width = low
    while not fits(low + width):
        width *= 2
    steps = sorted({Fraction(count, capacity) for capacity in set(graph.capacity.values())
                    for count in range(int(low * capacity), int((low + width) * capacity) + 1)
                    if low < Fraction(count, capacity) <= low + width})
    return steps[bisect_left(steps, True, hi=len(steps) - 1, key=fits)]


def _balanced(graph: Graph) -> Graph:
    """The graph with as much less on some arcs as makes every node send what it receives."""
    surplus: dict[int, int] = defaultdict(int)
    for (source, target), count in graph.capacity.items():
        surplus[source] += count
        surplus[target] -= count
    if not any(surplus.values()):
        return graph
    source, sink = graph.nodes, graph.nodes + 1
    arcs = [arc for arc, count in graph.capacity.items() if count]
    ends = [(source, v) if more > 0 else (v, sink) for v, more in surplus.items() if more]
    amounts = [abs(more) for more in surplus.values() if more]
    flow = Flows(graph.nodes + 2, [*arcs, *ends]).arcs(
        source, sink, [*(graph.capacity[arc] for arc in arcs), *amounts])
    less = dict(zip(arcs, flow))
    return Graph(graph.ranks, graph.nodes, {
        arc: count - less.get(arc, 0) for arc, count in graph.capacity.items()}, graph.scale)
