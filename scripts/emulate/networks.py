"""Networks with unequal links for `EmulatedCluster.set_network`, with one rank per node.

In all functions, `rate_bit_s` is the bandwidth of a normal link in each direction, in bits per
second. The links have no cost per message (alpha), because the cost of a message on this machine is
unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from moe_plugin.planner.forest.network import Network
from moe_plugin.planner.forest.presets import Builder


def equal(nodes: int, rate_bit_s: float) -> Network:
    """Return a network in which all nodes are connected to one switch by equal links."""
    return _linked("equal links", nodes, 1, [(str(i), "s0", rate_bit_s) for i in range(nodes)])


def slow_node(nodes: int, rate_bit_s: float, slower: float = 4) -> Network:
    """Return a network in which all nodes are connected to one switch. The link of node 0 is slower
    by the factor `slower`.
    """
    links = [(str(i), "s0", rate_bit_s / (1 if i else slower)) for i in range(nodes)]
    return _linked("one slow node", nodes, 1, links)


def ring(nodes: int, rate_bit_s: float, slower: float = 1) -> Network:
    """Return a ring with at least three nodes.

    The link from the last node to node 0 is slower than the other links by the factor `slower`.
    """
    links = [(str(i), str((i + 1) % nodes), rate_bit_s / (1 if i + 1 < nodes else slower))
             for i in range(nodes)]
    return _linked("ring of nodes" if slower == 1 else "ring with a slow link", nodes, 0, links)


def chain(nodes: int, rate_bit_s: float) -> Network:
    """Return a chain in which each node is connected to its neighbours, as in a pipeline."""
    return _linked("chain", nodes, 0, [(str(i), str(i + 1), rate_bit_s) for i in range(nodes - 1)])


def two_clusters(nodes: int, rate_bit_s: float, slower: float = 2) -> Network:
    """Return a network with two switches that are linked to each other. Half of the nodes are
    connected to each switch.

    The link between the switches is slower than a node's link by the factor `slower`.
    """
    links = [(str(i), f"s{2 * i // nodes}", rate_bit_s) for i in range(nodes)]
    return _linked("two clusters", nodes, 2, [*links, ("s0", "s1", rate_bit_s / slower)])


SHAPES: dict[str, Callable[[int, float], Network]] = {
    "equal": equal, "slow-node": slow_node, "ring": ring,
    "ring-slow-link": lambda nodes, rate_bit_s: ring(nodes, rate_bit_s, 4),
    "two-clusters": two_clusters,
}


def _linked(name: str, nodes: int, switches: int,
            links: list[tuple[str, str, float]]) -> Network:
    builder = Builder([str(i) for i in range(nodes)], [f"s{i}" for i in range(switches)])
    for a, b, rate_bit_s in links:
        builder.link(a, b, Fraction(f"{rate_bit_s / 8e9:.6g}"))
    return builder.network(name)
