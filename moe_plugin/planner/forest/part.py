"""The part of a network that some of its ranks use, and the ways through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from moe_plugin.planner.forest.network import Network


def part_of(network: Network, ranks: Sequence[int]) -> Network:
    """The network of these ranks alone (indices), in this order, with all switches that they reach.

    Other ranks forward nothing, so their wires are left out.

    Raises: ValueError: what is left is not connected, or not balanced.
    """
    kept = tuple(network.ranks[rank] for rank in ranks)
    if kept == network.ranks:
        return network
    nodes = {*kept, *network.switches}
    wires = [w for w in network.wires if w.source in nodes and w.target in nodes]
    reached, border = set(kept[:1]), list(kept[:1])
    while border:
        here = border.pop()
        fresh = {w.target for w in wires if w.source == here} - reached
        reached |= fresh
        border.extend(fresh)
    return Network(f"{network.name}, {len(kept)} of {len(network.ranks)} ranks", kept,
                   tuple(s for s in network.switches if s in reached),
                   tuple(w for w in wires if w.source in reached or w.source in kept))


def shortest_paths(network: Network, node: str) -> dict[str, tuple[str, ...]]:
    """A path of fewest wires from a node to each other one, by its end; among equal ones that whose
    wires come first in the network.
    """
    after: dict[str, list[str]] = {name: [] for name in network.nodes}
    for wire in network.wires:
        after[wire.source].append(wire.target)
    paths, border = {node: (node,)}, deque([node])
    while border:
        here = border.popleft()
        for there in after[here]:
            if there not in paths:
                paths[there] = (*paths[here], there)
                border.append(there)
    return paths
