"""Throughput-optimal schedules of all-gather, reduce-scatter and all-reduce on any network.

The method is ForestColl (Zhao et al., arXiv 2402.06787). ForestColl first finds the bottleneck cut
(`optimum`), then replaces switches by links between ranks (`optimum`), and finally packs spanning
trees into the resulting graph (`flow`). All computations use integers and fractions, so that the
schedules reach the lower bound on the time exactly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from moe_plugin.planner.forest.by_parts import find_parts, trees_by_parts
from moe_plugin.planner.forest.flow import Flows, check_exact, pack
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.optimum import (
    Graph,
    Path,
    Splitting,
    best_unit,
    optimum,
    take,
    whole,
    whole_trees,
)
from moe_plugin.planner.forest.schedule import COLLECTIVES, Edge, Paths, Schedule, Tree
from moe_plugin.utils.messages import short


# The best rate of an all-reduce whose two halves share the wires, and the share of each root.
#
# Each piece of the data is summed along an inward tree to its root and sent from there along an
# outward tree, with all trees running at the same time. For any partition of the ranks, a tree
# enters every part except its root's. With bandwidth C between the parts, at most
# C / (2 (parts - 1)) GB/s of pieces can pass. The least of these bounds is reached if each
# direction uses half of each wire and roots are placed freely (Frank's theorem on branchings with
# free roots). At rate K, each set of ranks X needs roots with a rate of K - B(X) / 2 inside, where
# B(X) is the bandwidth into X. The least such shares are found one rank after another, with one
# max-flow each. If their sum exceeds K, the sets that need them form a partition with a lower
# bound, from which the search continues.
@dataclass(frozen=True)
class Shares:
    """The rate of an all-reduce whose two phases overlap, divided into one share per root.

    Attributes:
        rate: K, the sum of the shares, in the units of the graph's capacities.
        roots: for each rank, the share of the data that is sent along trees whose root is this
            rank. The shares of all roots sum to K.
        parts: disjoint sets of nodes. The bandwidths between them prove that no higher rate is
            possible.
    """

    rate: Fraction
    roots: tuple[Fraction, ...]
    parts: tuple[frozenset[int], ...]


def best_shares(graph: Graph) -> Shares:
    """Return the highest possible rate, and the share of each root. All roots have equal shares,
    unless unequal shares allow a higher rate.
    """
    parts = tuple(frozenset([rank]) for rank in range(graph.ranks))
    while True:
        rate = _bound(graph, parts)
        result = _Search(graph, rate).run()
        if isinstance(result, list):
            return Shares(rate, tuple(result), parts)
        if _bound(graph, result) >= rate:
            raise AssertionError(f"{len(result)} parts do not lower the rate {rate}")
        parts = result


def _bound(graph: Graph, parts: Sequence[frozenset[int]]) -> Fraction:
    part_of = {node: i for i, part in enumerate(parts) for node in part}
    crossing = sum(c for (a, b), c in graph.capacity.items()
                   if b in part_of and part_of.get(a) != part_of[b])
    return Fraction(crossing, 2 * (len(parts) - 1))


class _Search:
    """A search for the smallest shares of the roots for a given rate p / q. The search uses only
    integers.

    For N ranks, shares are multiples of 1 / (2 q N), so that equal shares are also integers.
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
        """Return shares that sum to the rate. If no such shares exist, return disjoint sets of
        nodes that prove a lower bound on the time.
        """
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
        """Reduce the share of a rank as far as possible. Return the set of nodes that prevents a
        smaller share, or an empty set.
        """
        value, side = self._flows.cut(self._graph.nodes, rank, self._inside + self._roots)
        spare = value - self._rate
        self._roots[rank] = max(min(self._roots[rank], least), self._roots[rank] - spare)
        if not self._roots[rank] or self._roots[rank] < least:
            return frozenset()
        return frozenset(range(self._graph.nodes)) - frozenset(side)


def _merged(sets: Sequence[frozenset[int]], ranks: int) -> tuple[frozenset[int], ...]:
    """Merge sets of nodes that have a rank in common. Switches that belong to several of the merged
    sets are then removed.
    """
    parts: list[frozenset[int]] = []
    for each in sets:
        apart = [part for part in parts if not _share(part, each, ranks)]
        parts = [*apart, each.union(*(part for part in parts if _share(part, each, ranks)))]
    shared = {node for node, count in Counter(node for p in parts for node in p).items()
              if count > 1}
    return tuple(part - shared for part in parts)


