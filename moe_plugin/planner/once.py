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


@dataclass(frozen=True)
class Visits:
    """Ranks and nodes of a token, measured, each choice being on one rank; its choices."""

    ranks: float
    nodes: float
    choices: float


def rows_of_token(cluster: Cluster, top_k: float, r: int = 1, most_nodes: int | None = None,
                  visits: Visits | None = None) -> OnceRows:
    """Of `top_k` choices.

    Args:
        r: ranks to which each choice goes, consecutive ones.
        most_nodes: that a token may have, where its router limits them.
        visits: where tokens go, from the counts of a run; None: even routing. For r > 1 both
            together: as much fewer or more than even as for r = 1.
    """
    nodes = min(cluster.nodes, most_nodes or cluster.nodes)
    ranks = nodes * cluster.ranks_per_node
    even = OnceRows(expected_targets(top_k, ranks, r),
                    expected_targets(top_k, nodes, max(1.0, r / cluster.ranks_per_node)), top_k * r)
    if visits is None:
        return even
    off = (visits.ranks / expected_targets(visits.choices, ranks),
           visits.nodes / expected_targets(visits.choices, nodes))
    return OnceRows(min(cluster.ranks, top_k * r, even.ranks * off[0]),
                    min(cluster.nodes, top_k * r, even.nodes * off[1]), even.pairs)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of a token that leave its rank, one way, for ranks of its own node and of others; with
    `nodes` also those that are sent on inside a node.
    """

    inside: float
    between: float


def bytes_of_token(cluster: Cluster, send: str, top_k: float, row_bytes: float,
                   most_nodes: int | None = None, visits: Visits | None = None) -> TokenBytes:
    """Rows and their pairs on the way to the experts; back travel the rows alone, and in backward
    as much once more each way.

    Args:
        send: one of `choice.SENDS`. row_bytes: of a row.
        most_nodes, visits: see `rows_of_token`.
    """
    rows = rows_of_token(cluster, top_k, most_nodes=most_nodes, visits=visits)
    away, apart = 1 - 1 / cluster.nodes, 1 - 1 / cluster.ranks
    pairs = 0.0 if send == "rows" else rows.pairs * PAIR_BYTES
    of_rows = rows.pairs if send == "rows" else rows.ranks
    if send != "nodes":
        size = of_rows * row_bytes + pairs
        return TokenBytes(size * (apart - away), size * away)
    inside = (1 - 1 / cluster.ranks_per_node) * (of_rows * row_bytes + pairs)
    return TokenBytes(inside, away * (rows.nodes * row_bytes + pairs))


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
