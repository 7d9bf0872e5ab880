"""Two-dimensional hierarchical (2DH, Tutel): inside nodes, then between them:

    4 S b_copy + (P-1) (a_intra + S/P b_intra) + s (N-1) (a_inter + S P/W b_inter)

A rank that shares its node with m - 1 others has ceil(q / m) messages for a node of q.
"""

from __future__ import annotations

from functools import partial

from moe_plugin.planner.all_to_all_cost.linear import linear_cost
from moe_plugin.planner.all_to_all_cost.phases import (
    WAKES,
    Cost,
    Phase,
    busiest,
    cost_of,
    declared,
)
from moe_plugin.planner.cluster import Cluster


@declared("2dh", 2)
def two_d_cost(cluster: Cluster, size: float) -> Cost:
    """Two-dimensional hierarchical; `linear` on one node, or with one rank per node."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    if n == 1 or p == 1:
        return linear_cost(cluster, size)
    node = (p * (n - 1), p * (n - 1) * size * p / w, p * (p - 1), (p - 1) * size)
    inside = Phase((0, 0), (p - 1, (p - 1) * size / p),
                   (w * (p - 1)**WAKES, w * (p - 1), n * node[3]), 2 * size)
    card = (busiest(cluster, partial(_messages, cluster)),
            busiest(cluster, lambda here: _messages(cluster, here) * size * here / w))
    between = Phase(card, (0, 0),
                    (w * (n - 1)**WAKES, w * (n - 1), n * node[1]), 2 * size)
    return cost_of(cluster, node, [inside, between])


def _messages(cluster: Cluster, here: int) -> int:
    """Of 2DH between nodes, from one rank on a node of `here` ranks."""
    return sum(-(-there // here) * nodes for there, nodes in cluster.sizes.items()) - 1
