"""Closed-form cost models that predict messages, bytes and times of all-to-all algorithms.

In the formulas, there are N nodes of P ranks, so W = N P ranks, and each rank sends S bytes in W
equal pieces. The ranks of a node share `nics` network cards, so one card sends the messages of s =
P / min(nics, P) ranks. The module of each algorithm states its formula. The formula gives the time
per rank, or per network card if a card is slower, plus `phase_s` for each phase. The formulas of
`linear` and `2dh` are identical to those of the Tutel paper (m = P, n = W) if s = 1 and phase_s =
0. If nodes have different sizes, the busiest rank, network card or leader determines the time.

If one machine emulates the cluster, each phase also costs CPU time. This is `wake_s * k^(2/3)` for
each rank that sends and receives k messages, plus the costs in `host` for each message and byte of
all ranks. The exponent is empirical and reflects that messages that arrive together are handled
together. The network and the CPU work at the same time, so a phase takes `(wire^4 +
machine^4)^(1/4)`, which is close to the longer of the two times.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from moe_plugin.planner.all_to_all_cost.phases import DECLARED, Cost, CostModel
from moe_plugin.planner.cluster import Cluster
from moe_plugin.utils.messages import short

for module in iter_modules(__path__, f"{__name__}."):
    import_module(module.name)  # importing the module registers its cost model
# Sorted by the number of rounds. `comm.exchange` adds the models of other registered algorithms.
COSTS: dict[str, CostModel] = {name: model for name, (_, model) in sorted(
    DECLARED.items(), key=lambda item: item[1][0])}


def distinct(cluster: Cluster) -> tuple[str, ...]:
    """Return `linear` and every algorithm whose cost on the cluster differs from that of
    `linear`."""
    # the comparison holds for any exchange size, so an arbitrary one is used
    size = 2.0**20
    base = COSTS["linear"](cluster, size)
    return ("linear", *(name for name, cost in COSTS.items() if cost(cluster, size) != base))


def predict(cluster: Cluster, algorithm: str, size: float) -> Cost:
    """Return the predicted cost of one all-to-all of `size` bytes per rank.

    Raises:
        ValueError: If the algorithm has no cost model.
    """
    if algorithm not in COSTS:
        raise ValueError(
            f"there is no cost model for the all-to-all algorithm {short(algorithm)}. Choose from "
            f"{', '.join(COSTS)}")
    return COSTS[algorithm](cluster, size)


def predict_table(cluster: Cluster, ranks: Sequence[int],
                  sizes: Sequence[float]) -> list[dict[str, Any]]:
    """Return one JSON-serializable row per size, number of ranks and algorithm.

    Args:
        cluster: the cluster whose links are used, resized to each number of ranks.
        ranks: numbers of ranks.
        sizes: exchange sizes in bytes per rank.
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
