"""The `ragged`, `padded` and `parm_s2` dispatchers.

`ragged` sends exactly the routed rows, without padding. The ranks exchange row counts before they
exchange rows. The host waits for the row counts once per call, and does not wait in the backward
pass. The exchange of row counts can start as soon as the router's choices are known.

`padded` sends C slots per expert and source rank in an all-to-all with equal splits. The host does
not wait, because the capacity (`routing.capacity`) determines all sizes. Computing the capacity may
itself make the host wait (docs/synchronization.md).

`parm_s2` implements Parm's schedule S2. N ranks have the same tokens, route all of them, and divide
the slots among themselves. Each rank sends 1/N of the slots of every expert to all shards of the
expert. The returned rows are gathered over the N ranks, multiplied by the gate weights, and summed
per token. (Schedule S1 divides the tokens before the router and can be used with any other
dispatcher; see `dispatch.token_entry`.) Source: Pan et al. 2024 (Parm); k f T D elements are
gathered, where f is the capacity factor.
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


@dispatchers.register("padded")
class PaddedDispatcher(ExchangeDispatcher[ExchangePlan]):
    """A dispatcher with a fixed number of slots per expert. The exchange converts rows [E, C, D] to
    [L, W*C, D] (Tutel's flexible layout), so that each expert computes a single large matmul.
    """

    traits = DispatchTraits(fixed_slots=True, supports_pieces=True)

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. Empty slots are sent as rows of zeros."""
        slots_TK, capacity = fixed_slots(kept)
        ids_TK, weights_TK = expand(self.placement, kept.routing, slots_TK)
        slots_TK, capacity = expand_slots(self.placement, slots_TK, capacity)
        return padded_plan(self.placement, ids_TK, weights_TK, slots_TK, capacity, self.pieces,
                           self.sharers)


@dispatchers.register("parm_s2")
class ParmS2Dispatcher(PaddedDispatcher):
    """A dispatcher that divides fixed slots among ranks with the same tokens (Parm S2)."""

    traits = DispatchTraits(fixed_slots=True, splits_slots=True, supports_pieces=True)

    @property
    def sharers(self) -> int:
        return self.placement.replicas.size if self.placement.replicas is not None else 1

    def own_part(self, rows_ND: Tensor) -> Tensor:
        """Return the slots of every expert that this replica sends."""
        replicas = self.placement.replicas
        return rows_ND if replicas is None else split(rows_ND, replicas)

    def all_parts(self, rows_ND: Tensor) -> Tensor:
        """Gather the rows of all replicas, so that all replicas compute equal outputs."""
        replicas = self.placement.replicas
        return rows_ND if replicas is None else gather(rows_ND, replicas)


@dataclass(eq=False)
class SentSizes:
    """A pending exchange of the row counts of one call.

    Attributes:
        owner: dispatcher that started the exchange. Only a dispatcher with the same placement can
            use the row counts.
        order_N: int64 [N], the indices of the routing choices, sorted by expert (`sort_by_expert`).
        most_tokens: largest number of tokens on any rank. The `rows` method sets `most_tokens` if
            the exchange includes the numbers of tokens.
    """

    owner: object
    order_N: Tensor
    _shape: tuple[int, int, int]
    _arriving: Callable[[], Tensor]
    _local: int
    _rows: list[list[list[int]]] | None = field(default=None)
    most_tokens: int | None = None

    def rows(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the row counts to each rank and from each rank. Both lists are indexed by rank and
        by the receiver's local expert.

        The host waits for the row counts, but not for work launched after the exchange.
        """
        if self._rows is None:  # read once: `parallel.prefill` reads the numbers before the plan
            rows_by_side = self._arriving().view(self._shape).tolist()
            if self._shape[2] > self._local:
                self.most_tokens = max(row.pop() for side in rows_by_side for row in side)
            self._rows = rows_by_side
        send_WL, recv_WL = self._rows
        return send_WL, recv_WL


def agreed_sizes(owner: object, place: Placement, ids_TK: Tensor, routing: Routing) -> SentSizes:
    """Exchange the row counts of a call. See `start_sizes` for a description of the arguments."""
    order_N, send_V = _sorted(place, ids_TK, routing)
    # one tensor, so that the host reads both directions in one copy
    both_2V = torch.stack([send_V, place.comm.all_to_all(send_V)])
    return SentSizes(owner, order_N, (2, place.comm.size, place.local), lambda: both_2V,
                     place.local)


def start_sizes(owner: object, place: Placement, ids_TK: Tensor, routing: Routing,
                tokens: bool = False) -> SentSizes:
    """Start exchanging the row counts of a call.

    All ranks must start their exchanges in the same order.

    Args:
        owner: dispatcher of the call.
        place: the ranks that store each expert.
        ids_TK: int64, the chosen expert shards (`dispatch.base.expand`).
        routing: routing of the call.
        tokens: if True, the ranks also exchange their numbers of tokens (`SentSizes.most_tokens`).
    """
    order_N, send_V = _sorted(place, ids_TK, routing)
    if tokens:
        each_WL = send_V.view(place.comm.size, place.local)
        # as one more column of the table, so that the exchange stays a single one
        own_W1 = each_WL.new_full((place.comm.size, 1), ids_TK.shape[0])
        send_V = torch.cat([each_WL, own_W1], 1).flatten()
    wait = place.comm.start_all_to_all(send_V)
    if send_V.device.type == "cpu":  # the exchange runs while this rank computes
        def arriving() -> Tensor:
            return torch.stack([send_V, wait()])
    else:  # both the exchange and the copy to the host are queued on the device
        arriving = start_to_host(torch.stack([send_V, wait()]))
    shape = 2, place.comm.size, place.local + tokens
    return SentSizes(owner, order_N, shape, arriving, place.local)


def _sorted(place: Placement, ids_TK: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    load_KE, complete = known_load(routing) if place.shards == 1 else (None, False)
    return sort_by_expert(ids_TK, place.virtual, load_KE, complete)


@dispatchers.register("ragged")
class RaggedDispatcher(ExchangeDispatcher[ExchangePlan]):
    """A dispatcher that sends exactly the routed rows, sorted by expert, in an uneven all-to-all.
    Sources: FastMoE, MegaBlocks.
    """

    traits = DispatchTraits(supports_pieces=True, piece_axes=tuple(PIECE_AXES), spills=True,
                            sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.planner = context.spill_planner

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. False if the rows of borrowed experts are computed separately.
        """
        return self.planner is None

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. Requires one exchange of counts and one copy from device to host."""
        place = self.placement
        if self.planner is not None:
            return spilling_plan(kept, place, self.overlap, self.planner)
        sizes = kept.routing.sizes
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        # Numbers exchanged early count all choices, for one placement. They are useless if a
        # capacity has dropped choices, or if the call runs in another layout.
        if sizes is None or sizes.owner is not self or kept.capacity is not None:
            sizes = agreed_sizes(self, place, ids_TK, kept.routing)
        send_WL, recv_WL = sizes.rows()
        plan = ragged_plan(sizes.order_N, send_WL, recv_WL, ids_TK, weights_TK, place,
                           self.overlap)
        count_rows(plan, place)
        return plan

    def start_sizes(self, routing: Routing, tokens: bool = False) -> SentSizes | None:
        if self.planner is not None:
            return None
        ids_TK, _ = expand(self.placement, routing, None)
        return start_sizes(self, self.placement, ids_TK, routing, tokens)
