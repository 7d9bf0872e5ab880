"""Where the nodes of a network and of a tree are drawn."""

from __future__ import annotations

from collections import defaultdict
from math import log2

import numpy as np

from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.schedule import Tree

ROUNDS = 150
SLOW = 0.45  # of a link's length, for each factor of 10 in bandwidth below the fastest


def network_layout(network: Network) -> dict[str, tuple[float, float]]:
    """Positions within [0, 1] x [0, 1], alike for equal networks: distances between nodes are as
    near to those along the links as possible (stress majorization, Gansner et al., 2004). Fast
    links are shorter, so that what belongs together is drawn together.
    """
    count = len(network.nodes)
    wanted = _distances(network)
    angle = 2 * np.pi * np.arange(count) / max(1, len(network.ranks)) - np.pi / 2
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1) * wanted.max() / 2
    circle[len(network.ranks):] *= 0.01  # switches begin in the middle
    found = [_relax(start, wanted) for start in (circle, _spread(wanted))]
    best = min(found, key=lambda at: round(_stress(at, wanted), 6))
    low, high = best.min(axis=0), best.max(axis=0)
    # the wider direction lies, whatever the axes came out as
    if high[1] - low[1] > 1.02 * (high[0] - low[0]):
        best, low, high = best[:, ::-1], low[::-1], high[::-1]
    scale = max(high - low) or 1.0
    placed = (best - low) / scale
    return {node: (float(x), float(y)) for node, (x, y) in zip(network.nodes, placed, strict=True)}


def _distances(network: Network) -> np.ndarray:
    number = {node: i for i, node in enumerate(network.nodes)}
    fastest = max((float(w.bandwidth) for w in network.wires), default=1.0)
    far = np.full((len(number), len(number)), np.inf)
    np.fill_diagonal(far, 0.0)
    for wire in network.wires:
        length = 1 + min(1.5, SLOW * log2(fastest / float(wire.bandwidth)) / log2(10))
        ends = number[wire.source], number[wire.target]
        far[ends] = far[ends[::-1]] = min(far[ends], length)
    for middle in range(len(number)):
        far = np.minimum(far, far[:, middle, None] + far[None, middle, :])
    return far


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


def _relax(at: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    weight = np.zeros_like(wanted)
    np.divide(1.0, wanted**2, out=weight, where=wanted > 0)
    total = np.maximum(weight.sum(axis=1, keepdims=True), 1e-12)
    for _ in range(ROUNDS):
        apart = at[:, None] - at[None]
        now = np.maximum(np.linalg.norm(apart, axis=2), 1e-9)
        pull = weight * wanted / now
        at = (weight @ at + (pull[:, :, None] * apart).sum(axis=1)) / total
    return at


def _stress(at: np.ndarray, wanted: np.ndarray) -> float:
    now = np.linalg.norm(at[:, None] - at[None], axis=2)
    weight = np.zeros_like(wanted)
    np.divide(1.0, wanted**2, out=weight, where=wanted > 0)
    return float((weight * (now - wanted) ** 2).sum())


def tree_layout(tree: Tree) -> dict[int, tuple[int, float]]:
    """Of each rank: its depth, and its row: leaves one below the other, parents between their
    children.
    """
    children: dict[int, list[int]] = defaultdict(list)
    depth = tree.depths()
    for parent, child in tree.from_root():
        children[parent].append(child)
    rows: dict[int, float] = {}
    leaves = 0
    order = [tree.root]
    for rank in order:  # parents before children
        order.extend(children[rank])
    # leaves from top to bottom, without recursion: trees may be as deep as there are ranks
    stack = [tree.root]
    while stack:
        rank = stack.pop()
        if not children[rank]:
            rows[rank] = float(leaves)
            leaves += 1
        stack.extend(reversed(children[rank]))
    for rank in reversed(order):
        if children[rank]:
            rows[rank] = sum(rows[child] for child in children[rank]) / len(children[rank])
    return {rank: (depth[rank], rows[rank]) for rank in depth}
