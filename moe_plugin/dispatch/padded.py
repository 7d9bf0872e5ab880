"""Padded dispatch: C slots an expert and source rank; even all-to-all, no host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.functional import all_to_all
from moe_plugin.dispatch.base import dispatchers, expand, expand_slots
from moe_plugin.dispatch.pieces import PiecePlan, padded_pieces, slot_sources
from moe_plugin.dispatch.ragged import exact_rows
from moe_plugin.kernels import combine_rows, gather_rows
from moe_plugin.records import Placement, Routing, RowCounts, RowPlan

NO_CAPACITY = ("dispatch.name='padded' needs a capacity: set dispatch.capacity_factor (0 never "
               "drops)")


@dataclass(frozen=True)
class PaddedHandle:
    """What `combine` needs; slots: C. source_V, position_TK: see kernels.rows, over slots v*C + c
    of virtual experts v.
    """

    weights_TK: Tensor
    source_V: Tensor
    position_TK: Tensor
    slots: int


@dispatchers.register("padded")
class PaddedDispatcher:
    """Fixed slots with Tutel's flexible layout: [E, C, D] becomes [L, W*C, D], so GEMM rows do not
    shrink with W.
    """

    needs_capacity = True

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def dispatch(self, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
                 capacity: int | None, anchor: Tensor) -> tuple[Tensor, RowCounts, PaddedHandle]:
        """See `Dispatcher`. Needs slots and a capacity; empty slots are zero rows."""
        if slots_TK is None or capacity is None:
            raise ValueError(NO_CAPACITY)
        place = self.placement
        ids_TK, weights_TK = expand(place, routing, slots_TK)
        slots_TK, capacity = expand_slots(place, slots_TK, capacity)
        position_TK, source_V = _slots(ids_TK, slots_TK, capacity, place.virtual)
        rows_VD = gather_rows(x_TD, source_V, position_TK)
        rows_VD = all_to_all(rows_VD, place.comm, place.algorithm, anchor=anchor)
        size, local, width = place.comm.size, place.local, x_TD.shape[1]
        rows_RD = rows_VD.view(size, local, capacity, width).transpose(0, 1).reshape(-1, width)
        return rows_RD, RowCounts([size * capacity] * local), PaddedHandle(
            weights_TK, source_V, position_TK, capacity)

    def pieces(self, routing: Routing, slots_TK: Tensor | None, capacity: int | None,
               number: int) -> PiecePlan:
        """See `dispatch.pieces`: the capacity cut in `number` pieces."""
        if slots_TK is None or capacity is None:
            raise ValueError(NO_CAPACITY)
        ids_TK, weights_TK = expand(self.placement, routing, slots_TK)
        slots_TK, capacity = expand_slots(self.placement, slots_TK, capacity)
        return padded_pieces(self.placement, ids_TK, weights_TK, slots_TK, capacity, number)

    def plan(self, routing: Routing, slots_TK: Tensor | None,
             capacity: int | None) -> RowPlan | None:
        """See `Dispatcher`. On CPU the empty slots are left out: there the counts are on the host
        already.
        """
        experts = self.placement.experts
        if slots_TK is None or capacity is None or self.placement.comm.size > 1:
            return None
        if slots_TK.device.type == "cpu" and not torch.compiler.is_compiling():
            return exact_rows(routing.ids_TK, routing.weights_TK, experts)
        position_TK, source_R = _slots(routing.ids_TK, slots_TK, capacity, experts)
        return RowPlan(source_R, position_TK, routing.weights_TK, RowCounts([capacity] * experts))

    def combine(self, rows_RD: Tensor, handle: PaddedHandle, anchor: Tensor) -> Tensor:
        """See `Dispatcher`."""
        place = self.placement
        width = rows_RD.shape[1]
        rows_VD = rows_RD.view(place.local, place.comm.size, handle.slots,
                               width).transpose(0, 1).reshape(-1, width)
        rows_VD = all_to_all(rows_VD, place.comm, place.algorithm, anchor=anchor)
        return combine_rows(rows_VD, handle.weights_TK, handle.source_V, handle.position_TK)


def _slots(ids_TK: Tensor, slots_TK: Tensor, capacity: int, experts: int) -> tuple[Tensor, Tensor]:
    """(position of each choice, choice in each slot), slot c of expert e being e*C + c."""
    position_TK = torch.where(ids_TK >= 0, ids_TK * capacity + slots_TK, -1)
    return position_TK, slot_sources(position_TK, experts * capacity)
