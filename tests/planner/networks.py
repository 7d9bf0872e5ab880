"""Random networks, the best rate by brute force, and what a schedule has to be; no package code.
"""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from moe_plugin.planner.forest import Network, Schedule, Tree, Wire

KINDS = {"all_gather": [False], "reduce_scatter": [True], "all_reduce": [True, False]}


@st.composite
def networks(draw: st.DrawFn, largest: int = 14, both_ways: bool = False) -> Network:
    """Eulerian networks of 2 to `largest` nodes, some of them switches: sums of cycles.

    both_ways: every link has the same bandwidth in both directions.
    """
    nodes = draw(st.integers(2, largest))
    ranks = draw(st.integers(2, nodes))
    order = draw(st.permutations(range(nodes)))
    cycles = [order]
    for _ in range(draw(st.integers(0, 6))):
        cycles.append(draw(st.lists(st.integers(0, nodes - 1), min_size=2, max_size=nodes,
                                    unique=True)))
    rates: Counter[tuple[int, int]] = Counter()
    unit = Fraction(draw(st.sampled_from([1, 5, 25])), draw(st.sampled_from([1, 2, 3])))
    for cycle in cycles:
        rate = draw(st.integers(1, 9)) * unit
        for a, b in zip(cycle, (*cycle[1:], cycle[0])):
            rates[a, b] += rate
            if both_ways:
                rates[b, a] += rate
    # a rank's number says nothing about its place
    names = draw(st.permutations([f"r{i}" for i in range(ranks)]
                                 + [f"s{i}" for i in range(nodes - ranks)]))
    return Network("random", tuple(f"r{i}" for i in range(ranks)),
                   tuple(f"s{i}" for i in range(nodes - ranks)),
                   tuple(Wire(names[a], names[b], rate) for (a, b), rate in rates.items()))


def slowest_cuts(network: Network) -> tuple[Fraction, set[frozenset[str]]]:
    """1/x* and all cuts that reach it, out of all sets of nodes."""
    index = {name: i for i, name in enumerate(network.nodes)}
    scale = np.lcm.reduce([w.bandwidth.denominator for w in network.wires])
    sets = np.arange(1 << len(index))
    leaving = np.zeros(len(sets), dtype=np.int64)
    for wire in network.wires:
        a, b = index[wire.source], index[wire.target]
        leaving += int(wire.bandwidth * int(scale)) * ((sets >> a & 1) & ~(sets >> b & 1))
    inside = sum(sets >> i & 1 for i in range(len(network.ranks)))
    ratios = {(int(n), int(b)) for n, b in zip(inside, leaving) if 0 < n < len(network.ranks)}
    best = max(Fraction(n, b) for n, b in ratios)
    found = [s for s in sets if 0 < inside[s] < len(network.ranks)
             and Fraction(int(inside[s]), int(leaving[s])) == best]
    return best * int(scale), {frozenset(name for name, i in index.items() if s >> i & 1)
                               for s in found}


def least_of_partitions(network: Network) -> Fraction:
    """The highest rate of an all-reduce by trees that any disjoint sets of nodes allow, GB/s."""
    nodes, ranks = network.nodes, set(network.ranks)
    into = {frozenset(part): network.out_of(part) for size in range(1, len(nodes) + 1)
            for part in itertools.combinations(nodes, size)}

    def partitions(left: tuple[str, ...]) -> list[list[set[str]]]:
        if not left:
            return [[]]
        found = []
        for rest in partitions(left[1:]):
            found += [[{left[0]}, *rest]]
            found += [[*rest[:i], part | {left[0]}, *rest[i + 1:]] for i, part in enumerate(rest)]
        return found

    rates = []
    for partition in partitions(nodes):
        parts = [part for part in partition if part & ranks]
        for left_out in (set(), *parts):
            some = [into[frozenset(part)] for part in parts if part is not left_out]
            if len(some) > 1:
                rates.append(sum(some) / (2 * (len(some) - 1)))
    return min(rates)


def verify(schedule: Schedule) -> None:
    """Trees span, weights are complete, data is there before it is sent, wires suffice."""
    network, count = schedule.network, len(schedule.network.ranks)
    kinds = KINDS[schedule.collective]
    assert {t.inward for t in schedule.trees} == set(kinds)
    if schedule.collective == "all_reduce":
        middle = len(schedule.trees) // 2
        assert [(t.root, t.weight, t.inward) for t in schedule.trees[:middle]] == [
            (t.root, t.weight, not t.inward) for t in schedule.trees[middle:]]
    load: Counter[tuple[str, str]] = Counter()
    for inward in kinds:
        trees = [t for t in schedule.trees if t.inward is inward]
        if schedule.overlap:
            assert sum(t.weight for t in trees) == schedule.k
        else:
            load.clear()
            for root in range(count):
                assert sum(t.weight for t in trees if t.root == root) == schedule.k
        for tree in trees:
            assert tree.weight > 0
            _verify_tree(tree, count)
            for edge in tree.edges:
                assert sum(times for _, times in edge.paths) == tree.weight
                for path, times in edge.paths:
                    assert (path[0], path[-1]) == (
                        network.ranks[edge.source], network.ranks[edge.target])
                    assert set(path[1:-1]) <= set(network.switches) and times > 0
                    assert len(set(path)) == len(path)
                    for hop in zip(path, path[1:]):
                        load[hop] += times
        wires = {w.ends: w.bandwidth for w in network.wires}
        assert all(times * schedule.unit <= wires[hop] for hop, times in load.items())


def _verify_tree(tree: Tree, ranks: int) -> None:
    assert len(tree.edges) == ranks - 1
    if tree.inward:  # a rank sends once, after all that it receives
        sent: set[int] = set()
        for edge in tree.edges:
            assert edge.target not in sent and edge.source not in sent
            sent.add(edge.source)
        assert tree.root not in sent and len(sent) == ranks - 1
        return
    reached = {tree.root}
    depths = {tree.root: 0}
    for edge in tree.edges:
        assert edge.source in reached and edge.target not in reached
        reached.add(edge.target)
        depths[edge.target] = depths[edge.source] + 1
    assert len(reached) == ranks
    assert list(depths.values()) == sorted(depths.values())  # breadth first
