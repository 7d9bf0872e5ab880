"""The `bounded` dispatcher, which sends only real rows, in buffers of a fixed length.

Every rank sends a buffer of P rows (`RowsLimit.slots`) to every rank. A buffer contains the real
rows first, followed by rows of zeros. Each buffer is accompanied by the number of rows for each
expert. Kernels read the row counts on the device. The host therefore never waits, and a CUDA graph
can capture a call. If a rank has more than P rows for another rank, all ranks detect this from the
counts. After an overflow, all outputs of the call are NaN, and
`moe_plugin.dispatch.rows_limit.overflowed` reports the overflow at the end of the step.
Megatron-core and torchtitan offer a similar mode. The modes of Megatron-core and torchtitan limit
the number of rows that a rank receives, and write directly into the memory of other ranks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import DispatchContext, DispatchTraits, dispatchers, expand
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.pieces import ExchangePlan, Piece, count_rows, slot_positions
from moe_plugin.dispatch.rows import inverse_permutation
from moe_plugin.kernels import combine_rows, gather_rows
from moe_plugin.kernels.choices import running_count, slot_sources
from moe_plugin.records import DeviceCounts, KeptRouting


@dispatchers.register("bounded")
class BoundedDispatcher(ExchangeDispatcher[ExchangePlan]):
    """A dispatcher with buffers of a fixed length, so that the host never waits for the device."""

    traits = DispatchTraits(supports_pieces=True, bounded=True, sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        assert context.limit is not None
        self.limit = context.limit

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. False if rows are stored in pages, that is, without padding."""
        return not self.limit.stashes

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. The plan requires one exchange of row counts, in which all ranks send
        the same number of elements. The host does not read any value from the device.
        """
        place, comm = self.placement, self.placement.comm
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        slots, _ = self.limit.slots(kept.routing.ids_TK, place)
        slot_TK, count_WL = _slots_by_rank(place, ids_TK)
        most = count_WL.sum(1).amax() * says_load(ids_TK, weights_TK)
        most_W1 = most.expand(comm.size)[:, None]
        fits_WL = _fitting(count_WL, slots)
        # the largest number of rows travels with the counts, so that no all-reduce is needed
        header_WM = comm.all_to_all(torch.cat([fits_WL, most_W1], dim=1))
        recv_WL = header_WM[:, :-1]
        over = self.limit.record(header_WM[:, -1].amax(), slots)
        # If some rows did not fit, all results must be NaN, so that they cannot be used by mistake.
        # Choices without a slot share a row with other choices, so they become NaN, too.
        weights_TK = weights_TK * weights_TK.new_ones(()).masked_fill(over, torch.nan)
        rank_TK = torch.div(ids_TK, place.local, rounding_mode="floor")
        slot_TK = slot_TK.clamp(max=slots - 1)
        number = min(self.pieces, slots)  # no piece may be empty
        starts = [slots * c // number for c in range(number + 1)]
        position_TK = slot_positions(rank_TK, slot_TK, comm.size, starts)
        pieces = tuple(_piece(recv_WL, first, end) for first, end in pairwise(starts))
        plan = ExchangePlan(recv_WL.sum(), slot_sources(position_TK, comm.size * slots),
                            position_TK, weights_TK, pieces, True)
        count_rows(plan, place)
        return plan

    def weigh(self, rows_ND: Tensor, plan: ExchangePlan) -> Tensor:
        """See `ExchangeDispatcher`.

        The rows are needed to compute the gradients of the gate weights. If rows are stored in
        pages, only the real rows are stored.
        """
        choices = plan.position_TK.numel()
        if not self.limit.stashes or rows_ND.shape[0] <= choices:
            return super().weigh(rows_ND, plan)
        rows_CD = gather_rows(rows_ND, plan.position_TK.reshape(-1), plan.source_N[:, None])
        choice_TK = torch.arange(choices, device=rows_ND.device).view(plan.position_TK.shape)
        choice_TK = torch.where(plan.position_TK >= 0, choice_TK, -1)
        return combine_rows(rows_CD, plan.weights_TK, choice_TK.view(-1), choice_TK)


def says_load(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return a bool scalar on the device, True if the routing represents the experts' actual load.

    If an earlier layer had more rows than its limit allows, all values are NaN. Routing based on
    NaN tokens must not change the limit. The function returns True if at least one weight is
    finite, because ignoring such a call could lose tokens without an error.
    """
    return (weights_TK.isfinite() & (ids_TK >= 0)).any()


def _slots_by_rank(place: Placement, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slot of each routing choice and the row counts.

    The rows for each rank are ordered by expert. The slot, int64 [T, K*r], is the index of a
    routing choice among the rows for its rank. The row counts, int64 [W, L], are indexed by rank
    and local expert.
    """
    number_N, count_V = running_count(ids_TK.reshape(-1), place.virtual)
    count_WL = count_V.view(place.comm.size, place.local)
    before_V = (count_WL.cumsum(1) - count_WL).view(-1)
    return before_V[ids_TK.clamp(min=0)] + number_N.view(ids_TK.shape), count_WL


def _fitting(count_WL: Tensor, slots: int) -> Tensor:
    """For each rank and expert, count the expert's rows among the first `slots` rows."""
    end_WL = count_WL.cumsum(1).clamp(max=slots)
    return end_WL.diff(dim=1, prepend=end_WL.new_zeros(end_WL.shape[0], 1))


def _piece(recv_WL: Tensor, first: int, end: int) -> Piece:
    """Return the piece that contains the slots from `first` (inclusive) to `end` (exclusive) of the
    rows from every rank.

    Args:
        recv_WL: int64, number of real rows from each rank for each local expert. The rows from a
            rank are ordered by expert and followed by padding.
        first: first slot of the piece.
        end: slot after the last slot of the piece.
    """
    ranks, experts = recv_WL.shape
    slots = end - first
    stop_WL = recv_WL.cumsum(1)
    # padding is treated as one more expert
    stop_WG = torch.cat([stop_WL.clamp(first, end), stop_WL.new_full((ranks, 1), end)], dim=1)
    start_WG = torch.cat([stop_WL.new_full((ranks, 1), first), stop_WG[:, :-1]], dim=1)
    count_WG = stop_WG - start_WG
    count_G = count_WG.sum(0)
    # Number that is added to a slot to get its row in expert-major order: the rows of earlier
    # groups, plus those of earlier ranks in the same group, minus the first slot of the group.
    shift_WG = count_WG.cumsum(0) - count_WG + (count_G.cumsum(0) - count_G) - start_WG
    slot_WS = torch.arange(first, end, device=recv_WL.device).expand(ranks, slots).contiguous()
    group_WS = torch.searchsorted(stop_WG, slot_WS, right=True)
    inverse_R = (shift_WG.gather(1, group_WS) + slot_WS).view(-1)
    counts = DeviceCounts(count_G[:experts], ranks * slots)
    by_rank = [slots] * ranks
    return Piece(by_rank, by_rank, counts, inverse_permutation(inverse_R), inverse_R)