def _share(a: frozenset[int], b: frozenset[int], ranks: int) -> bool:
    return any(node < ranks for node in a & b)


MAX_TREES = 1 << 20


def plan(network: Network, collective: str = "all_gather", trees: int | None = None, *,
         overlap: bool = False, symmetry: bool = True) -> Schedule:
    """Return the schedule with the highest throughput.

    Args:
        network: the ranks and links on which the collective runs.
        collective: name of the collective, one of `COLLECTIVES`. An all_reduce consists of a
            reduce-scatter followed by an all-gather.
        trees: number k of trees per root. By default, k is the number of trees that the highest
            throughput requires.
        overlap: whether the reduce-scatter and the all-gather of an all_reduce run at the same time
            and share the bandwidth of the wires. If `overlap` is True, `best_shares` computes the
            optimal share of each root.
        symmetry: whether all parts of a cluster with identical parts use the same plan, provided
            that the schedule is not slower (see `planner.forest.by_parts`).

    Raises:
        ValueError: If the collective is unknown, if `trees` is out of bounds, if `overlap` is given
        for a collective other than all_reduce, if igraph is not installed, or if bandwidths have so
        many digits that sums could not be computed exactly.
    """
    _check_request(collective, trees, overlap)
    if len(network.ranks) == 1:
        return _alone(network, collective, trees, overlap)
    graph = Graph.of(network)
    if overlap:
        return _overlapped(network, graph, symmetry)
    best = optimum(graph)
    if trees is None:
        k, per_unit = whole_trees(graph, best.ratio)
    else:
        k, per_unit = trees, best_unit(graph, best.ratio, trees)
    packed = _both_ways(whole(graph, per_unit), network, [k] * graph.ranks, collective, symmetry)
    return _checked(Schedule(
        collective, network, best.ratio * graph.scale,
        frozenset(network.nodes[v] for v in best.cut), k, 1 / (per_unit * graph.scale), packed,
        fixed=trees is not None))


def _check_request(collective: str, trees: int | None, overlap: bool) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"collective {short(collective)} is unknown. Choose from "
                         f"{', '.join(COLLECTIVES)}")
    if trees is not None and not 1 <= trees <= MAX_TREES:
        raise ValueError(f"trees={short(trees)} per root must be from 1 to {MAX_TREES}")
    if overlap and collective != "all_reduce":
        raise ValueError(f"overlap=True is not possible with {collective}, which has only one "
                         "phase. Use all_reduce")
    if overlap and trees is not None:
        raise ValueError(f"overlap=True cannot be combined with trees={trees}, because roots then "
                         "have different numbers of trees. Omit trees")


def _overlapped(network: Network, graph: Graph, symmetry: bool) -> Schedule:
    shares = best_shares(graph)
    # each root needs a whole number of trees, and so does half of every wire
    per_unit = 1 / _common([*shares.roots, *(Fraction(c, 2) for c in graph.capacity.values())])
    roots = [int(share * per_unit) for share in shares.roots]
    counted = Graph(graph.ranks, graph.nodes, {
        arc: int(c * per_unit / 2) for arc, c in graph.capacity.items()}, graph.scale)
    return _checked(Schedule(
        "all_reduce", network, graph.ranks * graph.scale / shares.rate, frozenset(), sum(roots),
        1 / (per_unit * graph.scale),
        _both_ways(counted, network, roots, "all_reduce", symmetry), overlap=True,
        parts=tuple(frozenset(network.nodes[v] for v in part) for part in shares.parts)))


def _common(numbers: Iterable[Fraction]) -> Fraction:
    """Return the largest fraction of which all given numbers are integer multiples."""
    numbers = list(numbers)
    below = lcm(*(n.denominator for n in numbers))
    return Fraction(gcd(*(int(n * below) for n in numbers)), below)


def _checked(schedule: Schedule) -> Schedule:
    schedule.check()
    return schedule


