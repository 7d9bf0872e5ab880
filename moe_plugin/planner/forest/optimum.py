"""The minimum time of a collective, and links that replace switches at the same time.

The minimum time is determined by the bottleneck cut of the network. Consider any set S of nodes
that does not contain all ranks. The shards of all ranks in S must leave S over wires with the total
bandwidth B(S). Therefore the minimum time, in seconds per GB of a shard, is
`1/x* = max over S of (ranks in S) / B(S)`. A rate x is possible if every rank can receive
data from all ranks at the rate x at the same time. Maximum flows test whether a rate is possible.
If the maximum flow to a rank is too small, the corresponding minimum cut gives a set S that limits
the rate to a lower value, with which the search continues. Each new cut limits the rate more than
all earlier cuts. Therefore a rank that has passed its test need not be tested again, and each new
cut requires only one additional test.

Edge splitting replaces the switches. A pair of arcs u -> w -> t through a switch w is replaced by a
single arc u -> t. This replacement reduces the capacity of every cut that separates w from both u
and t. If this replacement would leave a cut with too little capacity, the replaced amount is
reduced by the deficit of the cut. If each node can send as much as it receives, the whole capacity
of a switch can be replaced, and the pairs of arcs can be processed in any order (Bang-Jensen,
Frank, Jackson). Therefore many pairs that probably do not reduce the rate are replaced at once,
followed by a single check. If the check fails, each half of the pairs is tried separately, down to
single pairs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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


Arc = tuple[int, int]
Pair = tuple[int, int, int]  # (from, to, amount)
Path = tuple[int, ...]


class Splitting:
    """A graph whose switches are replaced by links, one switch after the other.

    Args:
        graph: graph whose capacities are numbers of trees.
        roots: for each rank, the number of trees whose root is this rank.

    Attributes:
        capacity: capacities of the remaining arcs.
        paths: for each arc, the physical paths that the arc represents, with their multiplicities.
    """

    def __init__(self, graph: Graph, roots: Sequence[int]) -> None:
        self._nodes, self._ranks, self._roots = graph.nodes, graph.ranks, roots
        self.capacity: dict[Arc, int] = {arc: c for arc, c in graph.capacity.items() if c}
        self.paths: dict[Arc, list[tuple[Path, int]]] = {
            arc: [(arc, c)] for arc, c in self.capacity.items()}
        self._suspects: list[int] = []  # ranks with recent deficits, the latest first
        self._out: dict[int, set[int]] = {node: set() for node in range(graph.nodes)}
        for source, target in self.capacity:
            self._out[source].add(target)

    def run(self) -> None:
        """Replace all switches by links, starting with the switch that has the highest capacity."""
        def weight(switch: int) -> int:
            return -sum(self.capacity[switch, t] for t in self._out[switch])

        for switch in sorted(range(self._ranks, self._nodes), key=weight):
            self._remove(switch)

    def _remove(self, switch: int) -> None:
        neighbors = sorted(self._out[switch] | {u for u in self._out if switch in self._out[u]})
        # switches that are replaced later are sorted after the ranks
        self._replace(switch, self._guess(switch, neighbors))
        for source in neighbors:
            for target in [t for t in neighbors if t != source] + [source]:
                count = self._left(source, switch, target)
                if count:
                    self._replace(switch, [(source, target, count)])

    def _left(self, source: int, switch: int, target: int) -> int:
        return min(self.capacity.get((source, switch), 0), self.capacity.get((switch, target), 0))

    def _guess(self, switch: int, neighbors: Sequence[int]) -> list[Pair]:
        """Return pairs of arcs that can probably be replaced without reducing the rate.

        The switch's neighbors are arranged in a circle, and the pairs are spread evenly around it.
        Each pair connects two neighbors at a certain distance on the circle. Distances at which
        other arcs already connect neighbors are avoided if possible.
        """
        size = len(neighbors)
        sends = {u: self.capacity.get((u, switch), 0) for u in neighbors}
        takes = {t: self.capacity.get((switch, t), 0) for t in neighbors}
        near = {u: self._near(u, switch) for u in neighbors}
        joined = {offset for offset in range(1, size)
                  if any(neighbors[(i + offset) % size] in near[u]
                         for i, u in enumerate(neighbors))}
        offsets = [o for o in range(1, size) if o not in joined] or list(range(1, size))
        pairs: dict[Arc, int] = {}
        for share in _shares(max(sends.values(), default=0), offsets):
            for i, u in enumerate(neighbors):
                t = neighbors[(i + share[0]) % size]
                count = min(share[1], sends[u], takes[t])
                if count:
                    pairs[u, t] = pairs.get((u, t), 0) + count
                    sends[u] -= count
                    takes[t] -= count
        return [(u, t, count) for (u, t), count in pairs.items()]

    def _near(self, node: int, without: int) -> set[int]:
        """Return the nodes that can be reached over at most two arcs without passing through
        `without`.
        """
        first = self._out[node] - {without}
        return first.union(*(self._out[n] for n in first)) - {node} if first else set()

    def _replace(self, switch: int, pairs: Sequence[Pair]) -> None:
        """Replace as much capacity of these pairs as possible. If not all pairs can be replaced,
        continue with each half of the pairs.
        """
        pairs = [(u, t, min(count, self._left(u, switch, t))) for u, t, count in pairs]
        if not any(count for _, _, count in pairs):
            return
        # a pair with u = t only removes capacity, which is checked in the same way
        self._change(switch, pairs, 1)
        only = pairs[0][2] if len(pairs) == 1 else None
        demand = Demand(self._nodes, self.capacity, self._roots)
        lack, rank = demand.missing(only if only else 1, self._suspects)
        if lack:
            self._suspects = [rank, *(r for r in self._suspects if r != rank)][:8]
            self._change(switch, pairs, -1)
            if only is None:
                half = len(pairs) // 2
                self._replace(switch, pairs[:half])
                self._replace(switch, pairs[half:])
                return
            pairs = [(*pairs[0][:2], only - lack)]
            self._change(switch, pairs, 1)
        self._join(switch, pairs)

    def _change(self, switch: int, pairs: Iterable[Pair], sign: int) -> None:
        for u, t, count in pairs:
            self._add(u, switch, -sign * count)
            self._add(switch, t, -sign * count)
            if u != t:
                self._add(u, t, sign * count)

    def _add(self, source: int, target: int, count: int) -> None:
        left = self.capacity.get((source, target), 0) + count
        if left:
            self.capacity[source, target] = left
            self._out[source].add(target)
        else:
            self.capacity.pop((source, target), None)
            self._out[source].discard(target)

    def _join(self, switch: int, pairs: Iterable[Pair]) -> None:
        for u, t, count in pairs:
            while count:
                before, after = self.paths[u, switch], self.paths[switch, t]
                part = min(count, before[-1][1], after[-1][1])
                path = _without_loops(take(before, part) + take(after, part)[1:])
                if u != t:
                    self.paths.setdefault((u, t), []).append((path, part))
                count -= part


def take(pool: list[tuple[Path, int]], count: int) -> Path:
    """Remove `count` units from the last path of a pool, and return this path. The path must have a
    multiplicity of at least `count`.
    """
    path, left = pool.pop()
    if left > count:
        pool.append((path, left - count))
    return path


def _without_loops(path: Path) -> Path:
    nodes: list[int] = []
    for node in path:
        if node in nodes:
            del nodes[nodes.index(node):]
        nodes.append(node)
    return tuple(nodes)


def _shares(count: int, offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Distribute `count` units among the offsets as evenly as possible. Offsets that receive an
    extra unit are spread evenly.
    """
    if not offsets:
        return []
    base, more = divmod(count, len(offsets))
    shares = dict.fromkeys(offsets, base)
    for i in range(more):
        shares[offsets[i * len(offsets) // more]] += 1
    return [(offset, share) for offset, share in shares.items() if share]
