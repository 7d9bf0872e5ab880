"""Bounded dispatch: exact rows in buffers of a fixed length, whose counts stay on the device.

Every rank sends every rank the same number P of rows (`RowsLimit.slots`), its own first and zeros
after them, and with them how many each expert gets. Kernels take the counts from the device, so the
host waits for nothing, and a call can be captured in a graph. If a rank has more than P rows for
another, all ranks learn it with the counts: the outputs of that call are NaN, and
`overflow.overflowed` reports it when the step asks. Megatron-core and torchtitan have the same
with one bound on what a rank receives, over an exchange that writes into its peers' memory.
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
class BoundedDispatcher(ExchangeDispatcher):
    """Exact rows like `ragged`, padded to a bound on the way; the host reads nothing."""

    traits = DispatchTraits(supports_pieces=True, bounded=True, sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.limit = context.limit

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. Pages take rows without the filler behind the experts'."""
        return not self.limit.stashes

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`. One even exchange of counts; nothing is read on the host."""
        place, comm = self.placement, self.placement.comm
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        slots, _ = self.limit.slots(kept.routing.ids_TK, place)
        slot_TK, count_WL = _slots_by_rank(place, ids_TK)
        most = count_WL.sum(1).amax() * says_load(ids_TK, weights_TK)
        most_W1 = most.expand(comm.size)[:, None]
        fits_WL = _fitting(count_WL, slots)
        header_WM = comm.all_to_all(torch.cat([fits_WL, most_W1], dim=1))
        recv_WL = header_WM[:, :-1]
        over = self.limit.record(header_WM[:, -1].amax(), slots)
        # nothing computed without the rows that did not fit may pass for a result; their choices
        # share a row with others, so that they count, too
        weights_TK = weights_TK * weights_TK.new_ones(()).masked_fill(over, torch.nan)
        rank_TK = torch.div(ids_TK, place.local, rounding_mode="floor")
        slot_TK = slot_TK.clamp(max=slots - 1)
        number = min(self.pieces, slots)
        starts = [slots * c // number for c in range(number + 1)]
        position_TK = slot_positions(rank_TK, slot_TK, comm.size, starts)
        pieces = tuple(_piece(recv_WL, first, end) for first, end in pairwise(starts))
        plan = ExchangePlan(recv_WL.sum(), slot_sources(position_TK, comm.size * slots),
                            position_TK, weights_TK, pieces, True)
        count_rows(plan, place)
        return plan

    def weigh(self, rows_ND: Tensor, plan: ExchangePlan) -> Tensor:
        """See `ExchangeDispatcher`. For the gates' gradient rows are kept: without filler."""
        choices = plan.position_TK.numel()
        if not self.limit.stashes or rows_ND.shape[0] <= choices:
            return super().weigh(rows_ND, plan)
        rows_CD = gather_rows(rows_ND, plan.position_TK.reshape(-1), plan.source_N[:, None])
        choice_TK = torch.arange(choices, device=rows_ND.device).view(plan.position_TK.shape)
        choice_TK = torch.where(plan.position_TK >= 0, choice_TK, -1)
        return combine_rows(rows_CD, plan.weights_TK, choice_TK.view(-1), choice_TK)


def says_load(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Whether a routing counts, a bool scalar: an earlier layer whose rows did not fit leaves
    nothing but NaN, whose routing says nothing of the load. With a single finite weight the rows
    are counted, since tokens would be lost.
    """
    return (weights_TK.isfinite() & (ids_TK >= 0)).any()


def _slots_by_rank(place: Placement, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(place of each choice among the rows for its rank, which lie expert after expert, int64
    [T, K*r]; rows by rank and its local expert, int64 [W, L]).
    """
    number_N, count_V = running_count(ids_TK.reshape(-1), place.virtual)
    count_WL = count_V.view(place.comm.size, place.local)
    before_V = (count_WL.cumsum(1) - count_WL).view(-1)
    return before_V[ids_TK.clamp(min=0)] + number_N.view(ids_TK.shape), count_WL


def _fitting(count_WL: Tensor, slots: int) -> Tensor:
    """Of rows by (rank, expert), those among the first `slots` of each rank."""
    end_WL = count_WL.cumsum(1).clamp(max=slots)
    return end_WL.diff(dim=1, prepend=end_WL.new_zeros(end_WL.shape[0], 1))


def _piece(recv_WL: Tensor, first: int, end: int) -> Piece:
    """Slots `first` to `end` of every rank's rows: experts' rows first, then what is filler.

    recv_WL: int64, real rows from every rank for every local expert; a rank's rows lie expert
    after expert, filler behind them.
    """
    ranks, experts = recv_WL.shape
    slots = end - first
    stop_WL = recv_WL.cumsum(1)
    # filler as one more expert; what is in this piece of each rank and expert
    stop_WG = torch.cat([stop_WL.clamp(first, end), stop_WL.new_full((ranks, 1), end)], dim=1)
    start_WG = torch.cat([stop_WL.new_full((ranks, 1), first), stop_WG[:, :-1]], dim=1)
    count_WG = stop_WG - start_WG
    count_G = count_WG.sum(0)
    shift_WG = count_WG.cumsum(0) - count_WG + (count_G.cumsum(0) - count_G) - start_WG
    slot_WS = torch.arange(first, end, device=recv_WL.device).expand(ranks, slots).contiguous()
    group_WS = torch.searchsorted(stop_WG, slot_WS, right=True)
    inverse_R = (shift_WG.gather(1, group_WS) + slot_WS).view(-1)
    counts = DeviceCounts(count_G[:experts], ranks * slots)
    by_rank = [slots] * ranks
    return Piece(by_rank, by_rank, counts, inverse_permutation(inverse_R), inverse_R)
