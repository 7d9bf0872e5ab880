"""The schedule of a collective: trees over the wires of a network, and a lower bound on the time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import index
from typing import Any

from moe_plugin.planner.forest.network import Network, parse_fraction
from moe_plugin.utils.messages import short

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
Paths = tuple[tuple[tuple[str, ...], int], ...]
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge of a tree, which represents a message from a source rank to a target rank.

    paths: pairs of a path and its multiplicity. A path is a tuple of node names from the source to
    the target. The multiplicities sum to the weight of the tree, and the data of the tree is
    divided among the paths in proportion to their multiplicities.
    """

    source: int
    target: int
    paths: Paths


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree that contains all ranks.

    Attributes:
        root: rank that is the root of the tree.
        weight: number of trees of weight 1 that this tree represents.
        edges: edges in the order of the messages: away from the root, or towards the root if the
            tree is inward.
        inward: if True, data is sent from all ranks towards the root and summed on the way.
    """

    root: int
    weight: int
    edges: tuple[Edge, ...]
    inward: bool = False

    def from_root(self) -> Iterator[tuple[int, int]]:
        """Return the edges as pairs (parent, child), ordered from the root to the leaves."""
        if self.inward:
            return ((edge.target, edge.source) for edge in reversed(self.edges))
        return ((edge.source, edge.target) for edge in self.edges)

    def depths(self) -> dict[int, int]:
        """Return, for each rank, the number of edges on the path from the root to this rank."""
        depths = {self.root: 0}
        for parent, child in self.from_root():
            depths[child] = depths[parent] + 1
        return depths

    def reversed(self) -> Tree:
        """Return a tree in which all edges and paths, and the order of the edges, are reversed."""
        return Tree(self.root, self.weight, tuple(
            Edge(e.target, e.source, tuple((path[::-1], count) for path, count in e.paths))
            for e in reversed(self.edges)), not self.inward)


@dataclass(frozen=True)
class Schedule:
    """The trees of one collective on one network, with a proof that no schedule of this type is
    faster.

    A result of M bytes is divided into one piece per outward tree (for reduce_scatter, per inward
    tree). The sizes of the pieces are proportional to the weights of the trees. In an all_gather,
    the root of a tree initially stores the tree's piece. In a reduce_scatter, the root of a tree
    stores the tree's piece at the end. In an all_reduce, piece i is first summed towards the root
    along inward tree i. The piece is then sent from the root to all ranks along outward tree i.

    Attributes:
        collective: name of the collective, one of `COLLECTIVES`.
        network: the network.
        inverse_rate: minimum time 1/x*, in seconds per GB of a shard. With N ranks and a result of
            M bytes, a shard has M/N bytes. No schedule that consists of trees can take less time.
            For all_reduce, this time applies to each of the two phases or, with `overlap`, to both
            phases together.
        cut: the node names of a set S. The set proves the bound
            `1/x* = (ranks in S) / (bandwidth out of S)`. `cut` is empty with `overlap` and for a
            single rank.
        k: number of trees per root. A tree of weight w counts as w trees. With `overlap`, k is the
            total number of trees of all roots, because roots may have different shares.
        unit: bandwidth in GB/s of a tree of weight 1.
        trees: all trees. For all_reduce, the inward trees precede the outward trees.
        fixed: whether the user specified k. If `fixed` is True, the schedule may take longer than
            1/x*.
        overlap: whether the inward and the outward trees of an all_reduce run at the same time and
            share the bandwidth of the wires.
        parts: with `overlap`, disjoint sets of nodes that prove the bound. Each set contains at
            least one rank. For a result of M bytes, the minimum time is `2 M (number of parts - 1)
            / (sum of the bandwidths out of each part)`. Empty without `overlap`.
    """

    collective: str
    network: Network
    inverse_rate: Fraction
    cut: frozenset[str]
    k: int
    unit: Fraction
    trees: tuple[Tree, ...]
    fixed: bool = False
    overlap: bool = False
    parts: tuple[frozenset[str], ...] = ()

    @property
    def phases(self) -> int:
        """Number of phases that run one after the other.

        An all-reduce without overlap has 2 phases, a reduce-scatter followed by an all-gather;
        every other collective has 1 phase.
        """
        return 2 if self.collective == "all_reduce" and not self.overlap else 1

    @property
    def weight(self) -> int:
        """Total weight of the trees among which the collective's result is divided."""
        return self.k if self.overlap else self.k * len(self.network.ranks)

    @cached_property
    def depth(self) -> int:
        """Maximum depth of all trees, or 0 for a single rank."""
        return max((max(tree.depths().values()) for tree in self.trees), default=0)

    @cached_property
    def message_s(self) -> float:
        """Fixed time of a message in seconds: the largest sum of `alpha_s` along any path in the
        schedule.
        """
        alphas = {wire.ends: wire.alpha_s for wire in self.network.wires}
        paths = {path for edge in _edges(self) for path, _ in edge.paths}
        return max((sum(alphas[hop] for hop in zip(path, path[1:])) for path in paths), default=0.0)

    def bound_s(self, size: float) -> float:
        """Return a lower bound on the time, in seconds, for a result of `size` bytes."""
        return float(self.phases * self.inverse_rate / len(self.network.ranks)) * size / 1e9

    def seconds(self, size: float) -> float:
        """Return the time in seconds for a result of `size` bytes, without the fixed time of
        messages.
        """
        if len(self.network.ranks) == 1:
            return 0.0
        return float(self.phases / (self.weight * self.unit)) * size / 1e9

    @property
    def algorithmic_bandwidth(self) -> Fraction:
        """Bandwidth of the schedule, in GB of the collective's result per second. Raises a
        `ValueError` for a single rank.
        """
        if len(self.network.ranks) == 1:
            raise ValueError(f"network {short(self.network.name)} has only 1 rank and moves no "
                             "data, so it has no bandwidth. Use at least 2 ranks")
        return self.weight * self.unit / self.phases

    def to_json(self) -> str:
        """Convert the schedule to JSON. Fractions are written as strings "p/q", and each path is
        written only once.
        """
        table: dict[tuple[str, ...], int] = {}
        trees = [[t.root, t.weight, t.inward, [
            [e.source, e.target, [[table.setdefault(path, len(table)), count]
                                  for path, count in e.paths]] for e in t.edges]]
                 for t in self.trees]
        return json.dumps({
            "format": _FORMAT, "collective": self.collective, "network": self.network.to_dict(),
            "inverse_rate": str(self.inverse_rate), "cut": sorted(self.cut), "k": self.k,
            "unit": str(self.unit), "fixed": self.fixed, "overlap": self.overlap,
            "parts": [sorted(part) for part in self.parts], "paths": [list(p) for p in table],
            "trees": trees})

    @classmethod
    def from_json(cls, text: str, where: str = "schedule") -> Schedule:
        """Read a schedule from a JSON string that was created by `to_json`, and check the schedule.

        Raises:
            ValueError: If the string does not describe a schedule, or if `check` raises an error.
        """
        try:
            schedule = _decode(json.loads(text), where)
        except (LookupError, TypeError, ArithmeticError, RecursionError, AttributeError,
                json.JSONDecodeError) as error:
            raise ValueError(f"{where} is not a schedule: {short(error)}; create it again with "
                             "`moe-plugin schedule`") from error
        schedule.check()
        return schedule

    def check(self) -> None:
        """Check the schedule.

        Raises:
            ValueError: If the cut does not prove the bound, if a tree does not contain all ranks,
                if the weights of a root's trees have the wrong sum, if a path does not exist in the
                network, or if the load of a wire exceeds its bandwidth.
        """
        if self.collective not in COLLECTIVES:
            raise ValueError(f"collective {short(self.collective)} is unknown. Choose from "
                             f"{', '.join(COLLECTIVES)}")
        if self.k < 1 or self.unit <= 0:
            raise ValueError(f"the schedule has k={self.k} trees with {self.unit} GB/s, but both "
                             "numbers must be positive. Plan the schedule again")
        _check_cut(self)
        for tree in self.trees:
            _check_tree(tree, len(self.network.ranks))
        kinds = {"all_gather": (False,), "reduce_scatter": (True,), "all_reduce": (True, False)}
        for inward in kinds[self.collective]:
            _check_weights(self, [t for t in self.trees if t.inward is inward])
        if {t.inward for t in self.trees} != set(kinds[self.collective]):
            raise ValueError(f"the {self.collective} has trees in the wrong direction. Plan the "
                             "schedule again")
        _check_paths(self)
        for load in _loads(self):
            for wire in self.network.wires:
                if load[wire.ends] * self.unit > wire.bandwidth:
                    raise ValueError(
                        f"wire {short(wire.source)} to {short(wire.target)} carries "
                        f"{load[wire.ends] * self.unit} GB/s, more than its {wire.bandwidth} GB/s. "
                        "Plan the schedule again")


