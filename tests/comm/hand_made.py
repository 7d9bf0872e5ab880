"""Schedules of random trees, for tests of what executes them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from unittest.mock import patch

from moe_plugin.comm import trees as tree_rounds
from moe_plugin.comm.trees import Trees
from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.schedule import Edge, Schedule, Tree


def star(ranks: int, bandwidth: float = 1) -> Network:
    """Ranks around one switch."""
    return Network.from_dict({"name": "star", "ranks": ranks, "switches": 1,
                              "links": [[str(rank), "s0", bandwidth] for rank in range(ranks)]})


def random_trees(ranks: int, seed: int, k: int = 3) -> Trees:
    """Each root has trees of random shape and weight, k together; reduced along others."""
    network, draw = star(ranks), random.Random(seed)

    def schedule(collective: str) -> Schedule:
        made = tuple(tree.reversed() if collective == "reduce_scatter" else tree
                     for root in range(ranks) for tree in _of_root(network, root, k, draw))
        load = k * ranks * ranks
        return Schedule(collective, network, Fraction(load), frozenset(), k, Fraction(1, load),
                        made, fixed=True)

    return Trees(schedule("all_gather"), schedule("reduce_scatter"))


def _of_root(network: Network, root: int, k: int, draw: random.Random) -> Iterator[Tree]:
    left = k
    while left:
        weight = draw.randint(1, left)
        left -= weight
        order = [rank for rank in range(len(network.ranks)) if rank != root]
        draw.shuffle(order)
        inside, edges = [root], []
        for rank in order:
            source = draw.choice(inside[-3:])
            path = (network.ranks[source], "s0", network.ranks[rank])
            edges.append(Edge(source, rank, ((path, weight),)))
            inside.append(rank)
        yield Tree(root, weight, tuple(edges))


@contextmanager
def many_chunks() -> Iterator[None]:
    """Inside, small data travels in many chunks, too."""
    with patch.object(tree_rounds, "LEAST_CHUNK", 1), patch.object(tree_rounds, "ROUND_S", 1e-8):
        yield
