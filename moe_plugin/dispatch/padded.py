"""Padded dispatch: C slots per expert and source rank; even all-to-all.

The host waits for no device: all sizes follow from the capacity (`routing.capacity`), which may
have cost a wait itself. See docs/synchronization.md.
"""

from __future__ import annotations

from moe_plugin.dispatch.base import (
    DispatchTraits,
    dispatchers,
    expand,
    expand_slots,
    fixed_slots,
)
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.pieces import ExchangePlan, padded_plan
from moe_plugin.records import KeptRouting


@dispatchers.register("padded")
class PaddedDispatcher(ExchangeDispatcher):
    """Fixed slots with Tutel's flexible layout: [E, C, D] becomes [L, W*C, D], full-height matmuls.
    """

    traits = DispatchTraits(fixed_slots=True, supports_pieces=True)

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. Needs slots and a capacity; empty slots are rows of zeros."""
        slots_TK, capacity = fixed_slots(kept)
        ids_TK, weights_TK = expand(self.placement, kept.routing, slots_TK)
        slots_TK, capacity = expand_slots(self.placement, slots_TK, capacity)
        return padded_plan(self.placement, ids_TK, weights_TK, slots_TK, capacity, self.pieces)
