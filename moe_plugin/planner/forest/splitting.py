"""Edge splitting: replace the switches of a network by links between ranks without reducing the
rate.

A pair of arcs u -> w -> t through a switch w is replaced by a single arc u -> t. This replacement
reduces the capacity of every cut that separates w from both u and t. If this replacement would
leave a cut with too little capacity, the replaced amount is reduced by the deficit of the cut. If
each node can send as much as it receives, the whole capacity of a switch can be replaced, and the
pairs of arcs can be processed in any order (Bang-Jensen, Frank, Jackson). Therefore many pairs that
probably do not reduce the rate are replaced at once, followed by a single check. If the check
fails, each half of the pairs is tried separately, down to single pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_plugin.planner.forest.flow import Demand
from moe_plugin.planner.forest.optimum import Graph

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
        beside = sorted(self._out[switch] | {u for u in self._out if switch in self._out[u]})
        # switches that are replaced later are sorted after the ranks
        self._replace(switch, self._guess(switch, beside))
        for source in beside:
            for target in [t for t in beside if t != source] + [source]:
                count = self._left(source, switch, target)
                if count:
                    self._replace(switch, [(source, target, count)])

    def _left(self, source: int, switch: int, target: int) -> int:
        return min(self.capacity.get((source, switch), 0), self.capacity.get((switch, target), 0))

    def _guess(self, switch: int, beside: Sequence[int]) -> list[Pair]:
        """Return pairs of arcs that can probably be replaced without reducing the rate.

        The switch's neighbors are arranged in a circle, and the pairs are spread evenly around it.
        Each pair connects two neighbors at a certain distance on the circle. Distances at which
        other arcs already connect neighbors are avoided if possible.
        """
        size = len(beside)
        sends = {u: self.capacity.get((u, switch), 0) for u in beside}
        takes = {t: self.capacity.get((switch, t), 0) for t in beside}
        near = {u: self._near(u, switch) for u in beside}
        joined = {offset for offset in range(1, size)
                  if any(beside[(i + offset) % size] in near[u] for i, u in enumerate(beside))}
        offsets = [o for o in range(1, size) if o not in joined] or list(range(1, size))
        pairs: dict[Arc, int] = {}
        for share in _shares(max(sends.values(), default=0), offsets):
            for i, u in enumerate(beside):
                t = beside[(i + share[0]) % size]
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
        lack, rank = self._demand().missing(only if only else 1, self._suspects)
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

    def _demand(self) -> Demand:
        return Demand(self._nodes, self.capacity, self._roots)

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
