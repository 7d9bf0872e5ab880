"""Schedules of large clusters of equal parts: one part is planned, and serves for all.

A shard goes straight through the switches between the parts to the rank in the same place of every
other part, and spreads within each part along trees that the general algorithm packs into that part
alone, for B times as many roots; what the way between the parts leaves of their links to these
switches joins the ranks of a part, too. Nothing says that no other way is faster, but the cut does:
this one is taken only where it reaches the bound of the whole network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_plugin.planner.forest.flow import Demand
from moe_plugin.planner.forest.optimum import Graph
from moe_plugin.planner.forest.packing import Arc, pack
from moe_plugin.planner.forest.schedule import Edge, Paths, Tree
from moe_plugin.planner.forest.splitting import Path, Splitting, take

Lane = tuple[Path, int]  # from a rank to a switch between parts; for how many trees
Levels = list[list[Edge]]  # a tree's edges by depth


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
    """The smallest equal parts with switches between them; None if absent."""
    neighbours: dict[int, set[int]] = {v: set() for v in range(graph.nodes)}
    for source, target in graph.capacity:
        neighbours[source].add(target)
        neighbours[target].add(source)
    for size in range(1, graph.ranks // 2 + 1):
        if graph.ranks % size:
            continue
        turned = _turned(graph, neighbours, size)
        between = frozenset(v for v, goal in enumerate(turned or ()) if v == goal)
        if turned and between:
            return Parts(size, graph.ranks // size, turned, between)
    return None


def _turned(graph: Graph, neighbours: Mapping[int, set[int]], size: int) -> tuple[int, ...] | None:
    """Where each node goes if rank i goes to rank i + size; None where a wire would change."""
    turned = {v: (v + size) % graph.ranks for v in range(graph.ranks)}
    left = list(range(graph.ranks, graph.nodes))
    while left:
        # a switch goes where all of its neighbours go; of several alike, to the first
        goals: dict[frozenset[tuple[int, int, int]], list[int]] = {}
        for switch in left:
            around = _around(graph, switch, {v: v for v in neighbours[switch] if v in turned})
            goals.setdefault(around, []).append(switch)
        found: dict[int, int] = {}
        for switch in left:
            around = _around(graph, switch,
                             {v: turned[v] for v in neighbours[switch] if v in turned})
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


# -- trees of all parts


@dataclass(frozen=True)
class Inner:
    """A tree of one part: edges by depth, with paths of nodes that sum to its weight."""

    weight: int
    levels: tuple[tuple[tuple[Arc, tuple[tuple[Path, int], ...]], ...], ...]


def trees_by_parts(counted: Graph, names: Sequence[str], parts: Parts, k: int) -> list[Tree] | None:
    """k trees of each root, or None where wires do not carry them this way.

    Args:
        counted: capacities are numbers of trees.
        names: of the nodes.
        parts: of the graph.
        k: trees per root.
    """
    # What lanes between the parts take is not there for trees within them: so lanes come first.
    left = dict(counted.capacity)
    lanes = [_lanes(counted, parts, left, place, k) for place in range(parts.size)]
    part = _part(counted, parts, left)
    if part is None or not all(lanes):
        return None
    # Within a part, each place is a root for its own shard and for those that enter there from
    # every other part. Trees exist if every cut carries all of them (Edmonds).
    roots = [k * parts.count] * parts.size
    if parts.size > 1 and Demand(part.nodes, part.graph.capacity, roots).missing(1)[0]:
        return None
    return list(_Assembly(names, parts, lanes, part.trees(roots), k).trees())


# -- between the parts


def _lanes(counted: Graph, parts: Parts, left: dict[Arc, int], place: int,
           k: int) -> list[list[Lane]]:
    """For each distance between two parts, ways for k trees, up from a rank and the same way down;
    empty where there are not enough. What they take is taken from `left`, of part 0.
    """
    ways = _ways(counted, parts, place)
    # One part stands for all: what it sends up to the part at a distance, it receives down from the
    # part at that distance on the other side. So both directions are taken of part 0's links.
    found: list[list[Lane]] = []
    for _ in range(1, parts.count):
        lanes, missing = [], k
        for way in ways:
            hops = list(zip(way, way[1:]))
            room = min(missing, *(min(left.get((a, b), 0), left.get((b, a), 0)) for a, b in hops))
            if room:
                lanes.append((way, room))
                missing -= room
                for a, b in hops:
                    left[a, b] -= room
                    left[b, a] -= room
        if missing:
            return []
        found.append(lanes)
    return found


def _ways(counted: Graph, parts: Parts, place: int) -> list[Path]:
    """From a rank of part 0 to switches between the parts: at once, or through one switch."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for source, target in counted.capacity:
        neighbours[source].append(target)
    once = [(place, v) for v in neighbours[place] if v in parts.between]
    return once + [(place, v, far) for v in neighbours[place]
                   if v >= counted.ranks and v not in parts.between
                   for far in neighbours[v] if far in parts.between]


# -- within a part


