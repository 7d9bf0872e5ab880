"""Cost of an all-to-all: messages, bytes and seconds of each algorithm, in closed form.

N nodes of P ranks, W = N P; S bytes per rank in W equal pieces. A node's ranks share `nics` network
cards, so one card carries the messages of s = P / min(nics, P) ranks. Per rank, or per card where a
card is slower:

    linear   s (W-P) a_inter + (P-1) a_intra + max(s (W-P) S/W b_inter, (P-1) S/W b_intra)
    2dh      4 S b_copy + (P-1) (a_intra + S/P b_intra) + s (N-1) (a_inter + S P/W b_inter)
    leader   4 P S b_copy + 2 (P-1) (a_intra + S b_intra) + (N-1) (a_inter + P P S/W b_inter)

plus `phase_s` per phase. The first two are the formulas of the Tutel paper with m = P, n = W; for
s = 1 and phase_s = 0 they are identical. Of unequal nodes the busiest rank, card or leader counts;
with 2dh a rank that shares its node with m - 1 others has ceil(q / m) messages for a node of q.

Where one machine emulates the cluster, a phase also costs its CPU time: `wake_s` k^(2/3) for a rank
that sends and receives k messages (messages that arrive together are handled together; the exponent
is empirical), `host` for each message and byte of all ranks. Wire and CPU work at the same time, so
a phase takes (wire^4 + machine^4)^(1/4), close to the larger of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe_plugin.messages import short
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


def _cost(cluster: Cluster, node: tuple[int, float, int, float], phases: Sequence[Phase]) -> Cost:
    """node: (messages, bytes) out of, inside one node."""
    return Cost(sum(phase.seconds(cluster) for phase in phases), *node, phases=tuple(phases))


def _busiest(cluster: Cluster, of_rank: Callable[[int], float]) -> float:
    """What the busiest card carries. of_rank: what a rank sends, by the ranks of its node."""
    return max(size / min(cluster.nics, size) * of_rank(size) for size in cluster.sizes)


def _messages(cluster: Cluster, here: int) -> int:
    """Of 2DH between nodes, from one rank on a node of `here` ranks."""
    return sum(-(-there // here) * nodes for there, nodes in cluster.sizes.items()) - 1


def linear_cost(cluster: Cluster, size: float) -> Cost:
    """Every rank to every rank directly; `size` bytes per rank."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    inter, intra = w - p, p - 1
    card = _busiest(cluster, lambda here: w - here)
    node = (p * inter, p * inter * size / w, p * intra, p * intra * size / w)
    phase = Phase((card, card * size / w), (intra, intra * size / w),
                  (w * (w - 1)**WAKES, w * (w - 1), (w - 1) * size), parallel_links=n > 1)
    return _cost(cluster, node, [phase] if w > 1 else [])


def two_d_cost(cluster: Cluster, size: float) -> Cost:
    """Two-dimensional hierarchical; `linear` on one node, or with one rank per node."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    if n == 1 or p == 1:
        return linear_cost(cluster, size)
    node = (p * (n - 1), p * (n - 1) * size * p / w, p * (p - 1), (p - 1) * size)
    inside = Phase((0, 0), (p - 1, (p - 1) * size / p),
                   (w * (p - 1)**WAKES, w * (p - 1), n * node[3]), 2 * size)
    card = (_busiest(cluster, partial(_messages, cluster)),
            _busiest(cluster, lambda here: _messages(cluster, here) * size * here / w))
    between = Phase(card, (0, 0),
                    (w * (n - 1)**WAKES, w * (n - 1), n * node[1]), 2 * size)
    return _cost(cluster, node, [inside, between])


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
    return _cost(cluster, node, [inside, between, inside])


CostModel = Callable[[Cluster, float], Cost]  # of one exchange of so many bytes per rank
# by algorithm; others join where they are registered (`comm.exchange`)
COSTS: dict[str, CostModel] = {
    "linear": linear_cost, "2dh": two_d_cost, "leader": leader_cost
}


def distinct(cluster: Cluster) -> tuple[str, ...]:
    """The algorithms that are something else than `linear` on a cluster, after `linear` itself."""
    size = 2.0**20  # of any exchange
    base = linear_cost(cluster, size)
    return ("linear", *(name for name, cost in COSTS.items() if cost(cluster, size) != base))


def predict(cluster: Cluster, algorithm: str, size: float) -> Cost:
    """Cost of one exchange of `size` bytes per rank; `ValueError` for an unknown algorithm."""
    if algorithm not in COSTS:
        raise ValueError(
            f"no cost model for all-to-all {short(algorithm)}; known: {', '.join(COSTS)}")
    return COSTS[algorithm](cluster, size)


def predict_table(cluster: Cluster, ranks: Sequence[int],
                  sizes: Sequence[float]) -> list[dict[str, Any]]:
    """A row per size, number of ranks and algorithm, ready for JSON. sizes: bytes per rank."""
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
