"""Cost of the other collectives on a `Cluster`, in closed form: rings over groups of ranks.

A group has `size` ranks, every `stride`-th rank of the cluster. Over several nodes the slowest hop
of a ring is the network: n - 1 steps of alpha + (bytes of one piece) * beta, where the ranks of a
node use their network cards together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_plugin.planner.all_to_all_cost import COSTS, predict
from moe_plugin.planner.cluster import Cluster


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
