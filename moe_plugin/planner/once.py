"""What is sent, and how long it takes, where a token's row goes once to each rank or node.

k choices fall evenly on W targets: a token has W (1 - (1 - 1/W)^k) of them (`expected_targets`).
With `nodes` a row crosses to each node once, between ranks of equal place, and goes on inside it;
these are the two phases of 2DH with other numbers of rows. (Expert, weight) pairs travel beside the
rows in exchanges of their own, there in the forward pass, weights' gradients back in backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.planner.all_to_all import leader_cost, two_d_cost
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster
from moe_plugin.planner.collectives import GroupShape, all_to_all_s

PAIR_BYTES = 6  # expert and whether it begins a row in two bytes, a float32 weight


def expected_targets(choices: float, targets: float, each: float = 1.0) -> float:
    """How many of `targets` a token has, whose choices fall evenly and each on `each` of them."""
    return targets * (1 - (1 - min(1.0, each / targets)) ** choices)


def most_targets(targets: int, groups: int, chosen: int) -> int:
    """On how many of `targets`, each with as many consecutive experts, a token's experts can be,
    where it chooses from `chosen` of `groups` of consecutive experts.
    """
    if targets % groups and groups % targets:
        return targets  # groups and targets cut each other anyhow
    return min(targets, chosen * max(1, targets // groups))


@dataclass(frozen=True)
class OnceRows:
    """Rows of a token, its own rank's and node's counted: to ranks, and to nodes; its pairs."""

    ranks: float
    nodes: float
    pairs: float


def rows_of_token(cluster: Cluster, top_k: float, r: int = 1,
                  most_nodes: int | None = None) -> OnceRows:
    """Under even routing.

    Args:
        r: ranks to which each choice goes, consecutive ones.
        most_nodes: that a token may have, where its router limits them.
    """
    nodes = min(cluster.nodes, most_nodes or cluster.nodes)
    ranks = nodes * cluster.ranks_per_node
    return OnceRows(expected_targets(top_k, ranks, r),
                    expected_targets(top_k, nodes, max(1.0, r / cluster.ranks_per_node)), top_k * r)


def exchange_s(cluster: Cluster, choice: LayoutChoice, rows: OnceRows, tokens: float,
               row_bytes: float) -> float:
    """Seconds in which `tokens` of each rank go to their experts, or their results back."""
    group, pairs = GroupShape(cluster.ranks), tokens * rows.pairs * PAIR_BYTES / 2
    flat = min(cluster.nodes, cluster.ranks_per_node) == 1
    if choice.send == "ranks" or flat:
        return (all_to_all_s(cluster, group, choice.algorithm, tokens * rows.ranks * row_bytes)
                + all_to_all_s(cluster, group, "linear", pairs))
    between, inside = tokens * rows.nodes * row_bytes, tokens * rows.ranks * row_bytes
    first = leader_cost(cluster, between).seconds if choice.algorithm == "leader" else (
        _between_s(cluster, between))
    return (first + _inside_s(cluster, inside) + _between_s(cluster, pairs)
            + _inside_s(cluster, pairs))


def _between_s(cluster: Cluster, size: float) -> float:
    return two_d_cost(cluster, size).phases[1].seconds(cluster)


def _inside_s(cluster: Cluster, size: float) -> float:
    return two_d_cost(cluster, size).phases[0].seconds(cluster)
