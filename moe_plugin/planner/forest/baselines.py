"""Simulation of the collective algorithms that communication libraries commonly use, for comparison
with ForestColl.

The algorithms are rings, double binary trees, and recursive halving and doubling. Each algorithm is
represented by a set of trees over the ranks, like a ForestColl schedule. For example, a ring is
represented by paths, and recursive doubling by binomial trees. Each message is sent along a
shortest path through the network. Among several shortest paths, the path with the highest minimum
bandwidth is used. For each algorithm, several orders of the ranks are tried, and the fastest order
is used.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.simulate import Program, Route, ShareMove

LARGEST_GROUP = 16  # largest number of ranks per node for which orders are tried
SEARCH_STEPS = 20_000  # steps of the search for a ring over direct links

Edges = Sequence[tuple[int, int]]  # (source, target), in order


@dataclass(frozen=True)
class RankTree:
    """A tree whose nodes are ranks.

    Attributes:
        root: rank that is the root of the tree.
        share: fraction of the collective's result that is sent along the tree.
        outward: edges along which data is sent from the root to all ranks.
        inward: edges along which data is sent from all ranks to the root. If `inward` is empty, the
            reverse of the outward edges is used.
    """

    root: int
    share: Fraction
    outward: Edges
    inward: Edges = ()

    def steps(self, collective: str) -> list[tuple[int, int, bool]]:
        """Return the messages of the collective, in order. Each message is a tuple (source, target,
        whether the target adds the message to its own data).
        """
        sums = list(self.inward) or [(b, a) for a, b in reversed(self.outward)]
        down = [(a, b, True) for a, b in sums] if collective != "all_gather" else []
        up = [(a, b, False) for a, b in self.outward] if collective != "reduce_scatter" else []
        return down + up


def baselines(network: Network, collective: str) -> list[Program]:
    """Return three programs: a ring, a double binary tree, and recursive halving and doubling."""
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
    """Return the time in seconds for which the busiest wire is in use, per GB of the collective's
    result.
    """
    pairs: Counter[tuple[int, int]] = Counter()
    unit = min(tree.share for tree in trees)  # all shares are whole multiples of this unit
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
    """Shortest paths between ranks. The paths from each source are computed only once."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._out: dict[str, list[tuple[str, Fraction]]] = {node: [] for node in network.nodes}
        for wire in network.wires:
            self._out[wire.source].append((wire.target, wire.bandwidth))
        self._before: dict[int, dict[str, str]] = {}
        self._known: dict[tuple[int, int], Route] = {}

    def __call__(self, source: int, target: int) -> Route:
        """Return the names of the nodes on the path from one rank to another."""
        if source not in self._before:
            self._before[source] = self._search(self._network.ranks[source])
        if (source, target) not in self._known:
            way, before = [self._network.ranks[target]], self._before[source]
            while way[-1] != self._network.ranks[source]:
                way.append(before[way[-1]])
            self._known[source, target] = tuple(reversed(way))
        return self._known[source, target]

    def _search(self, start: str) -> dict[str, str]:
        """Return a mapping from each node to its predecessor on the shortest path from `start`.
        Among equally short paths, the path with the highest minimum bandwidth is used.
        """
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


# Trees over positions, which are mapped to ranks in some order.


def _orders(ranks: int) -> Iterator[list[int]]:
    """Yield several orders of the ranks. The first order is the natural order. For each group size,
    there is one more order: the first rank of every group, then the second rank of every group, and
    so on.
    """
    yield list(range(ranks))
    for size in _group_sizes(ranks):
        yield [first + i for i in range(size) for first in range(0, ranks, size)]


def _group_sizes(ranks: int) -> list[int]:
    return [g for g in range(2, min(ranks, LARGEST_GROUP) + 1) if ranks % g == 0]


def _rings(ranks: int) -> Iterator[list[RankTree]]:
    """Yield sets of rings of three types: a single ring, the two directions of a ring, or several
    rings.

    A set of several rings contains one ring per rank of a node; each ring leaves the node from a
    different rank.
    """
    for order in _orders(ranks):
        yield _around([order])
        yield _around([order, order[::-1]])
    for size in _group_sizes(ranks):
        yield _around([[first + (turn + i) % size for first in range(0, ranks, size)
                        for i in range(size)] for turn in range(size)])


def _around(rings: Sequence[Sequence[int]]) -> list[RankTree]:
    """Convert rings to trees. Within a ring, partial sums and gathered data are sent in the same
    direction.
    """
    ranks, trees = len(rings[0]), []
    for ring in rings:
        edges = [(ring[i], ring[(i + 1) % ranks]) for i in range(ranks)]
        for at in range(ranks):
            turned = edges[at:] + edges[:at]
            trees.append(RankTree(ring[at], Fraction(1, ranks * len(rings)), turned[:-1],
                                  turned[1:]))
    return trees


def _disjoint_rings(network: Network) -> Iterator[list[RankTree]]:
    """Yield sets of rings that use only direct links between ranks. Each ring is used in both
    directions, and uses only bandwidth that no earlier ring uses.

    If no ring is found within the step limit of the search, no set is yielded.
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
    """Return a ring over all ranks that uses only bidirectional links. Return an empty list if the
    search finds no ring within `SEARCH_STEPS` steps.

    At each rank, links with higher bandwidth are tried first and, among links with equal bandwidth,
    the link to the rank with the fewest unvisited neighbors (Warnsdorff's rule).
    """
    beside: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for a, b in pairs:
        if (b, a) in pairs:
            beside[a].add(b)
    path, visited = [0], {0}
    tries: list[list[int] | None] = [None]
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
    """Yield pairs of binary trees. Each tree of a pair transfers half of the data, and the leaves
    of one tree are inner nodes of the other.

    In an all-reduce, data is summed on the way to the root of each tree. All-gather and
    reduce-scatter send the shard of each rank along both trees.
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
    """Return the parent of a position in the binary tree whose root is position 0 and whose leaves
    are the odd positions.
    """
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
    """Yield the trees of recursive doubling. In step i, each rank exchanges all of its data with
    the rank at distance 2 ** i.

    If the number of ranks is not a power of two, Bruck's algorithm is used, in which ranks forward
    data to the ranks at distances 1, 2, 4 and so on.
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