def _decode(values: dict[str, Any], where: str) -> Schedule:
    if values["format"] != _FORMAT:
        raise ValueError(f"{where} has format {short(values['format'])}, but this version reads "
                         f"format {_FORMAT}. Create the schedule again with this version")
    table = [tuple(path) for path in values["paths"]]
    known: dict[tuple[int, ...], Paths] = {}

    def paths(entries: list[list[int]]) -> Paths:
        key = tuple(number for entry in entries for number in entry)
        if key not in known:
            known[key] = tuple((table[place], index(count)) for place, count in entries)
        return known[key]

    trees = tuple(Tree(index(root), index(weight), tuple(
        Edge(index(s), index(t), paths(entries)) for s, t, entries in edges), bool(inward))
        for root, weight, inward, edges in values["trees"])
    return Schedule(
        values["collective"], Network.from_dict(values["network"], f"{where}: network"),
        parse_fraction(values["inverse_rate"], f"{where}: inverse_rate"),
        frozenset(values["cut"]), index(values["k"]),
        parse_fraction(values["unit"], f"{where}: unit"), trees, bool(values["fixed"]),
        bool(values["overlap"]), tuple(frozenset(part) for part in values["parts"]))


def _check_cut(schedule: Schedule) -> None:
    """Check that the schedule's cut proves the bound. With `overlap`, check that its parts prove
    the bound.
    """
    network = schedule.network
    if len(network.ranks) == 1:
        return
    if schedule.overlap:
        crossing = sum((network.out_of(part) for part in schedule.parts), Fraction(0))
        nodes = Counter(node for part in schedule.parts for node in part)
        apart = max(nodes.values(), default=0) == 1 and all(
            part & set(network.ranks) for part in schedule.parts)
        proven = apart and len(schedule.parts) > 1 and schedule.inverse_rate == (
            2 * len(network.ranks) * (len(schedule.parts) - 1) / crossing)
    else:
        inside = len(schedule.cut & set(network.ranks))
        proven = (schedule.cut <= set(network.nodes) and 0 < inside < len(network.ranks)
                  and schedule.inverse_rate == inside / network.out_of(schedule.cut))
    if not proven:
        raise ValueError(f"inverse_rate={schedule.inverse_rate} does not follow from the cut of "
                         f"{len(schedule.cut)} nodes. Plan the schedule again")


