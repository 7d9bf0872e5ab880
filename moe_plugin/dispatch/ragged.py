"""Ragged dispatch: exactly the rows that were routed, no padding; sizes are exchanged before data.

The host waits for the device once, for the counts, before any row leaves; in backward never. With a
planner, other ranks than the owner may compute an expert's rows, see `dispatch.spill`.
"""

from __future__ import annotations

import torch

from moe_plugin.dispatch.base import DispatchTraits, dispatchers, expand
from moe_plugin.dispatch.cuts import CUTS
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.pieces import ExchangePlan, ragged_plan
from moe_plugin.dispatch.rows import sort_by_expert
from moe_plugin.dispatch.spill import Planner, spilling_plan
from moe_plugin.kernels.expert_load import known_load
from moe_plugin.records import KeptRouting, Overlap, Placement


@dispatchers.register("ragged")
class RaggedDispatcher(ExchangeDispatcher):
    """Exact rows: expert-major sort, exchange of counts, uneven all-to-all (FastMoE, MegaBlocks).

    Args:
        placement, overlap: see `Dispatcher`.
        planner: says who computes what, the same on all ranks; None: owners do.
    """

    traits = DispatchTraits(cuts=True, cuts_by=tuple(CUTS), spills=True)

    def __init__(self, placement: Placement, overlap: Overlap = Overlap(),
                 planner: Planner | None = None) -> None:
        super().__init__(placement, overlap)
        self.planner = planner

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. Rows of borrowed experts lie apart."""
        return self.planner is None

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. One exchange of counts, and one copy of them from device to host."""
        place = self.placement
        if self.planner is not None:
            return spilling_plan(kept, place, self.overlap, self.planner)
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        known = known_load(kept.routing) if place.shards == 1 else ()
        order_N, send_V = sort_by_expert(ids_TK, place.virtual, *known)
        recv_V = place.comm.all_to_all(send_V)
        counts_2V = torch.stack([send_V, recv_V]).view(2, place.comm.size, place.local)
        send_WL, recv_WL = counts_2V.tolist()
        return ragged_plan(order_N, send_WL, recv_WL, ids_TK, weights_TK, place, self.overlap)
