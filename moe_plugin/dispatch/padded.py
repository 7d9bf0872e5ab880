"""Padded dispatch: C slots per expert and source rank; even all-to-all.

The host waits for no device: all sizes follow from the capacity (`routing.capacity`), which may
have cost a wait itself. See docs/synchronization.md.

Parm's schedule S2: N ranks hold the same tokens, route all of them and share out the slots. Each
sends 1/N of every expert's slots through the all-to-all, to all shards of the expert at once; the
rows that come back are gathered over the N ranks, then weighted and summed. (Schedule S1 splits the
tokens before they are routed, with any other dispatcher; see `dispatch.token_entry`.) Source: Pan
et al. 2024 (Parm); k f T D elements gathered.
"""

from __future__ import annotations

from torch import Tensor

from moe_plugin.comm.functional import gather, split
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
        return padded_plan(self.placement, ids_TK, weights_TK, slots_TK, capacity, self.pieces,
                           self.sharers)


@dispatchers.register("parm_s2")
class ParmS2Dispatcher(PaddedDispatcher):
    """Parm S2: fixed slots, shared after the gate by `parallel.replicas` ranks with the same
    tokens.
    """

    traits = DispatchTraits(fixed_slots=True, splits_slots=True, supports_pieces=True)

    @property
    def sharers(self) -> int:
        return self.placement.replicas.size if self.placement.replicas is not None else 1

    def own_part(self, rows_ND: Tensor) -> Tensor:
        """This replica's part of every expert's slots."""
        replicas = self.placement.replicas
        return rows_ND if replicas is None else split(rows_ND, replicas)

    def all_parts(self, rows_ND: Tensor) -> Tensor:
        """All replicas' parts; what is summed from them is equal on all ranks with these tokens."""
        replicas = self.placement.replicas
        return rows_ND if replicas is None else gather(rows_ND, replicas)
