"""Through one rank of each node (HetuMoE):

    4 P S b_copy + 2 (P-1) (a_intra + S b_intra) + (N-1) (a_inter + P P S/W b_inter)
"""

from __future__ import annotations

from moe_plugin.planner.all_to_all_cost.linear import linear_cost
from moe_plugin.planner.all_to_all_cost.phases import WAKES, Cost, Phase, cost_of, declared
from moe_plugin.planner.cluster import Cluster


@declared("leader", 3)
def leader_cost(cluster: Cluster, size: float) -> Cost:
    """Through one rank per node; `linear` on one node, or with one rank per node."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    if n == 1 or p == 1:
        return linear_cost(cluster, size)
    out = max(here * (w - here) for here in cluster.sizes) * size / w
    node = (n - 1, out, 2 * (p - 1), 2 * (p - 1) * size)
    # messages in one direction: half of what `machine` counts for both
    wakes = ((p - 1) / 2) ** WAKES + (p - 1) * 0.5**WAKES
    inside = Phase((0, 0), (p - 1, (p - 1) * size), (n * wakes, n * (p - 1), n * (p - 1) * size))
    between = Phase((n - 1, out), (0, 0), (n * (n - 1)**WAKES, n * (n - 1), n * out), 4 * p * size)
    return cost_of(cluster, node, [inside, between, inside])
