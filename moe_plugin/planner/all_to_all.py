"""What an all-to-all costs: messages, bytes and seconds of each algorithm, in closed form.

N nodes of P ranks, W = N P; S bytes a rank, cut in W equal pieces. A node's ranks share `nics` network cards, so that one
card carries the messages of s = P / min(nics, P) ranks. Per rank, or per card where a card is the slower of the two:

    linear   s (W-P) a_inter + (P-1) a_intra + max(s (W-P) S/W b_inter, (P-1) S/W b_intra)
    2dh      4 S b_copy + (P-1) (a_intra + S/P b_intra) + s (N-1) (a_inter + S P/W b_inter)
    leader   4 P S b_copy + 2 (P-1) (a_intra + S b_intra) + (N-1) (a_inter + P P S/W b_inter)

plus `phase_s` a phase, plus what every message costs the machine that emulates a cluster (`host`). The first two are the
forms of the Tutel paper's analysis with m = P, n = W; for s = 1, phase_s = 0 and no host cost they are exactly those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_plugin.planner.cluster import Cluster


@dataclass(frozen=True)
class Cost:
    """One exchange.

    seconds: predicted time. inter_messages, inter_bytes: leaving one node. intra_messages, intra_bytes: inside one node.
    features: the factors of each of the model's constants, in the order of `FEATURES`, where the two links do not overlap.
    """

    seconds: float
    inter_messages: int
    inter_bytes: float
    intra_messages: int
    intra_bytes: float
    features: tuple[float, ...]


FEATURES = ("inter.alpha_s", "inter.beta_s", "intra.alpha_s", "intra.beta_s", "phase_s", "host.alpha_s", "host.beta_s", "copy_s")


def _sharing(cluster: Cluster) -> float:
    return cluster.ranks_per_node / min(cluster.nics, cluster.ranks_per_node)


def _cost(cluster: Cluster, inter: tuple[float, float], intra: tuple[float, float], phases: int, copied: float,
          node: tuple[int, float, int, float], overlap: bool = False) -> Cost:
    """inter: (messages, bytes) of the busiest card; intra: of the busiest rank; node: (messages, bytes) out of, inside one node."""
    out_messages, out_bytes, in_messages, in_bytes = node
    host = (cluster.nodes * (out_messages + in_messages), cluster.nodes * (out_bytes + in_bytes))
    values = (*inter, *intra, phases, *host, copied)
    bandwidth = [inter[1] * cluster.inter.beta_s, intra[1] * cluster.intra.beta_s]
    seconds = (inter[0] * cluster.inter.alpha_s + intra[0] * cluster.intra.alpha_s + (max(bandwidth) if overlap else sum(bandwidth))
               + phases * cluster.phase_s + cluster.host.seconds(*host) + copied * cluster.copy_s)
    return Cost(seconds, *node, features=tuple(float(v) for v in values))


def linear_cost(cluster: Cluster, size: float) -> Cost:
    """Every rank to every rank directly; `size` bytes a rank."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    inter, intra = w - p, p - 1
    share = _sharing(cluster)
    node = (p * inter, p * inter * size / w, p * intra, p * intra * size / w)
    return _cost(cluster, (share * inter, share * inter * size / w), (intra, intra * size / w), 1 if w > 1 else 0, 0.0, node,
                 overlap=n > 1)


def two_d_cost(cluster: Cluster, size: float) -> Cost:
    """Two-dimensional hierarchical; `linear` on one node, or with one rank a node."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    if n == 1 or p == 1:
        return linear_cost(cluster, size)
    share = _sharing(cluster)
    node = (p * (n - 1), p * (n - 1) * size * p / w, p * (p - 1), (p - 1) * size)
    return _cost(cluster, (share * (n - 1), share * (n - 1) * size * p / w), (p - 1, (p - 1) * size / p), 2, 4 * size, node)


def leader_cost(cluster: Cluster, size: float) -> Cost:
    """Over one rank a node; `linear` on one node, or with one rank a node."""
    n, p, w = cluster.nodes, cluster.ranks_per_node, cluster.ranks
    if n == 1 or p == 1:
        return linear_cost(cluster, size)
    out = (n - 1) * p * p * size / w
    node = (n - 1, out, 2 * (p - 1), 2 * (p - 1) * size)
    return _cost(cluster, (n - 1, out), (2 * (p - 1), 2 * (p - 1) * size), 3, 4 * p * size, node)


COSTS: dict[str, Callable[[Cluster, float], Cost]] = {"linear": linear_cost, "2dh": two_d_cost, "leader": leader_cost}


def predict(cluster: Cluster, algorithm: str, size: float) -> Cost:
    """Cost of one exchange of `size` bytes a rank by `algorithm`; an unknown name is a `ValueError`."""
    if algorithm not in COSTS:
        raise ValueError(f"no cost model for all-to-all {algorithm!r}; known: {', '.join(COSTS)}")
    return COSTS[algorithm](cluster, size)


def best(cluster: Cluster, size: float) -> str:
    """The algorithm of least predicted time; `linear` where it is as good."""
    return min(COSTS, key=lambda name: COSTS[name](cluster, size).seconds)


def wire_floor_s(nodes: int, ranks_per_node: int, size: float, rate_bit_s: float, delay_s: float, mtu: int = 1500) -> float:
    """Seconds that the bytes of one exchange need at least on one node's link, TCP/IP and Ethernet framing included.

    Every node sends P S (N-1)/N bytes; a frame of `mtu` carries mtu - 52 of them and takes mtu + 38 on the wire.
    """
    if nodes == 1:
        return 0.0
    out = ranks_per_node * size * (nodes - 1) / nodes
    return out * (mtu + 38) / (mtu - 52) * 8 / rate_bit_s + delay_s
