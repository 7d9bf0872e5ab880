"""Every rank sends to every rank directly:

    s (W-P) a_inter + (P-1) a_intra + max(s (W-P) S/W b_inter, (P-1) S/W b_intra)
"""

from __future__ import annotations

from moe_plugin.planner.all_to_all_cost.phases import (
    WAKES,
    Cost,
    Phase,
    busiest,
    cost_of,
    declared,
)
from moe_plugin.planner.cluster import Cluster


@declared("linear", 1)
def linear_cost(cluster: Cluster, size: float) -> Cost:
    """Every rank to every rank directly; `size` bytes per rank."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    inter, intra = w - p, p - 1
    card = busiest(cluster, lambda here: w - here)
    node = (p * inter, p * inter * size / w, p * intra, p * intra * size / w)
    phase = Phase((card, card * size / w), (intra, intra * size / w),
                  (w * (w - 1)**WAKES, w * (w - 1), (w - 1) * size), parallel_links=n > 1)
    return cost_of(cluster, node, [phase] if w > 1 else [])
