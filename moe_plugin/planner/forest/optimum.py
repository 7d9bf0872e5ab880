"""Compute the minimum time of a collective, which is determined by the bottleneck cut of the
network.

Consider any set S of nodes that does not contain all ranks. The shards of all ranks in S must leave
S over wires with the total bandwidth B(S). Therefore the minimum time, in seconds per GB of a
shard, is `1/x* = max over S of (ranks in S) / B(S)`. A rate x is possible if every rank can receive
data from all ranks at the rate x at the same time. Maximum flows test whether a rate is possible.
If the maximum flow to a rank is too small, the corresponding minimum cut gives a set S that limits
the rate to a lower value, with which the search continues. Each new cut limits the rate more than
all earlier cuts. Therefore a rank that has passed its test need not be tested again, and each new
cut requires only one additional test.
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
    """A network with integer capacities.

    Attributes:
        ranks: number of ranks. The ranks are the nodes 0 to ranks - 1.
        nodes: total number of nodes. Switches have higher indices.
        capacity: capacity of each arc (from, to).
        scale: number of capacity units that correspond to 1 GB/s.
    """

    ranks: int
    nodes: int
    capacity: Mapping[tuple[int, int], int]
    scale: int

    @classmethod
    def of(cls, network: Network) -> Graph:
        """Convert a network to a graph. The unit of capacity is chosen so that all bandwidths are
        integers.
        """
        index = {name: i for i, name in enumerate(network.nodes)}
        scale = lcm(*(wire.bandwidth.denominator for wire in network.wires))
        return cls(len(network.ranks), len(index), {
            (index[w.source], index[w.target]): int(w.bandwidth * scale)
            for w in network.wires}, scale)

    def reversed(self) -> Graph:
        """Return a copy of the graph in which every arc is reversed."""
        return Graph(self.ranks, self.nodes, {(b, a): c for (a, b), c in self.capacity.items()},
                     self.scale)


@dataclass(frozen=True)
class Optimum:
    """The best rate.

    Attributes:
        ratio: minimum time 1/x*, in seconds per unit of data. The graph's scale defines the unit of
            data.
        cut: a set of nodes. The bandwidth out of this set proves that no shorter time is possible.
    """

    ratio: Fraction
    cut: frozenset[int]


def optimum(graph: Graph) -> Optimum:
    """Return the minimum time 1/x*, and a cut that proves that no shorter time is possible. The
    graph must be connected and contain at least 2 ranks.
    """
    entering: dict[int, int] = defaultdict(int)
    for (_, target), capacity in graph.capacity.items():
        entering[target] += capacity
    last = min(range(graph.ranks), key=entering.__getitem__)
    best = Optimum(Fraction(graph.ranks - 1, entering[last]),
                   frozenset(range(graph.nodes)) - {last})
    arcs = list(graph.capacity)
    flows = Flows(graph.nodes + 1, [*arcs, *((graph.nodes, v) for v in range(graph.ranks))])
    done: set[int] = set()
    # every rank is tested with the best ratio so far; ranks in `done` count as sources, so most
    # later tests succeed at once
    for rank in range(graph.ranks):
        while (slower := _slower(graph, flows, best.ratio, done, rank)) is not None:
            best = slower
        done.add(rank)
    return best


def _slower(graph: Graph, flows: Flows, ratio: Fraction, done: set[int],
            rank: int) -> Optimum | None:
    """Return a cut that separates `rank` from other ranks and limits the rate further, or None if
    there is no such cut.
    """
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
    """Return the number k of trees per root, and the number of trees per unit of capacity.

    The number k is the smallest number of trees per root that reaches the maximum rate.
    """
    p, q = ratio.as_integer_ratio()
    divisor = gcd(q, *graph.capacity.values())
    return q // divisor, Fraction(p, divisor)


# A given number of trees per root, which share a wire only in whole trees.


def whole(graph: Graph, per_unit: Fraction) -> Graph:
    """Return a graph in which the capacity of each arc is the number of trees that can use the arc.

    One unit of the original capacity is enough for `per_unit` trees. The number of trees per arc is
    rounded down. Capacities are then reduced until each node has the same total capacity of
    incoming and outgoing arcs.
    """
    counts = {arc: int(c * per_unit) for arc, c in graph.capacity.items()}
    return _balanced(Graph(graph.ranks, graph.nodes, counts, graph.scale))


def best_unit(graph: Graph, ratio: Fraction, trees: int) -> Fraction:
    """Return the smallest number of trees per unit of capacity that allows each root to have
    `trees` trees.

    The returned number is at least `ratio * trees`. The number is found by bisection over all
    values at which the capacity of some arc becomes sufficient for one more tree.

    Args:
        graph: graph whose capacities will be converted to numbers of trees.
        ratio: minimum time 1/x* in the graph's units (see `optimum`).
        trees: number of trees that each root must have.
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
    """Subtract a flow so that each node has the same total capacity of incoming and outgoing arcs.
    """
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
