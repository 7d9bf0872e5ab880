"""Where the nodes of a network and of a tree are drawn, by igraph, which schedules need, too."""

from __future__ import annotations

from math import log10

import numpy as np

from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.schedule import Tree

SLOW = 0.45  # of a link's length, for each factor of 10 in bandwidth below the fastest


def network_layout(network: Network) -> dict[str, tuple[float, float]]:
    """Positions within [0, 1] x [0, 1], alike for equal networks: distances between nodes are as
    near to those along the links as possible (Kamada and Kawai, 1989). Fast links are shorter, so
    that what belongs together is drawn together.
    """
    import igraph

    number = {node: i for i, node in enumerate(network.nodes)}
    fastest = max((float(w.bandwidth) for w in network.wires), default=1.0)
    lengths: dict[frozenset[int], float] = {}
    for wire in network.wires:
        length = 1 + min(1.5, SLOW * log10(fastest / float(wire.bandwidth)))
        ends = frozenset((number[wire.source], number[wire.target]))
        lengths[ends] = min(length, lengths.get(ends, length))
    graph, along = igraph.Graph(len(number), [*map(tuple, lengths)]), [*lengths.values()]
    start = _spread(np.array(graph.distances(weights=along)))
    at = np.array(graph.layout_kamada_kawai(weights=along, seed=start.tolist()).coords)
    low, high = at.min(axis=0), at.max(axis=0)
    # the wider direction lies, whatever the axes came out as
    if high[1] - low[1] > 1.02 * (high[0] - low[0]):
        at, low, high = at[:, ::-1], low[::-1], high[::-1]
    placed = (at - low) / (max(high - low) or 1.0)
    return {node: (float(x), float(y)) for node, (x, y) in zip(network.nodes, placed, strict=True)}


def _spread(wanted: np.ndarray) -> np.ndarray:
    """Classical scaling: the two directions in which distances differ most."""
    count = len(wanted)
    centre = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-centre @ wanted**2 @ centre / 2)
    at = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 1e-6))
    if at.shape[1] < 2:
        at = np.zeros((count, 2))
    # nodes at one place would never part
    return at + 1e-3 * np.stack([np.cos(np.arange(count)), np.sin(np.arange(count))], axis=1)


def tree_layout(tree: Tree) -> dict[int, tuple[int, float]]:
    """Of each rank: its depth, and its row: leaves one below the other, parents between their
    children.
    """
    import igraph

    edges = list(tree.from_root())
    number = {rank: i for i, rank in enumerate([tree.root, *(child for _, child in edges)])}
    graph = igraph.Graph(len(number), [(number[a], number[b]) for a, b in edges])
    at = graph.layout_reingold_tilford(root=[0]).coords
    top = min(row for row, _ in at)
    return {rank: (round(depth), row - top)
            for rank, (row, depth) in zip(number, at, strict=True)}
