"""Closed-form cost models of all-to-all algorithms: messages, bytes and time.

In the formulas, a cluster has N nodes of P ranks each, and thus W = N P ranks. Each rank sends S
bytes, divided equally among W ranks. Each card sends the messages of s = P / min(nics, P) ranks,
because the ranks of a node share `nics` network cards. The comment above each cost model contains
its formula. A formula gives the time per rank or per network card, whichever is longer. Each phase
adds the constant `phase_s`. For s = 1 and phase_s = 0, the formulas of `linear` and `2dh` are
identical to those of the Tutel paper (m = P, n = W). If nodes have different sizes, the busiest
rank, network card or leader determines the predicted time.

If a single machine emulates the cluster, each phase also costs CPU time. The CPU time is
`wake_s * k^(2/3)` for each rank that sends and receives k messages, plus the costs in `host` for
every message and byte of all ranks. The exponent 2/3 was found empirically; it is less than 1
because messages that arrive together are handled together. The network and the CPU work at the same
time, so a phase takes `(wire^4 + machine^4)^(1/4)` seconds, which is close to the longer of the two
times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_plugin.planner.cluster import Cluster
from moe_plugin.utils.messages import short

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


# Every rank sends to every rank directly:
#
# s (W-P) a_inter + (P-1) a_intra + max(s (W-P) S/W b_inter, (P-1) S/W b_intra)
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


# By number of rounds of messages. `comm.exchange` adds the models of other registered algorithms.
COSTS: dict[str, CostModel] = {"linear": linear_cost, "2dh": two_d_cost, "leader": leader_cost}


def distinct(cluster: Cluster) -> tuple[str, ...]:
    """Return `linear` and all algorithms whose cost on the cluster differs from that of `linear`.
    """
    # the comparison holds for any exchange size, so an arbitrary one is used
    size = 2.0**20
    base = COSTS["linear"](cluster, size)
    return ("linear", *(name for name, cost in COSTS.items() if cost(cluster, size) != base))


def predict(cluster: Cluster, algorithm: str, size: float) -> Cost:
    """Predict the cost of an all-to-all in which each rank sends `size` bytes.

    Raises:
        ValueError: If there is no cost model for the algorithm.
    """
    if algorithm not in COSTS:
        raise ValueError(
            f"there is no cost model for the all-to-all algorithm {short(algorithm)}. Choose from "
            f"{', '.join(COSTS)}")
    return COSTS[algorithm](cluster, size)


def predict_table(cluster: Cluster, ranks: Sequence[int],
                  sizes: Sequence[float]) -> list[dict[str, Any]]:
    """Return one JSON-serializable row for each combination of size, number of ranks and algorithm.

    Args:
        cluster: the cluster that defines the links. The cluster is resized to each number of ranks.
        ranks: numbers of ranks to predict.
        sizes: exchange sizes to predict, in bytes per rank.
    """
    rows = []
    for size in sizes:
        for number in ranks:
            shape = cluster.with_ranks(number)
            for name in COSTS:
                cost = predict(shape, name, size)
                rows.append({
                    "ranks": number, "nodes": shape.nodes, "bytes": size, "algorithm": name,
                    "ms": 1e3 * cost.seconds, "messages": cost.inter_messages,
                    "inter_bytes": cost.inter_bytes
                })
    return rows
