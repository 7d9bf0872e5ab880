"""Statistics of one call, from what its steps know."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_plugin.comm.counters import TrafficMeter
from moe_plugin.kernels.expert_load import expert_load, known_load
from moe_plugin.output import LayerStats
from moe_plugin.records import KeptRouting


def call_stats(kept: KeptRouting, traffic: TrafficMeter, experts: int, rows: int | Tensor,
               layout: dict[str, Any]) -> LayerStats:
    """`LayerStats` of a call.

    Args:
        kept: its routing. traffic: what this rank sent. experts: E.
        rows: see `DispatchPlan`. layout: fields that the layout knows.
    """
    routing, after = kept.before, kept.routing
    load_KE = known_load(routing)[0]
    if load_KE is None:
        load_KE = expert_load(routing.ids_TK, experts, per_choice=True)
    kept_KE = load_KE
    if after is not routing:
        kept_KE = expert_load(after.ids_TK, experts, per_choice=True)
    chosen_KE = None
    if routing.chosen_TK is not None:
        chosen_KE = expert_load(routing.chosen_TK, experts, per_choice=True)
    losses = dict(zip(routing.losses, map(Tensor.detach, routing.losses.values()), strict=True))
    bytes_sent, exchanges = traffic.sent()
    return LayerStats(load_KE, kept_KE, routing.entropy, routing.tokens, losses,
                      bytes_sent=bytes_sent, exchanges=exchanges, rows=rows,
                      capacity=kept.capacity, router=routing.router,
                      chosen_KE=chosen_KE, **layout)
