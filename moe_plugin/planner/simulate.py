"""Predicted all-to-all times over numbers of ranks and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_plugin.planner.all_to_all import COSTS, predict
from moe_plugin.planner.cluster import Cluster


def shape_for(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with this many ranks: whole nodes, or one node that is not full. `ValueError`
    where neither fits.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks: must be at least 1")
    if ranks <= cluster.ranks_per_node:
        return cluster.resized(1, ranks)
    if ranks % cluster.ranks_per_node:
        raise ValueError(
            f"{ranks} ranks are no whole nodes of {cluster.ranks_per_node} ranks (cluster "
            f"{cluster.name!r}); use a multiple"
        )
    return cluster.resized(ranks // cluster.ranks_per_node)


def simulate(cluster: Cluster, ranks: Sequence[int],
             sizes: Sequence[float]) -> list[dict[str, Any]]:
    """One row for each size, number of ranks and algorithm, ready for JSON."""
    rows = []
    for size in sizes:
        for number in ranks:
            shape = shape_for(cluster, number)
            for name in COSTS:
                cost = predict(shape, name, size)
                rows.append({
                    "ranks": number, "nodes": shape.nodes, "bytes": size, "algorithm": name,
                    "ms": 1e3 * cost.seconds, "messages": cost.inter_messages,
                    "inter_bytes": cost.inter_bytes
                })
    return rows
