"""Parm's schedule S2: ranks that hold the same tokens route all of them and share out the slots.

N ranks hold the same tokens. Each sends 1/N of every expert's slots through the all-to-all, to all
shards of the expert at once; the rows that come back are gathered over the N ranks, then weighted
and summed. (Schedule S1 splits the tokens before they are routed, with any other dispatcher; see
`dispatch.token_sharing`.) Source: Pan et al. 2024 (Parm); k f T D elements gathered.
"""

from __future__ import annotations

from torch import Tensor

from moe_plugin.comm.tensor_parallel import gather, split
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


@dispatchers.register("parm_s2")
class ParmS2Dispatcher(ExchangeDispatcher):
    """Parm S2: fixed slots, shared after the gate by `parallel.replicas` ranks with the same
    tokens.
    """

    traits = DispatchTraits(fixed_slots=True, splits_slots=True, supports_pieces=True)

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. Needs slots and a capacity."""
        slots_TK, capacity = fixed_slots(kept)
        place = self.placement
        ids_TK, weights_TK = expand(place, kept.routing, slots_TK)
        slots_TK, capacity = expand_slots(place, slots_TK, capacity)
        return padded_plan(place, ids_TK, weights_TK, slots_TK, capacity, self.pieces,
                           self.sharers)

    @property
    def sharers(self) -> int:
        """See `ExchangeDispatcher`."""
        return self.placement.replicas.size if self.placement.replicas is not None else 1

    def own_part(self, rows_ND: Tensor) -> Tensor:
        """This replica's part of every expert's slots."""
        replicas = self.placement.replicas
        return rows_ND if replicas is None else split(rows_ND, replicas)

    def all_parts(self, rows_ND: Tensor) -> Tensor:
        """All replicas' parts; what is summed from them is equal on all ranks with these tokens."""
        replicas = self.placement.replicas
        return rows_ND if replicas is None else gather(rows_ND, replicas)
