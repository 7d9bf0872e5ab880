"""What the other collectives cost on a `Cluster`, in closed form: rings over consecutive or strided
ranks.

A group is `size` ranks, every `stride`-th rank of the cluster. Over several nodes a ring's slowest
hop is the network: n - 1 steps of alpha + (bytes of one piece) * beta, where the ranks of a node
drive their network cards together.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_plugin.planner.all_to_all import COSTS, predict
from moe_plugin.planner.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """`size` ranks, `stride` apart; stride 1: consecutive ranks."""

    size: int
    stride: int = 1

    def per_node(self, cluster: Cluster) -> int:
        """Members on one node."""
        return max(1, min(self.size, cluster.ranks_per_node // self.stride))

    def shape(self, cluster: Cluster) -> Cluster:
        """The cluster that the group alone is: its nodes and members a node.

        Groups of one kind work at the same time; those that share a node share its network cards.
        """
        here = self.per_node(cluster)
        together = max(1, cluster.ranks_per_node // here)
        return Cluster(name=cluster.name, nodes=-(-self.size // here), ranks_per_node=here,
                       nics=max(1, cluster.nics // together), intra=cluster.intra,
                       inter=cluster.inter, copy_s=cluster.copy_s, phase_s=cluster.phase_s,
                       host=cluster.host, wake_s=cluster.wake_s)


def all_to_all_s(cluster: Cluster, group: Group, algorithm: str, size: float) -> float:
    """All-to-all of `size` bytes a rank; an algorithm without a cost model counts as `linear`."""
    if group.size == 1 or not size:
        return 0.0
    algorithm = algorithm if algorithm in COSTS else "linear"
    return predict(group.shape(cluster), algorithm, size).seconds


def _ring_steps_s(cluster: Cluster, group: Group, piece: float) -> float:
    """n - 1 steps in which every rank passes `piece` bytes on."""
    if group.size == 1:
        return 0.0
    here = group.shape(cluster)
    steps = group.size - 1
    host = cluster.nodes * cluster.ranks_per_node
    emulated = cluster.machine_s(steps * host, steps * host, steps * host * piece)
    if here.nodes == 1:
        return steps * (cluster.intra.alpha_s +
                        piece * cluster.intra.beta_s) + cluster.phase_s + emulated
    # each node's ranks run rings of their own, one a card: a card carries 1/min(nics, ranks) of the
    # bytes
    cards = min(here.nics, here.ranks_per_node)
    beta = max(cluster.inter.beta_s / cards, cluster.intra.beta_s)
    crossing = group.shape(cluster).nodes
    alpha = crossing * cluster.inter.alpha_s + (
        steps -
        crossing) * cluster.intra.alpha_s if steps > crossing else steps * cluster.inter.alpha_s
    return alpha + steps * piece * beta + cluster.phase_s + emulated


def all_gather_s(cluster: Cluster, group: Group, piece: float) -> float:
    """Ring all-gather, `piece` bytes from each rank: (n-1) (alpha + piece beta)."""
    return _ring_steps_s(cluster, group, piece) if piece else 0.0


def reduce_scatter_s(cluster: Cluster, group: Group, piece: float) -> float:
    """Ring reduce-scatter that leaves `piece` bytes on each rank; the reverse of the all-gather."""
    return all_gather_s(cluster, group, piece)


def all_reduce_s(cluster: Cluster, group: Group, size: float) -> float:
    """Ring all-reduce of `size` bytes: reduce-scatter, then all-gather; 2 size (n-1)/n bytes a
    rank.
    """
    return 2 * all_gather_s(cluster, group, size / group.size)


def broadcast_s(cluster: Cluster, group: Group, size: float) -> float:
    """Pipelined broadcast of a large buffer: about one buffer through the slowest hop, plus the
    chain's latency.
    """
    if group.size == 1 or not size:
        return 0.0
    here = group.shape(cluster)
    slow = cluster.inter if here.nodes > 1 else cluster.intra
    return (group.size - 1).bit_length() * slow.alpha_s + size * slow.beta_s + cluster.phase_s
