"""What is sent, and how long it takes, where a token's row goes once to each rank or node.

k choices fall evenly on W targets: a token has W (1 - (1 - 1/W)^k) of them (`expected_targets`).
With `nodes` a row crosses to each node once, between ranks of equal place, and goes on inside it;
these are the two phases of 2DH with other numbers of rows. (Expert, weight) pairs travel beside the
rows in exchanges of their own, there in the forward pass, weights' gradients back in backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_plugin.planner.all_to_all_cost import COSTS, predict
from moe_plugin.planner.all_to_all_cost.phases import leader_cost, two_d_cost
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster


# Cost of the other collectives on a `Cluster`, in closed form: rings over groups of ranks.
#
# A group has `size` ranks, every `stride`-th rank of the cluster. Over several nodes the slowest
# hop
# of a ring is the network: n - 1 steps of alpha + (bytes of one piece) * beta, where the ranks of a
# node use their network cards together.
@dataclass(frozen=True)
class GroupShape:
    """`size` ranks, `stride` apart; stride 1: consecutive ranks."""

    size: int
    stride: int = 1

    def per_node(self, cluster: Cluster) -> int:
        """Members on one node."""
        return max(1, min(self.size, cluster.ranks_per_node // self.stride))

    def shape(self, cluster: Cluster) -> Cluster:
        """The group as a cluster of its own: its nodes, and its members per node.

        All groups of one kind communicate at the same time, so groups on one node share its network
        cards.
        """
        if self.size == cluster.ranks:
            return cluster
        here = self.per_node(cluster)
        groups = max(1, cluster.ranks_per_node // here)
        return replace(cluster.resized(-(-self.size // here), here),
                       nics=max(1, cluster.nics // groups))


def all_to_all_s(cluster: Cluster, group: GroupShape, algorithm: str, size: float) -> float:
    """All-to-all of `size` bytes per rank; an algorithm without a cost model counts as `linear`."""
    if group.size == 1 or not size:
        return 0.0
    algorithm = algorithm if algorithm in COSTS else "linear"
    return predict(group.shape(cluster), algorithm, size).seconds


def _ring_steps_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """n - 1 steps in which every rank forwards `piece` bytes."""
    if group.size == 1:
        return 0.0
    here = group.shape(cluster)
    steps = group.size - 1
    messages = steps * cluster.ranks
    fixed = cluster.phase_s + cluster.machine_s(messages, messages, messages * piece)
    if here.nodes == 1:
        return steps * (cluster.intra.alpha_s + piece * cluster.intra.beta_s) + fixed
    # one ring per network card, each with 1/cards of the bytes
    cards = min(here.nics, here.ranks_per_node)
    beta = max(cluster.inter.beta_s / cards, cluster.intra.beta_s)
    crossing = min(steps, here.nodes)
    alpha = crossing * cluster.inter.alpha_s + (steps - crossing) * cluster.intra.alpha_s
    return alpha + steps * piece * beta + fixed


def _two_steps_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """Between ranks of equal place on n nodes, then inside nodes of p ranks (`comm.by_nodes`): a
    node's cards carry (n - 1) p pieces in place of a ring's n p - 1.
    """
    here = group.shape(cluster)
    n, p = here.nodes, here.ranks_per_node
    cards = min(here.nics, p)
    between = (n - 1) * (cluster.inter.alpha_s + piece * p / cards * cluster.inter.beta_s)
    inside = (p - 1) * n * piece * cluster.intra.beta_s + (p - 1) * cluster.intra.alpha_s
    messages = cluster.ranks * (n - 1 + (p - 1) * n)
    fixed = 2 * cluster.phase_s + cluster.machine_s(messages, messages, messages * piece)
    return between + inside + fixed


def all_gather_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """All-gather, `piece` bytes from each rank: a ring, (n-1) (alpha + piece beta), or, over
    several nodes of several ranks, two steps if these are faster.
    """
    if not piece:
        return 0.0
    here, ring = group.shape(cluster), _ring_steps_s(cluster, group, piece)
    two = here.nodes > 1 and here.ranks_per_node > 1
    return min(ring, _two_steps_s(cluster, group, piece)) if two else ring


def reduce_scatter_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """Reduce-scatter that leaves `piece` bytes on each rank; the reverse of the all-gather."""
    return all_gather_s(cluster, group, piece)


def all_reduce_s(cluster: Cluster, group: GroupShape, size: float) -> float:
    """Ring all-reduce of `size` bytes: reduce-scatter, all-gather; 2 size (n-1)/n per rank."""
    return 2 * _ring_steps_s(cluster, group, size / group.size) if size else 0.0


PAIR_BYTES = 6  # expert and whether it begins a row in two bytes, a float32 weight


def expected_targets(choices: float, targets: float, each: float = 1.0) -> float:
    """How many of `targets` a token has, whose choices fall evenly and each on `each` of them."""
    return targets * (1 - (1 - min(1.0, each / targets)) ** choices)


@dataclass(frozen=True)
class Limits:
    """A token's experts are in `chosen` of `groups` groups of consecutive experts (groups of nodes,
    or of devices), by its router.
    """

    groups: int = 1
    chosen: int = 1

    def targets(self, choices: float, targets: int, each: float = 1.0) -> float:
        """See `expected_targets`, of targets with as many consecutive experts each."""
        inside, rest = divmod(self.groups, targets)
        if not rest:  # several groups on a target, so many of them chosen
            return targets * sum(
                math.comb(inside, here) * math.comb(self.groups - inside, self.chosen - here)
                * (1 - (1 - min(1.0, each * here / self.chosen)) ** choices)
                for here in range(min(inside, self.chosen) + 1)
            ) / math.comb(self.groups, self.chosen)
        if targets % self.groups:  # they cut each other anyhow
            return expected_targets(choices, targets, each)
        return expected_targets(choices, targets * self.chosen / self.groups, each)


@dataclass(frozen=True)
class OnceRows:
    """Rows of a token, its own rank's and node's counted: to ranks, and to nodes; its pairs."""

    ranks: float
    nodes: float
    pairs: float


# where a token goes, by r: measured
Visits = Mapping[int, OnceRows]


def rows_of_token(cluster: Cluster, top_k: float, r: int = 1, limits: Limits = Limits(),
                  visits: Visits | None = None) -> OnceRows:
    """Of `top_k` choices.

    Args:
        r: ranks to which each choice goes, consecutive ones.
        visits: from the counts of a run; None: even routing.
    """
    if visits is not None:
        return visits[r]
    nodes = limits.targets(top_k, cluster.nodes, max(1.0, r / cluster.ranks_per_node))
    if len(cluster.sizes) > 1:  # of unequal nodes, which groups of experts cut anyhow
        nodes = sum(number * expected_targets(top_k, 1, max(size, r) / cluster.ranks)
                    for size, number in cluster.sizes.items())
    return OnceRows(limits.targets(top_k, cluster.ranks, r), nodes, top_k * r)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of a token that leave its rank, one way, for ranks of its own node and of others; with
    `nodes` also those that are sent on inside a node.
    """

    inside: float
    between: float


def bytes_of_token(cluster: Cluster, send: str, top_k: float, row_bytes: float,
                   limits: Limits = Limits()) -> TokenBytes:
    """Rows and their pairs on the way to the experts; back travel the rows alone, and in backward
    as much once more each way.

    Args:
        send: one of `choice.SENDS`.
        row_bytes: of a row.
        limits: see `rows_of_token`.
    """
    rows = rows_of_token(cluster, top_k, limits=limits)
    away, apart = cluster.between, 1 - 1 / cluster.ranks
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
