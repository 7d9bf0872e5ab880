"""What communication libraries do, on the same simulator: rings, double binary trees, recursive
halving and doubling.

Each is a set of trees over the ranks, as ForestColl's schedule is: a ring's are paths, recursive
doubling's are binomial trees. Messages take the shortest way through the network, of several the
one whose narrowest wire is widest. Each tries several orders of the ranks and keeps the fastest.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.simulate import Program, Route, ShareMove

LARGEST_GROUP = 16  # ranks of a node, as far as orders are tried
SEARCH_STEPS = 20_000  # for a ring over direct links

Edges = Sequence[tuple[int, int]]  # source and target, in order


@dataclass(frozen=True)
class RankTree:
    """A tree over ranks.

    Attributes:
        share: of the result.
        outward: from the root to all.
        inward: from all to the root; empty: outward turned round.
    """

    root: int
    share: Fraction
    outward: Edges
    inward: Edges = ()

    def steps(self, collective: str) -> list[tuple[int, int, bool]]:
        """Source, target, whether the target sums; of the whole collective, in order."""
        sums = list(self.inward) or [(b, a) for a, b in reversed(self.outward)]
        down = [(a, b, True) for a, b in sums] if collective != "all_gather" else []
        up = [(a, b, False) for a, b in self.outward] if collective != "reduce_scatter" else []
        return down + up


def baselines(network: Network, collective: str) -> list[Program]:
    """Ring, double binary tree and recursive halving/doubling for a network of 2 ranks or more."""
    routes, ranks = Routes(network), len(network.ranks)
    candidates = {
        "ring": (*_rings(ranks), *_disjoint_rings(network)),
        "double binary tree": _double_trees(ranks, collective),
        "recursive halving/doubling": _doubling(ranks),
    }
    return [_program(network, collective, name,
                     min(sets, key=lambda trees: _slowest(network, collective, trees, routes)),
                     routes) for name, sets in candidates.items()]


def _slowest(network: Network, collective: str, trees: Sequence[RankTree],
             routes: Routes) -> Fraction:
    """Seconds per GB of result that the busiest wire needs."""
    pairs: Counter[tuple[int, int]] = Counter()
    unit = min(tree.share for tree in trees)  # all shares are whole multiples of it
    for tree in trees:
        pairs.update({(a, b): int(tree.share / unit) for a, b, _ in tree.steps(collective)})
    loads: Counter[tuple[str, str]] = Counter()
    for pair, count in pairs.items():
        route = routes(*pair)
        for ends in zip(route, route[1:]):
            loads[ends] += count
    return max(loads[w.ends] * unit / w.bandwidth for w in network.wires)


def _program(network: Network, collective: str, name: str, trees: Sequence[RankTree],
             routes: Routes) -> Program:
    moves = [ShareMove(piece, source, target, ((routes(source, target), Fraction(1)),), sums)
             for piece, tree in enumerate(trees)
             for source, target, sums in tree.steps(collective)]
    return Program(name, collective, network, tuple(tree.root for tree in trees),
                   tuple(tree.share for tree in trees), tuple(moves))


class Routes:
    """Shortest ways between ranks, found once for each source."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._out: dict[str, list[tuple[str, Fraction]]] = {node: [] for node in network.nodes}
        for wire in network.wires:
            self._out[wire.source].append((wire.target, wire.bandwidth))
        self._before: dict[int, dict[str, str]] = {}
        self._known: dict[tuple[int, int], Route] = {}

    def __call__(self, source: int, target: int) -> Route:
        """Node names from one rank to another."""
        if source not in self._before:
            self._before[source] = self._search(self._network.ranks[source])
        if (source, target) not in self._known:
            way, before = [self._network.ranks[target]], self._before[source]
            while way[-1] != self._network.ranks[source]:
                way.append(before[way[-1]])
            self._known[source, target] = tuple(reversed(way))
        return self._known[source, target]

    def _search(self, start: str) -> dict[str, str]:
        """The node before each node: fewest wires first, then the widest narrowest one."""
        best: dict[str, tuple[int, Fraction]] = {}
        before: dict[str, str] = {}
        queue: list[tuple[int, Fraction, str, str]] = [(0, Fraction(-(10**12)), start, start)]
        while queue:
            hops, narrowest, node, came_from = heapq.heappop(queue)
            if node in best:
                continue
            best[node] = hops, narrowest
            before[node] = came_from
            for following, bandwidth in self._out[node]:
                if following not in best:
                    heapq.heappush(queue, (hops + 1, max(narrowest, -bandwidth), following, node))
        return before


# -- trees over positions, then over ranks in some order


def _orders(ranks: int) -> Iterator[list[int]]:
    """As numbered; and the first rank of each group, then the second, ..., for sizes of a group."""
    yield list(range(ranks))
    for size in _group_sizes(ranks):
        yield [first + i for i in range(size) for first in range(0, ranks, size)]


def _group_sizes(ranks: int) -> list[int]:
    return [g for g in range(2, min(ranks, LARGEST_GROUP) + 1) if ranks % g == 0]


