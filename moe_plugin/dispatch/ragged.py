"""Ragged dispatch: exactly the rows that were routed, no padding; sizes are exchanged before data.

The host waits for the device once, for the counts, before any row leaves; in backward never. With a
planner, other ranks than the owner may compute an expert's rows, see `dispatch.spill`.
"""

from __future__ import annotations

from moe_plugin.dispatch.base import DispatchContext, DispatchTraits, dispatchers, expand
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.piece_axes import PIECE_AXES
from moe_plugin.dispatch.pieces import ExchangePlan, ragged_plan
from moe_plugin.dispatch.sizes import SentSizes, agreed_sizes, start_sizes
from moe_plugin.dispatch.spill import spilling_plan
from moe_plugin.records import KeptRouting, Routing


@dispatchers.register("ragged")
class RaggedDispatcher(ExchangeDispatcher):
    """Exact rows: expert-major sort, exchange of counts, uneven all-to-all (FastMoE, MegaBlocks).
    """

    traits = DispatchTraits(supports_pieces=True, piece_axes=tuple(PIECE_AXES), spills=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.planner = context.spill_planner

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. Rows of borrowed experts lie apart."""
        return self.planner is None

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. One exchange of counts, and one copy of them from device to host."""
        place = self.placement
        if self.planner is not None:
            return spilling_plan(kept, place, self.overlap, self.planner)
        sizes = kept.routing.sizes
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        if sizes is None or sizes.owner is not self or kept.capacity is not None:
            sizes = agreed_sizes(self, place, ids_TK, kept.routing)
        return ragged_plan(sizes.order_N, *sizes.rows(), ids_TK, weights_TK, place, self.overlap)

    def start_sizes(self, routing: Routing) -> SentSizes | None:
        """See `Dispatcher`."""
        if self.planner is not None:
            return None
        ids_TK, _ = expand(self.placement, routing, None)
        return start_sizes(self, self.placement, ids_TK, routing)