def _both_ways(counted: Graph, network: Network, roots: Sequence[int],
               collective: str, symmetry: bool) -> tuple[Tree, ...]:
    """Return the inward and outward trees of a collective.

    Inward trees are computed as outward trees of the network in which all wires are reversed.
    """
    outward: Sequence[Tree] = []
    inward: Sequence[Tree] = []
    turned = counted.reversed()
    same = turned.capacity == counted.capacity
    if collective != "reduce_scatter":
        outward = _trees(counted, network, roots, symmetry)
    if collective != "all_gather":
        reverse_trees = outward if same and outward else _trees(turned, network, roots, symmetry)
        inward = [tree.reversed() for tree in reverse_trees]
    if inward and outward and not same:
        inward, outward = _paired(inward, outward)
    return (*inward, *outward)


def _alone(network: Network, collective: str, trees: int | None, overlap: bool) -> Schedule:
    kinds = {"all_gather": (False,), "reduce_scatter": (True,), "all_reduce": (True, False)}
    k = trees or 1
    return Schedule(collective, network, Fraction(0), frozenset(), k, Fraction(1),
                    tuple(Tree(0, k, (), inward) for inward in kinds[collective]),
                    fixed=trees is not None, overlap=overlap)


def _trees(counted: Graph, network: Network, roots: Sequence[int], symmetry: bool) -> list[Tree]:
    """For each root i, return `roots[i]` outward spanning trees whose edges are physical paths."""
    alike = symmetry and len(set(roots)) == 1
    if alike and (parts := find_parts(counted)) is not None:
        trees = trees_by_parts(counted, network.nodes, parts, roots[0])
        if trees is not None:
            return trees
    split = Splitting(counted, roots)
    split.run()
    named = Naming(network, split)
    packed = pack(counted.ranks, split.capacity, roots)
    return [named.tree(partial.root, partial.weight, partial.edges)
            for partial in sorted(packed, key=lambda p: (p.root, -p.weight))]


class Naming:
    """Assigns physical paths to the edges of trees, without exceeding the capacity of any path."""

    def __init__(self, network: Network, split: Splitting) -> None:
        self._names, self._pools = network.nodes, split.paths
        self._known: dict[tuple[tuple[Path, int], ...], tuple[tuple[tuple[str, ...], int], ...]]
        self._known = {}

    def tree(self, root: int, weight: int, edges: Sequence[tuple[int, int]]) -> Tree:
        """Return a tree in which each edge has physical paths. The capacity of these paths is then
        no longer available to other trees.
        """
        return Tree(root, weight, tuple(
            Edge(*edge, self._paths(edge, weight)) for edge in _by_depth(root, edges)))

    def _paths(self, edge: tuple[int, int], weight: int) -> tuple[tuple[tuple[str, ...], int], ...]:
        pool = self._pools[edge]
        used: Counter[Path] = Counter()
        while weight:
            count = min(weight, pool[-1][1])
            used[take(pool, count)] += count
            weight -= count
        key = tuple(used.items())
        if key not in self._known:
            self._known[key] = tuple(
                (tuple(self._names[node] for node in path), count) for path, count in key)
        return self._known[key]


def _by_depth(root: int, edges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    depth = {root: 0}
    for source, target in edges:
        depth[target] = depth[source] + 1
    return iter(sorted(edges, key=lambda edge: depth[edge[0]]))


# All-reduce: an outward tree for each inward tree.


def _paired(inward: Sequence[Tree], outward: Sequence[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Split trees so that the inward tree and the outward tree with the same index have the same
    root and weight.

    For each root, the inward trees and the outward trees must have the same total weight.
    """
    waiting: dict[int, list[Tree]] = defaultdict(list)
    for tree in reversed(outward):
        waiting[tree.root].append(tree)
    pairs: tuple[list[Tree], list[Tree]] = [], []
    for tree in inward:
        left: Tree | None = tree
        while left is not None:
            other = waiting[left.root].pop()
            weight = min(left.weight, other.weight)
            first, left = _split(left, weight)
            second, rest = _split(other, weight)
            if rest is not None:
                waiting[rest.root].append(rest)
            pairs[0].append(first)
            pairs[1].append(second)
    return pairs


def _split(tree: Tree, weight: int) -> tuple[Tree, Tree | None]:
    """Split a tree into a tree of weight `weight` and a tree with the remaining weight."""
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
