"""Ragged dispatch: exactly the rows that were routed, no padding; sizes are exchanged before data.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.functional import all_to_all
from moe_plugin.dispatch.base import dispatchers, expand
from moe_plugin.dispatch.pieces import PiecePlan, expert_major, positions, ragged_pieces
from moe_plugin.kernels import combine_rows, expert_load, gather_rows, permute_rows
from moe_plugin.records import Placement, Routing, RowCounts, RowPlan


@dataclass(frozen=True)
class RaggedHandle:
    """What `combine` needs. source_N, position_TK: see kernels.rows; send, recv: rows by rank;
    order_R, inverse_R: the permutation from source-rank-major to expert-major rows (None where they
    are the same).
    """

    weights_TK: Tensor
    source_N: Tensor
    position_TK: Tensor
    send: list[int]
    recv: list[int]
    order_R: Tensor | None
    inverse_R: Tensor | None


@dispatchers.register("ragged")
class RaggedDispatcher:
    """Exact rows: expert-major sort, count exchange, uneven all-to-all (FastMoE, MegaBlocks). The
    dropless default.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def dispatch(self, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
                 capacity: int | None, anchor: Tensor) -> tuple[Tensor, RowCounts, RaggedHandle]:
        """See `Dispatcher`. One device-to-host copy, of the counts."""
        place = self.placement
        ids_TK, weights_TK = expand(place, routing, slots_TK)
        order_N, send_WL, recv_WL = self._plan(ids_TK)
        send, recv = [sum(row) for row in send_WL], [sum(row) for row in recv_WL]
        source_N = order_N[: sum(send)]
        position_TK = positions(source_N, ids_TK)
        rows_ND = gather_rows(x_TD, source_N, position_TK)
        rows_RD = all_to_all(rows_ND, place.comm, place.algorithm, send, recv, anchor)
        order_R, inverse_R = expert_major(recv_WL, x_TD.device)
        if order_R is not None:
            rows_RD = permute_rows(rows_RD, order_R, inverse_R)
        counts = RowCounts([sum(column) for column in zip(*recv_WL, strict=True)])
        return rows_RD, counts, RaggedHandle(weights_TK, source_N, position_TK, send, recv, order_R,
                                             inverse_R)

    def combine(self, rows_RD: Tensor, handle: RaggedHandle, anchor: Tensor) -> Tensor:
        """See `Dispatcher`."""
        place = self.placement
        if handle.order_R is not None:
            rows_RD = permute_rows(rows_RD, handle.inverse_R, handle.order_R)
        rows_ND = all_to_all(rows_RD, place.comm, place.algorithm, handle.recv, handle.send, anchor)
        return combine_rows(rows_ND, handle.weights_TK, handle.source_N, handle.position_TK)

    def pieces(self, routing: Routing, slots_TK: Tensor | None, capacity: int | None,
               number: int) -> PiecePlan:
        """See `dispatch.pieces`: every expert's rows cut in `number` pieces, nearly equal. One
        device-to-host copy, of the counts.
        """
        ids_TK, weights_TK = expand(self.placement, routing, slots_TK)
        order_N, send_WL, recv_WL = self._plan(ids_TK)
        return ragged_pieces(order_N, send_WL, recv_WL, ids_TK, weights_TK, number)

    def plan(self, routing: Routing, slots_TK: Tensor | None,
             capacity: int | None) -> RowPlan | None:
        """See `Dispatcher`. One device-to-host copy, of the counts."""
        return exact_rows(routing.ids_TK, routing.weights_TK,
                          self.placement.experts) if self.placement.comm.size == 1 else None

    def _plan(self, ids_TK: Tensor) -> tuple[Tensor, list[list[int]], list[list[int]]]:
        place = self.placement
        order_N, send_V = _sort(ids_TK, place.virtual)
        recv_V = place.comm.all_to_all(send_V) if place.comm.size > 1 else send_V
        counts_2WL = torch.stack([send_V, recv_V]).view(2, place.comm.size, place.local).tolist()
        return order_N, counts_2WL[0], counts_2WL[1]


def exact_rows(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> RowPlan:
    """Every chosen (token, expert) pair is one row, sorted by expert; within an expert in token
    order.
    """
    order_N, count_E = _sort(ids_TK, experts)
    counts = RowCounts(count_E.tolist())
    source_R = order_N[: counts.total]
    return RowPlan(source_R, positions(source_R, ids_TK), weights_TK, counts)


def _sort(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Choices by expert (those without one last), and the number of choices of each expert."""
    ids_N = ids_TK.reshape(-1)
    key_N = torch.where(ids_N < 0, experts, ids_N)
    return torch.argsort(key_N, stable=True), expert_load(ids_TK, experts)