@dataclass(frozen=True)
class NetworkPart:
    """Part 0 as a graph of its own. members: its nodes by their number in it."""

    graph: Graph
    members: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.graph.nodes

    def trees(self, roots: Sequence[int]) -> list[list[Inner]]:
        """Spanning trees, by root."""
        split = Splitting(self.graph, roots)
        split.run()
        found: list[list[Inner]] = [[] for _ in roots]
        for tree in pack(self.graph.ranks, split.capacity, roots):
            depth, levels = {tree.root: 0}, defaultdict(list)
            for edge in tree.edges:
                depth[edge[1]] = depth[edge[0]] + 1
                levels[depth[edge[0]]].append((edge, self._paths(split, edge, tree.weight)))
            found[tree.root].append(Inner(tree.weight, tuple(map(tuple, levels.values()))))
        return found

    def _paths(self, split: Splitting, edge: Arc, weight: int) -> tuple[tuple[Path, int], ...]:
        found, pool = [], split.paths[edge]
        while weight:
            count = min(weight, pool[-1][1])
            found.append((tuple(self.members[v] for v in take(pool, count)), count))
            weight -= count
        return tuple(found)


def _part(counted: Graph, parts: Parts, left: dict[Arc, int]) -> NetworkPart | None:
    """Part 0 with the capacity that is left, also to the switches between the parts, which join its
    ranks as well; None where parts are joined without a switch.
    """
    members = list(range(parts.size))
    neighbours: dict[int, list[int]] = defaultdict(list)
    for source, target in counted.capacity:
        if source not in parts.between:
            neighbours[source].append(target)
    index = {v: v for v in members}
    for node in members:  # grows as it goes
        for other in neighbours[node]:
            if other not in index:
                if other < counted.ranks:  # a rank of another part: not a graph alone
                    return None
                index[other] = len(members)
                members.append(other)
    return NetworkPart(Graph(parts.size, len(members), {
        (index[a], index[b]): c for (a, b), c in left.items()
        if a in index and b in index and c and not {a, b} <= parts.between}, counted.scale),
        tuple(members))


# -- together


class _Assembly:
    """Trees of the whole from lanes between parts and trees within them."""

    def __init__(self, names: Sequence[str], parts: Parts, lanes: Sequence[list[list[Lane]]],
                 inner: Sequence[Sequence[Inner]], k: int) -> None:
        self._parts, self._lanes, self._inner, self._k = parts, lanes, inner, k
        moved = range(len(names))
        self._names = []  # of part 0's nodes in the place of each part
        for _ in range(parts.count):
            self._names.append([names[v] for v in moved])
            moved = [parts.turned[v] for v in moved]
        self._known: dict[tuple[int, int, int, int, int], Levels] = {}

    def trees(self) -> Iterator[Tree]:
        """All trees, by root."""
        shares = [list(self._shares(place)) for place in range(self._parts.size)]
        for part in range(self._parts.count):
            for place in range(self._parts.size):
                for first, weight in shares[place]:
                    yield self._tree(part, place, first, weight)

    def _shares(self, place: int) -> Iterator[tuple[int, int]]:
        """First and number of a root's trees that are alike: cut where lanes and inner trees
        change.
        """
        # Trees between two cuts take the same lanes and inner trees at every distance, so that one
        # tree with a weight stands for them. Inner trees are counted through all distances, k for
        # each: where one ends, counted within its distance, is a cut.
        cuts, at = {0, self._k}, 0
        for tree in self._inner[place]:
            at += tree.weight
            cuts.add(at % self._k)
        for lanes in self._lanes[place]:
            at = 0
            for _, count in lanes:
                at += count
                cuts.add(at)
        ordered = sorted(cuts)
        return ((a, b - a) for a, b in zip(ordered, ordered[1:]))

    def _tree(self, part: int, place: int, first: int, weight: int) -> Tree:
        size, count = self._parts.size, self._parts.count
        root = part * size + place
        levels: Levels = [[]]
        for distance in range(count):
            other = (part + distance) % count
            if distance:  # up to a switch between the parts, and the same way down
                way = _at(self._lanes[place][distance - 1], first)
                path = (*(self._names[part][v] for v in way),
                        *(self._names[other][v] for v in reversed(way[:-1])))
                levels[0].append(Edge(root, other * size + place, ((path, weight),)))
            for depth, edges in enumerate(self._inside(other, place, distance, first, weight)):
                depth += bool(distance)  # the lane was the first edge
                if depth == len(levels):
                    levels.append([])
                levels[depth].extend(edges)
        return Tree(root, weight, tuple(edge for level in levels for edge in level))

    def _inside(self, part: int, place: int, distance: int, first: int, weight: int) -> Levels:
        """The edges in one part of what enters it at a place from `distance` parts before."""
        at = distance * self._k + first
        for index, tree in enumerate(self._inner[place]):
            if at < tree.weight:
                break
            at -= tree.weight
        key = part, place, index, at, weight
        if key not in self._known:
            self._known[key] = [[
                Edge(a + part * self._parts.size, b + part * self._parts.size,
                     self._named(part, paths, at, weight)) for (a, b), paths in level]
                for level in tree.levels]
        return self._known[key]

    def _named(self, part: int, paths: Sequence[tuple[Path, int]], first: int,
               weight: int) -> Paths:
        """Paths of those of a tree's copies that come from `first` on, in a part."""
        found, at = [], 0
        for path, count in paths:
            some = min(at + count, first + weight) - max(at, first)
            if some > 0:
                found.append((tuple(self._names[part][v] for v in path), some))
            at += count
        return tuple(found)


def _at(lanes: Sequence[Lane], first: int) -> Path:
    for way, count in lanes:
        if first < count:
            return way
        first -= count
    raise AssertionError("lanes for fewer trees than roots have")
