"""What an all-to-all costs, as rounds of messages, and the list of the algorithms' cost models.

A model is a file of this folder, which declares it; nothing else lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from moe_plugin.planner.cluster import Cluster

SHARPNESS = 4
WAKES = 2 / 3


@dataclass(frozen=True)
class Phase:
    """One round of messages.

    Attributes:
        inter: (messages, bytes) of the busiest card.
        intra: of the busiest rank.
        machine: over all ranks, (sum of k^WAKES over ranks with k messages sent and received,
            messages, bytes).
        copied: bytes that the busiest rank reads and writes.
        parallel_links: the bytes of the two links move at the same time.
    """

    inter: tuple[float, float]
    intra: tuple[float, float]
    machine: tuple[float, int, float]
    copied: float = 0.0
    parallel_links: bool = False

    def wire_s(self, cluster: Cluster) -> float:
        """Time of the links."""
        bandwidth = self.inter[1] * cluster.inter.beta_s, self.intra[1] * cluster.intra.beta_s
        return self.inter[0] * cluster.inter.alpha_s + self.intra[0] * cluster.intra.alpha_s + (
            max(bandwidth) if self.parallel_links else sum(bandwidth))

    def seconds(self, cluster: Cluster) -> float:
        """Time of the round."""
        return self.copied * cluster.copy_s + cluster.phase_s + overlapped_s(
            self.wire_s(cluster), cluster.machine_s(*self.machine))


def overlapped_s(wire: float, machine: float) -> float:
    """Seconds of two that work at the same time and sometimes wait for each other."""
    less, more = sorted((wire, machine))
    return more * (1 + (less / more) ** SHARPNESS) ** (1 / SHARPNESS) if less else more


@dataclass(frozen=True)
class Cost:
    """One exchange.

    Attributes:
        seconds: predicted time.
        inter_messages, inter_bytes: leaving one node.
        intra_messages, intra_bytes: inside one node.
        phases: its rounds.
    """

    seconds: float
    inter_messages: int
    inter_bytes: float
    intra_messages: int
    intra_bytes: float
    phases: tuple[Phase, ...]


def cost_of(cluster: Cluster, node: tuple[int, float, int, float], phases: Sequence[Phase]) -> Cost:
    """node: (messages, bytes) out of, inside one node."""
    return Cost(sum(phase.seconds(cluster) for phase in phases), *node, phases=tuple(phases))


def busiest(cluster: Cluster, of_rank: Callable[[int], float]) -> float:
    """What the busiest card carries. of_rank: what a rank sends, by the ranks of its node."""
    return max(size / min(cluster.nics, size) * of_rank(size) for size in cluster.sizes)


CostModel = Callable[[Cluster, float], Cost]  # of one exchange of so many bytes per rank
DECLARED: dict[str, tuple[int, CostModel]] = {}  # by algorithm, with its rounds of messages


def declared(name: str, rounds: int) -> Callable[[CostModel], CostModel]:
    """Decorator of the cost model of an algorithm by its registered name."""
    def add(model: CostModel) -> CostModel:
        DECLARED[name] = rounds, model
        return model

    return add


# Every rank sends to every rank directly:
#
# s (W-P) a_inter + (P-1) a_intra + max(s (W-P) S/W b_inter, (P-1) S/W b_intra)
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


# Through one rank of each node (HetuMoE):
#
# 4 P S b_copy + 2 (P-1) (a_intra + S b_intra) + (N-1) (a_inter + P P S/W b_inter)
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


# Two-dimensional hierarchical (2DH, Tutel): inside nodes, then between them:
#
#     4 S b_copy + (P-1) (a_intra + S/P b_intra) + s (N-1) (a_inter + S P/W b_inter)
#
# A rank that shares its node with m - 1 others has ceil(q / m) messages for a node of q.
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
