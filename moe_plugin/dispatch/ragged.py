"""Ragged dispatch: exactly the rows that were routed, no padding; sizes are exchanged before data.

The host waits for the device once, for the counts, before any row leaves; in backward never. The
exchange of counts may begin as soon as choices are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_plugin.comm.functional import gather, split
from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import (
    DispatchContext,
    DispatchTraits,
    dispatchers,
    expand,
    expand_slots,
    fixed_slots,
)
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.pieces import (
    PIECE_AXES,
    ExchangePlan,
    count_rows,
    padded_plan,
    ragged_plan,
)
from moe_plugin.dispatch.rows import known_load, sort_by_expert
from moe_plugin.dispatch.spill import spilling_plan
from moe_plugin.records import KeptRouting, Routing
from moe_plugin.utils.machine import start_to_host


# Padded dispatch: C slots per expert and source rank; even all-to-all.
#
# The host waits for no device: all sizes follow from the capacity (`routing.capacity`), which may
# have cost a wait itself. See docs/synchronization.md.
#
# Parm's schedule S2: N ranks hold the same tokens, route all of them and share out the slots. Each
# sends 1/N of every expert's slots through the all-to-all, to all shards of the expert at once; the
# rows that come back are gathered over the N ranks, then weighted and summed. (Schedule S1 splits
# the
# tokens before they are routed, with any other dispatcher; see `dispatch.token_entry`.) Source: Pan
# et al. 2024 (Parm); k f T D elements gathered.
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


@dataclass(eq=False)
class SentSizes:
    """The numbers of rows of one call, on their way.

    Attributes:
        owner: the dispatcher that began it; of one with another placement they are of no use.
        order_N: the choices by expert, see `sort_by_expert`.
        most_tokens: the tokens of the rank with most; `rows` sets it, where they were sent.
    """

    owner: object
    order_N: Tensor
    _shape: tuple[int, int, int]
    _arriving: Callable[[], Tensor]
    _local: int
    _rows: list[list[list[int]]] | None = field(default=None)
    most_tokens: int | None = None

    def rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Rows to and from each rank, by the receiver's local expert. The host waits for their copy
        from the device, and for no work that was launched later.
        """
        if self._rows is None:
            found = self._arriving().view(self._shape).tolist()
            if self._shape[2] > self._local:
                self.most_tokens = max(row.pop() for side in found for row in side)
            self._rows = found
        send_WL, recv_WL = self._rows
        return send_WL, recv_WL


def agreed_sizes(owner: object, place: Placement, ids_TK: Tensor, routing: Routing) -> SentSizes:
    """Exchange the numbers of rows of a call; see `start_sizes`."""
    order_N, send_V = _sorted(place, ids_TK, routing)
    both_2V = torch.stack([send_V, place.comm.all_to_all(send_V)])
    return SentSizes(owner, order_N, (2, place.comm.size, place.local), lambda: both_2V,
                     place.local)


def start_sizes(owner: object, place: Placement, ids_TK: Tensor, routing: Routing,
                tokens: bool = False) -> SentSizes:
    """Begin to exchange the numbers of rows of a call. All ranks begin theirs in the same order.

    Args:
        owner: the dispatcher.
        ids_TK: over shards of experts, see `dispatch.base.expand`.
        routing: that they are of.
        tokens: each rank's number of tokens travels along; see `SentSizes.most_tokens`.
    """
    order_N, send_V = _sorted(place, ids_TK, routing)
    if tokens:
        each_WL = send_V.view(place.comm.size, place.local)
        own_W1 = each_WL.new_full((place.comm.size, 1), ids_TK.shape[0])
        send_V = torch.cat([each_WL, own_W1], 1).flatten()
    wait = place.comm.start_all_to_all(send_V)
    if send_V.device.type == "cpu":  # ranks meet while this one computes
        def arriving() -> Tensor:
            return torch.stack([send_V, wait()])
    else:  # the exchange is in the device's queue, and so is the copy behind it
        arriving = start_to_host(torch.stack([send_V, wait()]))
    shape = 2, place.comm.size, place.local + tokens
    return SentSizes(owner, order_N, shape, arriving, place.local)


def _sorted(place: Placement, ids_TK: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    known = known_load(routing) if place.shards == 1 else ()
    return sort_by_expert(ids_TK, place.virtual, *known)


@dispatchers.register("ragged")
class RaggedDispatcher(ExchangeDispatcher):
    """Exact rows: expert-major sort, exchange of counts, uneven all-to-all (FastMoE, MegaBlocks).
    """

    traits = DispatchTraits(supports_pieces=True, piece_axes=tuple(PIECE_AXES), spills=True,
                            sends_once=True)

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
        plan = ragged_plan(sizes.order_N, *sizes.rows(), ids_TK, weights_TK, place, self.overlap)
        count_rows(plan, place)
        return plan

    def start_sizes(self, routing: Routing, tokens: bool = False) -> SentSizes | None:
        if self.planner is not None:
            return None
        ids_TK, _ = expand(self.placement, routing, None)
        return start_sizes(self, self.placement, ids_TK, routing, tokens)
