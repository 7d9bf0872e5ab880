"""Cost of an all-to-all: messages, bytes and seconds of each algorithm, in closed form.

N nodes of P ranks, W = N P; S bytes per rank in W equal pieces. A node's ranks share `nics` network
cards, so one card carries the messages of s = P / min(nics, P) ranks. Per rank, or per card where a
card is slower, an algorithm takes what its file here says, plus `phase_s` per phase. `linear` and
`2dh` are the formulas of the Tutel paper with m = P, n = W; for s = 1 and phase_s = 0 they are
identical. Of unequal nodes the busiest rank, card or leader counts.

Where one machine emulates the cluster, a phase also costs its CPU time: `wake_s` k^(2/3) for a rank
that sends and receives k messages (messages that arrive together are handled together; the exponent
is empirical), `host` for each message and byte of all ranks. Wire and CPU work at the same time, so
a phase takes (wire^4 + machine^4)^(1/4), close to the larger of the two.
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
    import_module(module.name)  # it declares its model
# by algorithm, those of fewer rounds first; others join where they are registered (`comm.exchange`)
COSTS: dict[str, CostModel] = {name: model for name, (_, model) in sorted(
    DECLARED.items(), key=lambda item: item[1][0])}


def distinct(cluster: Cluster) -> tuple[str, ...]:
    """The algorithms that are something else than `linear` on a cluster, after `linear` itself."""
    size = 2.0**20  # of any exchange
    base = COSTS["linear"](cluster, size)
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
