"""Tree schedules for large clusters that consist of identical parts, such as nodes or racks. Trees
are planned for a single part, and every part uses the same trees.

A shard is first sent through the switches between the parts, to the rank at the same position in
every other part. The shard is then distributed along trees within each part. The general algorithm
packs these trees into a single part. With B parts, each rank is the root of B times as many trees
within its part. If links between ranks and switches have capacity that traffic between the parts
does not use, this capacity also connects the ranks of a part. The bottleneck cut of the whole
network is an upper bound on the speed of every schedule. The method of this module is used only if
its schedule reaches this bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moe_plugin.planner.forest.flow import Arc, Demand, pack
from moe_plugin.planner.forest.optimum import Graph, Path, Splitting, take
from moe_plugin.planner.forest.schedule import Edge, Paths, Tree

Lane = tuple[Path, int]  # path from a rank to a switch between parts, and number of trees on it
Levels = list[list[Edge]]  # edges of a tree by depth


@dataclass(frozen=True)
class Parts:
    """Division of a graph into identical parts. Each part contains consecutive ranks.

    Attributes:
        size: number P of ranks in each part.
        count: number B of parts.
        turned: for each node, the node to which it is mapped by the rotation that maps each part to
            the next part.
        between: nodes that do not belong to any part. The rotation maps these nodes to themselves.
    """

    size: int
    count: int
    turned: tuple[int, ...]
    between: frozenset[int]


def find_parts(graph: Graph) -> Parts | None:
    """Return the smallest identical parts that are connected by switches, or None if the graph has
    no such parts.
    """
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
    """Return the rotation that maps rank i to rank i + size, or None if it does not map every wire
    to a wire of equal capacity.
    """
    turned = {v: (v + size) % graph.ranks for v in range(graph.ranks)}
    left = list(range(graph.ranks, graph.nodes))
    while left:
        # a switch maps to the switch whose neighbours are the images of its neighbours
        goals: dict[frozenset[tuple[int, int, int]], list[int]] = {}
        for switch in left:
            around = _around(graph, switch, {v: v for v in neighbours[switch] if v in turned})
            goals.setdefault(around, []).append(switch)
        images: dict[int, int] = {}
        for switch in left:
            around = _around(graph, switch,
                             {v: turned[v] for v in neighbours[switch] if v in turned})
            alike = goals.get(around)
            if around and alike:
                images[switch] = alike.pop(alike.index(switch) if switch in alike else 0)
        if not images:
            return None
        turned.update(images)
        left = [switch for switch in left if switch not in images]
    if len(set(turned.values())) < graph.nodes or any(
            graph.capacity.get((turned[a], turned[b])) != capacity
            for (a, b), capacity in graph.capacity.items()):
        return None
    return tuple(turned[v] for v in range(graph.nodes))


def _around(graph: Graph, switch: int, names: Mapping[int, int]) -> frozenset[tuple[int, int, int]]:
    return frozenset((name, graph.capacity.get((switch, v), 0), graph.capacity.get((v, switch), 0))
                     for v, name in names.items())


# Trees of all parts.


@dataclass(frozen=True)
class Inner:
    """A tree within one part, whose edges are listed by depth in `levels`."""

    weight: int
    levels: tuple[tuple[tuple[Arc, tuple[tuple[Path, int], ...]], ...], ...]


def trees_by_parts(counted: Graph, names: Sequence[str], parts: Parts, k: int) -> list[Tree] | None:
    """Return k trees for each root, or None if the wires do not have enough capacity for this
    method.

    Args:
        counted: graph whose capacities are numbers of trees.
        k: number of trees per root.
    """
    # Lanes are assigned first, because trees within parts can only use the remaining capacity.
    left = dict(counted.capacity)
    lanes = [_lanes(counted, parts, left, place, k) for place in range(parts.size)]
    part = _part(counted, parts, left)
    if part is None or not all(lanes):
        return None
    # Within a part, each place is a root for its own shard and for the shards that enter there from
    # every other part. Trees exist if every cut has capacity for all of them (Edmonds).
    roots = [k * parts.count] * parts.size
    if parts.size > 1 and Demand(part.nodes, part.graph.capacity, roots).missing(1)[0]:
        return None
    return list(_Assembly(names, parts, lanes, part.trees(roots), k).trees())


# Paths between the parts.


def _lanes(counted: Graph, parts: Parts, left: dict[Arc, int], place: int,
           k: int) -> list[list[Lane]]:
    """For each distance between two parts, return the paths of k trees. Return an empty list if the
    links do not have enough capacity left.

    A path goes from a rank up to a switch between the parts, and from there to the target along the
    mirrored path. The capacity used by the paths is subtracted from `left`, the remaining
    capacities of part 0.
    """
    ways = _ways(counted, parts, place)
    # Part 0 stands for all parts: it sends up to the part at a distance and receives down from the
    # part at the same distance on the other side. So both directions use part 0's links.
    lanes_by_distance: list[list[Lane]] = []
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
        lanes_by_distance.append(lanes)
    return lanes_by_distance


def _ways(counted: Graph, parts: Parts, place: int) -> list[Path]:
    """Return the paths from a rank of part 0 to the switches between the parts. A path passes
    through at most one other switch.
    """
    neighbours: dict[int, list[int]] = defaultdict(list)
    for source, target in counted.capacity:
        neighbours[source].append(target)
    once = [(place, v) for v in neighbours[place] if v in parts.between]
    return once + [(place, v, far) for v in neighbours[place]
                   if v >= counted.ranks and v not in parts.between
                   for far in neighbours[v] if far in parts.between]


# Trees within a part.


@dataclass(frozen=True)
class NetworkPart:
    """Part 0 as a separate graph. members: for each node of part 0, the index of the node in the
    whole graph.
    """

    graph: Graph
    members: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.graph.nodes

    def trees(self, roots: Sequence[int]) -> list[list[Inner]]:
        """Return spanning trees of part 0, grouped by root."""
        split = Splitting(self.graph, roots)
        split.run()
        trees_by_root: list[list[Inner]] = [[] for _ in roots]
        for tree in pack(self.graph.ranks, split.capacity, roots):
            depth, levels = {tree.root: 0}, defaultdict(list)
            for edge in tree.edges:
                depth[edge[1]] = depth[edge[0]] + 1
                levels[depth[edge[0]]].append((edge, self._paths(split, edge, tree.weight)))
            trees_by_root[tree.root].append(Inner(tree.weight, tuple(map(tuple, levels.values()))))
        return trees_by_root

    def _paths(self, split: Splitting, edge: Arc, weight: int) -> tuple[tuple[Path, int], ...]:
        paths, pool = [], split.paths[edge]
        while weight:
            count = min(weight, pool[-1][1])
            paths.append((tuple(self.members[v] for v in take(pool, count)), count))
            weight -= count
        return tuple(paths)


def _part(counted: Graph, parts: Parts, left: dict[Arc, int]) -> NetworkPart | None:
    """Return part 0 with its remaining capacities, or None if a wire connects two parts directly,
    without a switch.

    The graph also contains the switches between the parts, because they can connect ranks of the
    same part.
    """
    members = list(range(parts.size))
    neighbours: dict[int, list[int]] = defaultdict(list)
    for source, target in counted.capacity:
        if source not in parts.between:
            neighbours[source].append(target)
    index = {v: v for v in members}
    for node in members:  # the loop appends to `members`
        for other in neighbours[node]:
            if other not in index:
                # a direct link to a rank of another part: the part is not a separate graph
                if other < counted.ranks:
                    return None
                index[other] = len(members)
                members.append(other)
    return NetworkPart(Graph(parts.size, len(members), {
        (index[a], index[b]): c for (a, b), c in left.items()
        if a in index and b in index and c and not {a, b} <= parts.between}, counted.scale),
        tuple(members))


# Assembly of the whole trees.


class _Assembly:
    """Joins paths between parts and trees within parts, so that they form trees of the whole
    network.
    """

    def __init__(self, names: Sequence[str], parts: Parts, lanes: Sequence[list[list[Lane]]],
                 inner: Sequence[Sequence[Inner]], k: int) -> None:
        self._parts, self._lanes, self._inner, self._k = parts, lanes, inner, k
        moved: Sequence[int] = range(len(names))
        self._names: list[list[str]] = []  # by part: names of the images of part 0's nodes
        for _ in range(parts.count):
            self._names.append([names[v] for v in moved])
            moved = [parts.turned[v] for v in moved]
        self._known: dict[tuple[int, int, int, int, int], Levels] = {}

    def trees(self) -> Iterator[Tree]:
        """Yield all trees of the network, sorted by root."""
        shares = [list(self._shares(place)) for place in range(self._parts.size)]
        for part in range(self._parts.count):
            for place in range(self._parts.size):
                for first, weight in shares[place]:
                    yield self._tree(part, place, first, weight)

    def _shares(self, place: int) -> Iterator[tuple[int, int]]:
        """Divide the trees of a root into runs of identical trees. For each run, yield the index of
        the first tree and the number of trees.

        A run ends where the path between parts or the tree within a part changes.
        """
        # Trees of a run use the same lanes and inner trees at every distance, so one tree with a
        # weight stands for the run. Inner trees are counted over all distances, k for each. Where
        # an inner tree ends, counted within its distance, a run ends.
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
            if distance:  # up to a switch between the parts, and down the mirrored path
                way = _at(self._lanes[place][distance - 1], first)
                path = (*(self._names[part][v] for v in way),
                        *(self._names[other][v] for v in reversed(way[:-1])))
                levels[0].append(Edge(root, other * size + place, ((path, weight),)))
            for depth, edges in enumerate(self._inside(other, place, distance, first, weight)):
                depth += bool(distance)  # the lane is the first edge
                if depth == len(levels):
                    levels.append([])
                levels[depth].extend(edges)
        return Tree(root, weight, tuple(edge for level in levels for edge in level))

    def _inside(self, part: int, place: int, distance: int, first: int, weight: int) -> Levels:
        """Return the edges within a part for a shard that enters the part at the rank with position
        `place`.

        distance: distance of this part from the part that contains the root.
        """
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
        """Return the paths within a part that `weight` copies of a tree use, starting with copy
        number `first`.
        """
        named_paths, at = [], 0
        for path, count in paths:
            some = min(at + count, first + weight) - max(at, first)
            if some > 0:
                named_paths.append((tuple(self._names[part][v] for v in path), some))
            at += count
        return tuple(named_paths)


def _at(lanes: Sequence[Lane], first: int) -> Path:
    for way, count in lanes:
        if first < count:
            return way
        first -= count
    raise AssertionError("the paths between parts carry fewer trees than the roots have")
