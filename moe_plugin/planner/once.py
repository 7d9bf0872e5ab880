"""Predict the traffic and the time of sending each token once per rank or once per node, and the
time of ring collectives.

Assume that each of a token's k choices is one of W targets, and that all targets are equally likely
and independent. On average, the token is then sent to `W (1 - (1 - 1/W)^k)` different targets
(`expected_targets`). With `send=nodes`, a token's row is sent once to each node. On each node, the
rank with the same local index as the sender receives the row and forwards it to other ranks of the
node. These two steps are the two phases of the 2DH algorithm, but with different numbers of rows.
Pairs of an expert index and a routing weight are sent in separate exchanges: the forward pass sends
the pairs to the experts, and the backward pass sends the gradients of the routing weights back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_plugin.planner.all_to_all_cost import COSTS, leader_cost, predict, two_d_cost
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.planner.cluster import Cluster


# Closed-form cost of ring collectives over groups of ranks of a `Cluster`.
#
# A group has `size` ranks, every `stride`-th rank of the cluster. In a group on several nodes the
# slowest hop of a ring is the network: n - 1 steps of alpha + (bytes of one piece) * beta, where
# the ranks of a node use their network cards together.
@dataclass(frozen=True)
class GroupShape:
    """A group of `size` ranks. The indices of neighboring ranks differ by `stride`, so that the
    ranks are consecutive if `stride` is 1.
    """

    size: int
    stride: int = 1

    def per_node(self, cluster: Cluster) -> int:
        """Return how many ranks of the group are on the same node."""
        return max(1, min(self.size, cluster.ranks_per_node // self.stride))

    def shape(self, cluster: Cluster) -> Cluster:
        """Return the group as a separate cluster, whose nodes contain only its ranks.

        All groups of the same shape communicate at the same time and share the network cards of
        their nodes.
        """
        if self.size == cluster.ranks:
            return cluster
        members = self.per_node(cluster)
        groups = max(1, cluster.ranks_per_node // members)
        return replace(cluster.resized(-(-self.size // members), members),
                       nics=max(1, cluster.nics // groups))


def all_to_all_s(cluster: Cluster, group: GroupShape, algorithm: str, size: float) -> float:
    """Predict the time in seconds of an all-to-all in which each rank sends `size` bytes.

    If there is no cost model for an algorithm, the cost of `linear` is used.
    """
    if group.size == 1 or not size:
        return 0.0
    algorithm = algorithm if algorithm in COSTS else "linear"
    return predict(group.shape(cluster), algorithm, size).seconds


def _ring_steps_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """Predict the time in seconds of the n - 1 steps of a ring, in which every rank forwards
    `piece` bytes per step.
    """
    if group.size == 1:
        return 0.0
    shape = group.shape(cluster)
    steps = group.size - 1
    messages = steps * cluster.ranks
    fixed = cluster.phase_s + cluster.machine_s(messages, messages, messages * piece)
    if shape.nodes == 1:
        return steps * (cluster.intra.alpha_s + piece * cluster.intra.beta_s) + fixed
    # one ring per network card, each with 1/cards of the bytes
    cards = min(shape.nics, shape.ranks_per_node)
    beta = max(cluster.inter.beta_s / cards, cluster.intra.beta_s)
    crossing = min(steps, shape.nodes)
    alpha = crossing * cluster.inter.alpha_s + (steps - crossing) * cluster.intra.alpha_s
    return alpha + steps * piece * beta + fixed


def _two_steps_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """Predict the time in seconds of an all-gather in two steps (see `comm.by_nodes`).

    There are n nodes of p ranks. In the first step, ranks with the same local index on different
    nodes exchange data. In the second step, the ranks of each node exchange data. The network cards
    of each node send `(n - 1) p` pieces, compared with `n p - 1` pieces in a ring.
    """
    shape = group.shape(cluster)
    n, p = shape.nodes, shape.ranks_per_node
    cards = min(shape.nics, p)
    between = (n - 1) * (cluster.inter.alpha_s + piece * p / cards * cluster.inter.beta_s)
    inside = (p - 1) * n * piece * cluster.intra.beta_s + (p - 1) * cluster.intra.alpha_s
    messages = cluster.ranks * (n - 1 + (p - 1) * n)
    fixed = 2 * cluster.phase_s + cluster.machine_s(messages, messages, messages * piece)
    return between + inside + fixed


def all_gather_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """Predict the time in seconds of an all-gather in which each rank contributes `piece` bytes.

    A ring takes `(n - 1) (alpha + piece beta)` seconds. If the group has several nodes with several
    ranks each, return the time of the ring or of the two-step algorithm, whichever is shorter.
    """
    if not piece:
        return 0.0
    shape, ring = group.shape(cluster), _ring_steps_s(cluster, group, piece)
    two = shape.nodes > 1 and shape.ranks_per_node > 1
    return min(ring, _two_steps_s(cluster, group, piece)) if two else ring


def reduce_scatter_s(cluster: Cluster, group: GroupShape, piece: float) -> float:
    """Predict the time in seconds of a reduce-scatter after which each rank has `piece` bytes.

    A reduce-scatter is the reverse of an all-gather and takes equally long.
    """
    return all_gather_s(cluster, group, piece)


def all_reduce_s(cluster: Cluster, group: GroupShape, size: float) -> float:
    """Predict the time in seconds of a ring all-reduce of `size` bytes."""
    return 2 * _ring_steps_s(cluster, group, size / group.size) if size else 0.0


PAIR_BYTES = 6  # two bytes for the expert and a flag that starts a row, and a float32 weight


def expected_targets(choices: float, targets: float, each: float = 1.0) -> float:
    """Return the expected number of different targets to which a token is sent.

    Args:
        choices: number of choices of the token, each of which is equally likely to be any target.
        targets: number of possible targets (ranks or nodes).
        each: number of targets to which the token is sent for each choice. Defaults to 1.
    """
    return targets * (1 - (1 - min(1.0, each / targets)) ** choices)


@dataclass(frozen=True)
class Limits:
    """Restrictions of the router on which experts a token may select. Consecutive experts form
    `groups` groups, typically one per node or device, and a token may select experts from only
    `chosen` of them.
    """

    groups: int = 1
    chosen: int = 1

    def targets(self, choices: float, targets: int, each: float = 1.0) -> float:
        """Return `expected_targets` under these restrictions. All targets must have the same number
        of experts.
        """
        inside, rest = divmod(self.groups, targets)
        if not rest:  # each target contains several groups, and some of these groups are chosen
            return targets * sum(
                math.comb(inside, hits) * math.comb(self.groups - inside, self.chosen - hits)
                * (1 - (1 - min(1.0, each * hits / self.chosen)) ** choices)
                for hits in range(min(inside, self.chosen) + 1)
            ) / math.comb(self.groups, self.chosen)
        if targets % self.groups:  # group borders do not coincide with borders of targets
            return expected_targets(choices, targets, each)
        return expected_targets(choices, targets * self.chosen / self.groups, each)


@dataclass(frozen=True)
class OnceRows:
    """Expected numbers of rows and of (expert, weight) pairs that are sent for one token.

    Rows and pairs that stay on the token's own rank or node are included.

    Attributes:
        ranks: number of ranks to which the token's row is sent.
        nodes: number of nodes to which the token's row is sent.
        pairs: number of (expert, weight) pairs that are sent for the token.
    """

    ranks: float
    nodes: float
    pairs: float


# measured destinations of tokens, by r
Visits = Mapping[int, OnceRows]


def rows_of_token(cluster: Cluster, top_k: float, r: int = 1, limits: Limits = Limits(),
                  visits: Visits | None = None) -> OnceRows:
    """Return the expected numbers of rows and pairs for a token with `top_k` choices.

    Args:
        cluster: the cluster to whose ranks and nodes the token is sent.
        top_k: number of choices per token.
        r: number of consecutive ranks to which the token is sent for each choice.
        limits: router limits. By default, the router has no restrictions.
        visits: measured numbers of ranks and nodes to which a token is sent. By default, all
            experts are assumed to be equally likely.
    """
    if visits is not None:
        return visits[r]
    nodes = limits.targets(top_k, cluster.nodes, max(1.0, r / cluster.ranks_per_node))
    if len(cluster.sizes) > 1:  # groups of experts do not coincide with nodes of unequal size
        nodes = sum(number * expected_targets(top_k, 1, max(size, r) / cluster.ranks)
                    for size, number in cluster.sizes.items())
    return OnceRows(limits.targets(top_k, cluster.ranks, r), nodes, top_k * r)


@dataclass(frozen=True)
class TokenBytes:
    """Number of bytes that a rank sends for one token in one direction.

    Attributes:
        inside: number of bytes sent to ranks of the same node. With `send=nodes`, these bytes are
            forwarded inside a node.
        between: number of bytes sent to other nodes.
    """

    inside: float
    between: float


def bytes_of_token(cluster: Cluster, send: str, top_k: float, row_bytes: float,
                   limits: Limits = Limits()) -> TokenBytes:
    """Return the number of bytes of rows and pairs that are sent to the experts for one token.

    On the way back from the experts, only the rows are sent. The backward pass sends the same
    number of bytes again in each direction.

    Args:
        cluster: the cluster.
        send: how often a token's row is sent, one of `choice.SENDS`.
        top_k: number of choices per token.
        row_bytes: size of a row in bytes.
        limits: router limits. By default, the router has no restrictions.
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
    """Predict the time in seconds to send `tokens` tokens of each rank to their experts, or to send
    the results back.
    """
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