def _rings(ranks: int) -> Iterator[list[RankTree]]:
    """One ring, data one way or half of it each way; or as many rings as a node has ranks, so that
    each crosses nodes at another rank.
    """
    for order in _orders(ranks):
        yield _around([order])
        yield _around([order, order[::-1]])
    for size in _group_sizes(ranks):
        yield _around([[first + (turn + i) % size for first in range(0, ranks, size)
                        for i in range(size)] for turn in range(size)])


def _around(rings: Sequence[Sequence[int]]) -> list[RankTree]:
    """Trees of rings, which sum and gather in the same direction."""
    ranks, trees = len(rings[0]), []
    for ring in rings:
        edges = [(ring[i], ring[(i + 1) % ranks]) for i in range(ranks)]
        for at in range(ranks):
            turned = edges[at:] + edges[:at]
            trees.append(RankTree(ring[at], Fraction(1, ranks * len(rings)), turned[:-1],
                                  turned[1:]))
    return trees


def _disjoint_rings(network: Network) -> Iterator[list[RankTree]]:
    """Rings over direct links alone, each over bandwidth that the ones before leave; used both
    ways. None where no such ring is found soon.
    """
    number = {name: rank for rank, name in enumerate(network.ranks)}
    left = {(number[w.source], number[w.target]): w.bandwidth for w in network.wires
            if w.source in number and w.target in number}
    unit = min(left.values(), default=Fraction(0))
    rings: list[list[int]] = []
    while left and (ring := _hamiltonian(left, len(number))):
        rings.append(ring)
        for pair in zip(ring, ring[1:] + ring[:1]):
            for ends in (pair, pair[::-1]):
                left[ends] -= unit
                if left[ends] < unit:
                    del left[ends]
        yield _around([*rings, *(ring[::-1] for ring in rings)])


def _hamiltonian(pairs: Mapping[tuple[int, int], Fraction], ranks: int) -> list[int]:
    """A ring over all ranks along `pairs` of this bandwidth, if there in both directions; empty:
    none is found in so many steps. The widest way goes first, then to the rank with the fewest ways
    on (Warnsdorff).
    """
    beside: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for a, b in pairs:
        if (b, a) in pairs:
            beside[a].add(b)
    path, visited, tries = [0], {0}, [None]
    for _ in range(SEARCH_STEPS):
        if tries[-1] is None:
            tries[-1] = sorted(beside[path[-1]] - visited,
                               key=lambda rank: (pairs[path[-1], rank],
                                                 -len(beside[rank] - visited), -rank))
        if len(path) == ranks and ranks > 2 and 0 in beside[path[-1]]:
            return path
        if tries[-1]:
            path.append(tries[-1].pop())
            visited.add(path[-1])
            tries.append(None)
        else:
            visited.discard(path.pop())
            tries.pop()
            if not path:
                return []
    return []


def _double_trees(ranks: int, collective: str) -> Iterator[list[RankTree]]:
    """Two binary trees with half of the data each; what is a leaf in one is inside the other.

    All-reduce sums towards the root of each. Gathering sends each rank's part along both trees.
    """
    up = [_parent(at, ranks) for at in range(ranks)]
    other = (lambda at: ranks - 1 - at) if ranks % 2 == 0 else (lambda at: (at + 1) % ranks)
    for order in _orders(ranks):
        trees = []
        for place in (lambda at: at, other):
            beside: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
            for at in range(1, ranks):
                a, b = order[place(at)], order[place(up[at])]
                beside[a].append(b)
                beside[b].append(a)
            roots = [order[place(0)]] if collective == "all_reduce" else range(ranks)
            share = Fraction(1, 2 * len(roots))
            trees += [RankTree(root, share, _away_from(root, beside)) for root in roots]
        yield trees


def _parent(at: int, ranks: int) -> int:
    """Of a position in the binary tree with root 0 whose odd positions are leaves."""
    bit = at & -at
    up = (at ^ bit) | (bit << 1)
    return up if up < ranks else at ^ bit


def _away_from(root: int, beside: dict[int, list[int]]) -> Edges:
    edges, seen = [], [root]
    for node in seen:
        for following in beside[node]:
            if following not in seen:
                edges.append((node, following))
                seen.append(following)
    return edges


def _doubling(ranks: int) -> Iterator[list[RankTree]]:
    """Step i exchanges all so far with the rank at distance 2 ** i; Bruck's algorithm, which sends
    on to such ranks, where their number is no power of two.
    """
    partner: Callable[[int, int], int] = ((lambda at, far: at ^ far) if ranks & (ranks - 1) == 0
                                          else (lambda at, far: (at + far) % ranks))
    for order in _orders(ranks):
        trees = []
        for at in range(ranks):
            edges, holders, far = [], [at], 1
            while far < ranks:
                new = [(a, partner(a, far)) for a in holders]
                new = [pair for pair in new if pair[1] not in holders]
                edges += new
                holders += [b for _, b in new]
                far *= 2
            trees.append(RankTree(order[at], Fraction(1, ranks),
                                  [(order[a], order[b]) for a, b in edges]))
        yield trees
