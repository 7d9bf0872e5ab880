"""Parm's schedule S2: ranks that hold the same tokens route all of them, and share the slots
between them.

N ranks hold the same tokens. Each sends 1/N of every expert's slots through the all-to-all, to all
shards of the expert at once; the rows that come back are gathered over the N ranks and then weighed
and summed. (Schedule S1 splits the tokens before they are routed; it is `parallel.replicas` with
any other dispatcher.) Source: Pan et al. 2024 (Parm); k f T D elements gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_plugin.comm.functional import all_to_all
from moe_plugin.comm.regions import gather, split
from moe_plugin.dispatch.base import dispatchers, expand, expand_slots
from moe_plugin.dispatch.padded import NO_CAPACITY
from moe_plugin.dispatch.pieces import expert_major, slot_sources
from moe_plugin.kernels import combine_rows, gather_rows, permute_rows
from moe_plugin.records import Placement, Routing, RowCounts


@dataclass(frozen=True)
class ParmHandle:
    """What `combine` needs. source_V, position_TK: over slots (part of the capacity, expert, slot
    in the part); order_R, inverse_R: rows from source-rank-major to expert-major.
    """

    weights_TK: Tensor
    source_V: Tensor
    position_TK: Tensor
    order_R: Tensor | None
    inverse_R: Tensor | None


@dispatchers.register("parm_s2")
class SharedSlotsDispatcher:
    """Parm S2: for `parallel.replicas` ranks that hold the same tokens; fixed slots, shared between
    them after the gate.
    """

    same_tokens = False
    splits_slots = True
    needs_capacity = True

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def dispatch(self, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
                 capacity: int | None, anchor: Tensor) -> tuple[Tensor, RowCounts, ParmHandle]:
        """See `Dispatcher`. Needs slots and a capacity."""
        if slots_TK is None or capacity is None:
            raise ValueError(NO_CAPACITY.replace("padded", "parm_s2"))
        place, replicas = self.placement, self.placement.replicas
        parts = replicas.size if replicas is not None else 1
        ids_TK, weights_TK = expand(place, routing, slots_TK)
        slots_TK, capacity = expand_slots(place, slots_TK, capacity)
        part = -(-capacity // parts)
        position_TK = (slots_TK // max(1, part)) * (place.virtual *
                                                    part) + ids_TK * part + slots_TK % max(1, part)
        position_TK = position_TK.masked_fill(ids_TK < 0, -1)
        source_V = slot_sources(position_TK, parts * place.virtual * part)
        rows_VD = gather_rows(x_TD, source_V, position_TK)
        rows_VD = rows_VD if replicas is None else split(rows_VD, replicas)
        rows_RD = all_to_all(rows_VD, place.comm, place.algorithm, anchor=anchor)
        order_R, inverse_R = expert_major([[part] * place.local] * place.comm.size, x_TD.device)
        rows_RD = rows_RD if order_R is None else permute_rows(rows_RD, order_R, inverse_R)
        counts = RowCounts([place.comm.size * part] * place.local)
        return rows_RD, counts, ParmHandle(weights_TK, source_V, position_TK, order_R, inverse_R)

    def combine(self, rows_RD: Tensor, handle: ParmHandle, anchor: Tensor) -> Tensor:
        """See `Dispatcher`. y_TD is equal on all ranks that hold the same tokens."""
        place, replicas = self.placement, self.placement.replicas
        if handle.order_R is not None:
            rows_RD = permute_rows(rows_RD, handle.inverse_R, handle.order_R)
        rows_VD = all_to_all(rows_RD, place.comm, place.algorithm, anchor=anchor)
        rows_VD = rows_VD if replicas is None else gather(rows_VD, replicas)
        return combine_rows(rows_VD, handle.weights_TK, handle.source_V, handle.position_TK)