def _check_tree(tree: Tree, ranks: int) -> None:
    which = f"tree of root {short(tree.root)}"
    if not 0 <= tree.root < ranks or tree.weight < 1:
        raise ValueError(f"{which} has weight {short(tree.weight)} among {ranks} ranks, which is "
                         "not possible. Plan the schedule again")
    seen = {tree.root}
    for edge in reversed(tree.edges) if tree.inward else tree.edges:
        inner, outer = (edge.target, edge.source) if tree.inward else (edge.source, edge.target)
        if inner not in seen or outer in seen or not 0 <= outer < ranks:
            raise ValueError(f"{which}: the edge from {short(edge.source)} to {short(edge.target)} "
                             "does not continue the tree. Plan the schedule again")
        if sum(count for _, count in edge.paths) != tree.weight:
            raise ValueError(f"{which}: the paths from {edge.source} to {edge.target} do not sum "
                             f"to the weight {tree.weight}. Plan the schedule again")
        seen.add(outer)
    if len(seen) != ranks:
        raise ValueError(f"{which} reaches only {len(seen)} of {ranks} ranks. Plan the schedule "
                         "again")


def _check_weights(schedule: Schedule, trees: list[Tree]) -> None:
    total: Counter[int] = Counter()
    for tree in trees:
        total[tree.root] += tree.weight
    if schedule.overlap:
        if sum(total.values()) != schedule.k:
            raise ValueError(f"the trees have a total weight of {sum(total.values())} instead of "
                             f"k={schedule.k}. Plan the schedule again")
        return
    for root in range(len(schedule.network.ranks)):
        if total[root] != schedule.k:
            raise ValueError(f"the trees of root {root} have a total weight of {total[root]} "
                             f"instead of k={schedule.k}. Plan the schedule again")


def _check_paths(schedule: Schedule) -> None:
    ranks, checked = schedule.network.ranks, set()
    wires = {wire.ends for wire in schedule.network.wires}
    for edge in _edges(schedule):
        for path, count in edge.paths:
            key = edge.source, edge.target, path
            if key in checked and count > 0:
                continue
            checked.add(key)
            ends = (path[0], path[-1]) == (ranks[edge.source], ranks[edge.target])
            if count < 1 or not ends or any(hop not in wires for hop in zip(path, path[1:])):
                raise ValueError(f"the path {short(path)} with multiplicity {short(count)} does "
                                 f"not lead from rank {edge.source} to rank {edge.target}. Plan "
                                 "the schedule again")


def _edges(schedule: Schedule) -> Iterator[Edge]:
    return (edge for tree in schedule.trees for edge in tree.edges)


def _loads(schedule: Schedule) -> Iterator[Counter[tuple[str, str]]]:
    """For each group of trees that run at the same time, yield the total multiplicity of the paths
    on each wire.
    """
    together = [(True, False)] if schedule.overlap else [(True,), (False,)]
    for kinds in together:
        by_paths: Counter[Paths] = Counter(
            edge.paths for tree in schedule.trees if tree.inward in kinds for edge in tree.edges)
        load: Counter[tuple[str, str]] = Counter()
        for paths, times in by_paths.items():
            for path, count in paths:
                for hop in zip(path, path[1:]):
                    load[hop] += count * times
        yield load
