"""Rows cut in pieces that travel and are computed one after another, so that exchanges overlap with
products.

Rows lie piece after piece, within a piece by virtual expert, within an expert in slot order. Which
row falls into which piece follows from counts that sender and receiver both know: item i of n goes
to piece floor(((i + 1) m - 1) / n), which gives piece c the items from floor(n c / m) to floor(n (c
+ 1) / m).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.dispatch.base import inverse_permutation
from moe_plugin.records import Placement, RowCounts


@dataclass(frozen=True)
class Piece:
    """One piece. send, recv: rows by rank. counts: rows by local expert. order_R, inverse_R: the
    permutation from source-rank-major to expert-major rows, None where they are the same.
    """

    send: list[int]
    recv: list[int]
    counts: RowCounts
    order_R: Tensor | None
    inverse_R: Tensor | None


@dataclass(frozen=True)
class PiecePlan:
    """A whole exchange in pieces. source_N, position_TK: see kernels.rows; rows lie piece after
    piece. weights_TK: differentiable.

    even: every rank sends every rank the same number of rows, in each piece.
    """

    source_N: Tensor
    position_TK: Tensor
    weights_TK: Tensor
    pieces: list[Piece]
    even: bool


def ragged_pieces(order_N: Tensor, send_WL: list[list[int]], recv_WL: list[list[int]],
                  ids_TK: Tensor, weights_TK: Tensor, number: int) -> PiecePlan:
    """Every (source rank, expert) pair's rows cut in `number` nearly equal parts.

    order_N: choices by virtual expert. send_WL, recv_WL: rows by destination rank and its local
    expert; by source rank and local expert.
    """
    send_V = torch.tensor(send_WL, device=ids_TK.device).view(-1)
    total = sum(map(sum, send_WL))
    expert_N = torch.arange(send_V.numel(),
                            device=ids_TK.device).repeat_interleave(send_V, output_size=total)
    start_V = send_V.cumsum(0) - send_V
    index_N = torch.arange(total, device=ids_TK.device) - start_V[expert_N]
    piece_N = torch.div((index_N + 1) * number - 1, send_V[expert_N], rounding_mode="floor")
    by_piece_N = torch.argsort(piece_N, stable=True)
    source_N = order_N[:total][by_piece_N]
    pieces = [
        _piece(_part(send_WL, c, number), _part(recv_WL, c, number), ids_TK.device)
        for c in range(number)
    ]
    return PiecePlan(source_N, positions(source_N, ids_TK), weights_TK, pieces, False)


def padded_pieces(place: Placement, ids_TK: Tensor, weights_TK: Tensor, slots_TK: Tensor,
                  capacity: int, number: int) -> PiecePlan:
    """The capacity cut in `number` nearly equal parts; with fewer slots than that, in as many as
    there are slots.
    """
    number = max(1, min(number, capacity))
    cuts = [capacity * c // number for c in range(number + 1)]
    cut_M = torch.tensor(cuts, device=ids_TK.device)
    piece_TK = torch.div((slots_TK.clamp(min=0) + 1) * number - 1, max(1, capacity),
                         rounding_mode="floor").clamp(max=number - 1)
    start_TK = cut_M[piece_TK]
    length_TK = cut_M[piece_TK + 1] - start_TK
    position_TK = start_TK * place.virtual + ids_TK * length_TK + slots_TK - start_TK
    position_TK = torch.where(ids_TK >= 0, position_TK, -1)
    size, local = place.comm.size, place.local
    even = [[[cuts[c + 1] - cuts[c]] * local] * size for c in range(number)]
    pieces = [_piece(rows_WL, rows_WL, ids_TK.device) for rows_WL in even]
    return PiecePlan(slot_sources(position_TK, capacity * place.virtual), position_TK, weights_TK,
                     pieces, True)


def _part(rows_WL: list[list[int]], piece: int, number: int) -> list[list[int]]:
    return [[n * (piece + 1) // number - n * piece // number for n in row] for row in rows_WL]


def _piece(send_WL: list[list[int]], recv_WL: list[list[int]], device: torch.device) -> Piece:
    counts = RowCounts([sum(column) for column in zip(*recv_WL, strict=True)])
    return Piece([sum(row) for row in send_WL], [sum(row) for row in recv_WL], counts,
                 *expert_major(recv_WL, device))


def slot_sources(position_TK: Tensor, slots: int) -> Tensor:
    """The choice in each slot, int64 [slots]; -1: empty."""
    # choices without a slot write into one extra slot that is cut off: no data-dependent shape
    index_N = torch.where(position_TK < 0, slots, position_TK).reshape(-1)
    source_V = torch.full((slots + 1,), -1, dtype=torch.int64, device=position_TK.device)
    return source_V.scatter_(0, index_N, torch.arange(index_N.numel(),
                                                      device=position_TK.device))[:slots]


def positions(source_N: Tensor, ids_TK: Tensor) -> Tensor:
    """The row of each choice, int64 [T, K]; -1: none."""
    position_N = torch.full((ids_TK.numel(),), -1, dtype=torch.int64, device=ids_TK.device)
    position_N.index_copy_(0, source_N, torch.arange(source_N.numel(), device=ids_TK.device))
    return position_N.view(ids_TK.shape)


def expert_major(recv_WL: Sequence[Sequence[int]],
                 device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The permutation from source-rank-major to expert-major rows, and its inverse; None where they
    are the same.
    """
    if len(recv_WL) == 1 or len(recv_WL[0]) == 1:
        return None, None
    lengths_M = torch.tensor(recv_WL, device=device).view(-1)
    expert_M = torch.arange(len(recv_WL[0]), device=device).repeat(len(recv_WL))
    expert_R = expert_M.repeat_interleave(lengths_M, output_size=sum(map(sum, recv_WL)))
    order_R = torch.argsort(expert_R, stable=True)
    return order_R, inverse_permutation(order_R)
