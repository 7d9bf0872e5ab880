"""Splits inward and outward trees so that each inward one has an outward one of its weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moe_plugin.planner.forest.schedule import Edge, Paths, Tree


def paired(inward: Sequence[Tree], outward: Sequence[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Trees of which the i-th of both have the same root and weight: split where they have not.

    The weights of each root have the same sum in both.
    """
    waiting: dict[int, list[Tree]] = defaultdict(list)
    for tree in reversed(outward):
        waiting[tree.root].append(tree)
    found: tuple[list[Tree], list[Tree]] = [], []
    for tree in inward:
        while tree is not None:
            other = waiting[tree.root].pop()
            weight = min(tree.weight, other.weight)
            first, tree = _split(tree, weight)
            second, rest = _split(other, weight)
            if rest is not None:
                waiting[rest.root].append(rest)
            found[0].append(first)
            found[1].append(second)
    return found


def _split(tree: Tree, weight: int) -> tuple[Tree, Tree | None]:
    """`weight` of a tree, and what is left of it."""
    if tree.weight == weight:
        return tree, None
    halves: tuple[list[Edge], list[Edge]] = [], []
    for edge in tree.edges:
        for half, paths in zip(halves, _divided(edge.paths, weight)):
            half.append(Edge(edge.source, edge.target, paths))
    return (Tree(tree.root, weight, tuple(halves[0]), tree.inward),
            Tree(tree.root, tree.weight - weight, tuple(halves[1]), tree.inward))


def _divided(paths: Paths, count: int) -> tuple[Paths, Paths]:
    first, second = [], []
    for path, times in paths:
        part = min(times, count)
        count -= part
        if part:
            first.append((path, part))
        if times > part:
            second.append((path, times - part))
    return tuple(first), tuple(second)
