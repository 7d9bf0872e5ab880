"""Throughput-optimal schedules of all-gather, reduce-scatter and all-reduce on any network.

After ForestColl (Zhao et al., arXiv 2402.06787): the cut that bounds the time (`optimum`), switches
replaced by links between ranks (`splitting`), spanning trees packed into them (`packing`). All of
it in integers and fractions, so that the trees reach the bound exactly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from moe_plugin.planner.forest.by_parts import find_parts, trees_by_parts
from moe_plugin.planner.forest.flow import Flows, check_exact
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.optimum import Graph, best_unit, optimum, whole, whole_trees
from moe_plugin.planner.forest.packing import pack
from moe_plugin.planner.forest.schedule import COLLECTIVES, Edge, Paths, Schedule, Tree
from moe_plugin.planner.forest.splitting import Path, Splitting, take
from moe_plugin.utils.messages import short


# The best rate of an all-reduce whose two halves share the wires, and who is root of how much.
#
# Each piece of the data is summed along an inward tree to its root, and sent from there along an
# outward tree, all of it at the same time. A tree enters every part of a partition of the ranks,
# except its root's: with bandwidth C between the parts, at most C / (2 (parts - 1)) GB/s of pieces
# get through. Half of each wire for either direction, and roots where the network wants them, reach
# the least of these bounds (Frank's theorem on branchings with free roots): of a rate K, each set
# of
# ranks X needs K - B(X) / 2 at roots of its own, B(X) the bandwidth into it. The least shares
# that do
# so are found one rank after another, by one max-flow each; if their sum is more than K, the sets
# that need them are a partition with a lower bound, from which the search goes on.
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


MAX_TREES = 1 << 20


def plan(network: Network, collective: str = "all_gather", trees: int | None = None, *,
         overlap: bool = False, symmetry: bool = True) -> Schedule:
    """The schedule with the highest throughput.

    Args:
        network: its ranks and links.
        collective: one of `COLLECTIVES`; all_reduce is a reduce-scatter, then an all-gather.
        trees: k, trees per root; None: as many as the highest throughput needs.
        overlap: of all_reduce: both parts at the same time, on shared wires; roots have the shares
            that are best for that (`planner.forest.overlap`).
        symmetry: clusters of equal parts: plan one for all where that is as fast
            (`planner.forest.by_parts`).
    Raises:
        ValueError: an unknown collective, trees < 1, overlap where it has no meaning, bandwidths
            with so many digits that sums would be rounded, or igraph is missing.
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
    made = _both_ways(whole(graph, per_unit), network, [k] * graph.ranks, collective, symmetry)
    return _checked(Schedule(
        collective, network, best.ratio * graph.scale,
        frozenset(network.nodes[v] for v in best.cut), k, 1 / (per_unit * graph.scale), made,
        fixed=trees is not None))


def _check_request(collective: str, trees: int | None, overlap: bool) -> None:
    if collective not in COLLECTIVES:
        raise ValueError(f"collective {short(collective)} is none of {', '.join(COLLECTIVES)}")
    if trees is not None and not 1 <= trees <= MAX_TREES:
        raise ValueError(f"trees={short(trees)} per root must be from 1 to {MAX_TREES}")
    if overlap and collective != "all_reduce":
        raise ValueError(f"overlap=True with {collective}, which has one part; use all_reduce")
    if overlap and trees is not None:
        raise ValueError(f"overlap=True with trees={trees}: roots have unequal numbers of trees "
                         "then; leave trees out")


def _overlapped(network: Network, graph: Graph, symmetry: bool) -> Schedule:
    shares = best_shares(graph)
    # whole trees: of every root, and over half of every wire
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
    """The largest fraction of which all are multiples."""
    numbers = list(numbers)
    below = lcm(*(n.denominator for n in numbers))
    return Fraction(gcd(*(int(n * below) for n in numbers)), below)


def _checked(schedule: Schedule) -> Schedule:
    schedule.check()
    return schedule


def _both_ways(counted: Graph, network: Network, roots: Sequence[int],
               collective: str, symmetry: bool) -> tuple[Tree, ...]:
    """The trees of a collective: outward ones, and inward ones as outward ones of the network with
    its wires turned round.
    """
    outward, inward = [], []
    turned = counted.reversed()
    same = turned.capacity == counted.capacity
    if collective != "reduce_scatter":
        outward = _trees(counted, network, roots, symmetry)
    if collective != "all_gather":
        made = outward if same and outward else _trees(turned, network, roots, symmetry)
        inward = [tree.reversed() for tree in made]
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
    """Outward spanning trees, of each root as many as stated, with their physical paths."""
    alike = symmetry and len(set(roots)) == 1
    if alike and (parts := find_parts(counted)) is not None:
        made = trees_by_parts(counted, network.nodes, parts, roots[0])
        if made is not None:
            return made
    split = Splitting(counted, roots)
    split.run()
    named = Naming(network, split)
    packed = pack(counted.ranks, split.capacity, roots)
    return [named.tree(partial.root, partial.weight, partial.edges)
            for partial in sorted(packed, key=lambda p: (p.root, -p.weight))]


class Naming:
    """Gives the edges of trees their physical paths, each with what capacity it has."""

    def __init__(self, network: Network, split: Splitting) -> None:
        self._names, self._pools = network.nodes, split.paths
        self._known: dict[tuple[tuple[Path, int], ...], tuple[tuple[tuple[str, ...], int], ...]]
        self._known = {}

    def tree(self, root: int, weight: int, edges: Sequence[tuple[int, int]]) -> Tree:
        """A tree; its edges take their paths away from those that follow."""
        return Tree(root, weight, tuple(
            Edge(*edge, self._paths(edge, weight)) for edge in _by_depth(root, edges)))

    def _paths(self, edge: tuple[int, int], weight: int) -> tuple[tuple[tuple[str, ...], int], ...]:
        pool, used = self._pools[edge], Counter()
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


# -- all-reduce: an outward tree for each inward one


def _paired(inward: Sequence[Tree], outward: Sequence[Tree]) -> tuple[list[Tree], list[Tree]]:
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
