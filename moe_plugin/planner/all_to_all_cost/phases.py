"""Phases of an all-to-all, and the registry of cost models.

Each algorithm's cost model is defined in a module of this package and is registered by the
decorator `declared`.
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
    """One phase of an exchange, during which ranks send messages simultaneously.

    Attributes:
        inter: numbers of messages and bytes that the busiest network card sends.
        intra: numbers of messages and bytes that the busiest rank sends to ranks of the same node.
        machine: sums over all ranks of three values: `k ** WAKES`, number of messages, and number
            of bytes. In `k ** WAKES`, k is the number of messages that a rank sends and receives.
        copied: number of bytes that memory copies read and write on the busiest rank.
        parallel_links: whether links within nodes and links between nodes transfer data at the same
            time.
    """

    inter: tuple[float, float]
    intra: tuple[float, float]
    machine: tuple[float, int, float]
    copied: float = 0.0
    parallel_links: bool = False

    def wire_s(self, cluster: Cluster) -> float:
        """Return the time in seconds during which the network links are busy."""
        bandwidth = self.inter[1] * cluster.inter.beta_s, self.intra[1] * cluster.intra.beta_s
        return self.inter[0] * cluster.inter.alpha_s + self.intra[0] * cluster.intra.alpha_s + (
            max(bandwidth) if self.parallel_links else sum(bandwidth))

    def seconds(self, cluster: Cluster) -> float:
        """Return the time of the phase in seconds, including memory copies and the fixed cost per
        phase.
        """
        return self.copied * cluster.copy_s + cluster.phase_s + overlapped_s(
            self.wire_s(cluster), cluster.machine_s(*self.machine))


def overlapped_s(wire: float, machine: float) -> float:
    """Return the total time in seconds of two activities that overlap but sometimes wait for each
    other.
    """
    less, more = sorted((wire, machine))
    return more * (1 + (less / more) ** SHARPNESS) ** (1 / SHARPNESS) if less else more


@dataclass(frozen=True)
class Cost:
    """Predicted cost of an all-to-all exchange.

    Attributes:
        seconds: predicted time.
        inter_messages, inter_bytes: numbers of messages and bytes that leave a node.
        intra_messages, intra_bytes: numbers of messages and bytes that are sent inside a node.
        phases: the phases of the exchange, in order.
    """

    seconds: float
    inter_messages: int
    inter_bytes: float
    intra_messages: int
    intra_bytes: float
    phases: tuple[Phase, ...]


def cost_of(cluster: Cluster, node: tuple[int, float, int, float], phases: Sequence[Phase]) -> Cost:
    """Return the cost of an exchange that consists of the given phases.

    Args:
        node: numbers of messages and bytes that leave a node, followed by the numbers of messages
            and bytes sent inside a node.
        phases: the phases of the exchange, in order.
    """
    return Cost(sum(phase.seconds(cluster) for phase in phases), *node, phases=tuple(phases))


def busiest(cluster: Cluster, of_rank: Callable[[int], float]) -> float:
    """Return the number of messages or bytes that the busiest network card sends.

    Args:
        cluster: the cluster on which the exchange runs.
        of_rank: function that returns the number of messages or bytes per rank, given the number of
            ranks in the node.
    """
    return max(size / min(cluster.nics, size) * of_rank(size) for size in cluster.sizes)


CostModel = Callable[[Cluster, float], Cost]  # arguments: cluster and bytes per rank
DECLARED: dict[str, tuple[int, CostModel]] = {}  # (rounds of messages, model) by algorithm


def declared(name: str, rounds: int) -> Callable[[CostModel], CostModel]:
    """Return a decorator that registers a function as the cost model of the algorithm `name`.

    Args:
        rounds: number of phases (rounds of messages) of the algorithm. `COSTS` is sorted by this
            number.
    """
    def add(model: CostModel) -> CostModel:
        DECLARED[name] = rounds, model
        return model

    return add


# Every rank sends to every rank directly:
#
# s (W-P) a_inter + (P-1) a_intra + max(s (W-P) S/W b_inter, (P-1) S/W b_intra)
@declared("linear", 1)
def linear_cost(cluster: Cluster, size: float) -> Cost:
    """Return the cost of an exchange in which every rank sends its `size` bytes directly to all
    other ranks.
    """
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    inter, intra = w - p, p - 1
    card = busiest(cluster, lambda here: w - here)
    node = (p * inter, p * inter * size / w, p * intra, p * intra * size / w)
    phase = Phase((card, card * size / w), (intra, intra * size / w),
                  (w * (w - 1)**WAKES, w * (w - 1), (w - 1) * size), parallel_links=n > 1)
    return cost_of(cluster, node, [phase] if w > 1 else [])


# Through one leader rank of each node (HetuMoE):
#
# 4 P S b_copy + 2 (P-1) (a_intra + S b_intra) + (N-1) (a_inter + P P S/W b_inter)
@declared("leader", 3)
def leader_cost(cluster: Cluster, size: float) -> Cost:
    """Return the cost of an exchange in which one leader rank per node sends the data of its node.

    On a single node, or with one rank per node, the cost equals that of `linear`.
    """
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    if n == 1 or p == 1:
        return linear_cost(cluster, size)
    out = max(size_of_node * (w - size_of_node) for size_of_node in cluster.sizes) * size / w
    node = (n - 1, out, 2 * (p - 1), 2 * (p - 1) * size)
    # `machine` counts both directions, so messages in one direction count half
    wakes = ((p - 1) / 2) ** WAKES + (p - 1) * 0.5**WAKES
    inside = Phase((0, 0), (p - 1, (p - 1) * size), (n * wakes, n * (p - 1), n * (p - 1) * size))
    between = Phase((n - 1, out), (0, 0), (n * (n - 1)**WAKES, n * (n - 1), n * out), 4 * p * size)
    return cost_of(cluster, node, [inside, between, inside])


# Two-dimensional hierarchical (2DH, Tutel), first inside nodes, then between nodes:
#
#     4 S b_copy + (P-1) (a_intra + S/P b_intra) + s (N-1) (a_inter + S P/W b_inter)
#
# A rank on a node of m ranks sends ceil(q / m) messages to a node of q ranks.
@declared("2dh", 2)
def two_d_cost(cluster: Cluster, size: float) -> Cost:
    """Return the cost of the two-dimensional hierarchical exchange.

    On a single node, or with one rank per node, the cost equals that of `linear`.
    """
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
    """Return the number of messages that a rank in a node of `here` ranks sends to other nodes in
    the 2DH algorithm.
    """
    return sum(-(-there // here) * nodes for there, nodes in cluster.sizes.items()) - 1
