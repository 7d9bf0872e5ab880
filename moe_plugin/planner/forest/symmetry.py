"""Finds whether a cluster is made of equal parts that trade places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_plugin.planner.forest.optimum import Graph

Arc = tuple[int, int]


@dataclass(frozen=True)
class Parts:
    """Equal parts of a graph, rank after rank.

    Attributes:
        size: P, ranks of each.
        count: B, their number.
        turned: for each node, the one whose place it takes where each part takes the next
            one's.
        between: nodes that stay in place.
    """

    size: int
    count: int
    turned: tuple[int, ...]
    between: frozenset[int]


def find_parts(graph: Graph) -> Parts | None:
    """The smallest equal parts with switches between them; None where there are none."""
    beside: dict[int, set[int]] = {v: set() for v in range(graph.nodes)}
    for source, target in graph.capacity:
        beside[source].add(target)
        beside[target].add(source)
    for size in range(1, graph.ranks // 2 + 1):
        if graph.ranks % size:
            continue
        turned = _turned(graph, beside, size)
        between = frozenset(v for v, goal in enumerate(turned or ()) if v == goal)
        if turned and between:
            return Parts(size, graph.ranks // size, turned, between)
    return None


def _turned(graph: Graph, beside: Mapping[int, set[int]], size: int) -> tuple[int, ...] | None:
    """Where each node goes if rank i goes to rank i + size; None where a wire would change."""
    turned = {v: (v + size) % graph.ranks for v in range(graph.ranks)}
    left = list(range(graph.ranks, graph.nodes))
    while left:
        # a switch goes to where all goes that is beside it; of several alike, to the first
        goals: dict[frozenset[tuple[int, int, int]], list[int]] = {}
        for switch in left:
            around = _around(graph, switch, {v: v for v in beside[switch] if v in turned})
            goals.setdefault(around, []).append(switch)
        found: dict[int, int] = {}
        for switch in left:
            around = _around(graph, switch, {v: turned[v] for v in beside[switch] if v in turned})
            alike = goals.get(around)
            if around and alike:
                found[switch] = alike.pop(alike.index(switch) if switch in alike else 0)
        if not found:
            return None
        turned.update(found)
        left = [switch for switch in left if switch not in found]
    if len(set(turned.values())) < graph.nodes or any(
            graph.capacity.get((turned[a], turned[b])) != capacity
            for (a, b), capacity in graph.capacity.items()):
        return None
    return tuple(turned[v] for v in range(graph.nodes))


def _around(graph: Graph, switch: int, names: Mapping[int, int]) -> frozenset[tuple[int, int, int]]:
    return frozenset((name, graph.capacity.get((switch, v), 0), graph.capacity.get((v, switch), 0))
                     for v, name in names.items())
