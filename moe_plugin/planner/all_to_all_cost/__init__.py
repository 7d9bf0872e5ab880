"""Closed-form cost models that predict the number of messages, the number of bytes and the time of
all-to-all algorithms.

In the formulas, a cluster has N nodes of P ranks each, and thus W = N P ranks. Each rank sends S
bytes, divided equally among W ranks. Each card sends the messages of s = P / min(nics, P) ranks,
because the ranks of a node share `nics` network cards. The module of each algorithm contains its
formula. A formula gives the time per rank or per network card, whichever is longer. Each phase adds
the constant `phase_s`. For s = 1 and phase_s = 0, the formulas of `linear` and `2dh` are identical
to those of the Tutel paper (m = P, n = W). If nodes have different sizes, the busiest rank, network
card or leader determines the predicted time.

If a single machine emulates the cluster, each phase also costs CPU time. The CPU time is
`wake_s * k^(2/3)` for each rank that sends and receives k messages, plus the costs in `host` for
every message and byte of all ranks. The exponent 2/3 was found empirically; it is less than 1
because messages that arrive together are handled together. The network and the CPU work at the same
time, so a phase takes `(wire^4 + machine^4)^(1/4)` seconds, which is close to the longer of the two
times.
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
