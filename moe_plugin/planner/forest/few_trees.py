"""The best rate with a given number of trees per root, which share a wire only in whole trees."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from fractions import Fraction

from moe_plugin.planner.forest.flow import Demand, Flows
from moe_plugin.planner.forest.optimum import Graph

MAX_STEPS = 1 << 20  # of the rates that are searched


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
