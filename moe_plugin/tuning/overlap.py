"""Pieces of rows that travel while others are computed (Tutel's adaptive pipelining), forward and
backward.

Forward posts all pieces at once; each is computed when it has arrived and posted back when it is
done; the last step waits for all. Backward is the mirror and may cut the exchange otherwise: rows
are cut in `lcm(d, d_backward)` pieces, and exchanges carry groups of them.

Four kinds of autograd node, tied by scalar tokens: rows themselves pass through the exchange's
hands, so that a node may end before its rows have arrived. Nodes run in the reverse order of their
creation on all ranks, so all ranks post alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.handles import Handle, start
from moe_plugin.dispatch.pieces import Piece, PiecePlan
from moe_plugin.kernels import combine_rows, gather_rows, permute_rows
from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.records import Placement, RowCounts

Experts = Callable[[Tensor, RowCounts], Tensor]


def pieces_for(d: int, d_backward: int) -> int:
    """In how many pieces rows are cut so that both directions can group them evenly."""
    return math.lcm(d, d_backward)


def pipelined(x_TD: Tensor, plan: PiecePlan, experts: Experts, place: Placement, d: int,
              d_backward: int, anchor: Tensor | None) -> Tensor:
    """y_TD: rows out, through `experts` and back, weighed and summed.

    experts: `(rows_RD, counts) -> rows_RD` for this rank's rows of one piece. d, d_backward: groups
    of pieces that travel together.
    anchor: a parameter, see `comm.functional`.
    """
    rows_ND = gather_rows(x_TD, plan.source_N, plan.position_TK)
    sends, recvs = [p.send for p in plan.pieces], [p.recv for p in plan.pieces]
    out = _Exchange(place, sends, recvs, (d, d_backward), plan.even)
    back = _Exchange(place, recvs, sends, (d, d_backward), plan.even)
    every = range(len(plan.pieces))
    left = _Send.apply(out, every, rows_ND, anchor)
    done = []
    for number, piece in enumerate(plan.pieces):
        rows_RD = _compute(_Receive.apply(out, range(number, number + 1), left), piece, experts)
        done.append(_Send.apply(back, range(number, number + 1), rows_RD, anchor))
    rows_ND = _Receive.apply(back, every, *done)
    return combine_rows(rows_ND, plan.weights_TK, plan.source_N, plan.position_TK)


def _compute(rows_RD: Tensor, piece: Piece, experts: Experts) -> Tensor:
    if piece.order_R is None:
        return experts(rows_RD, piece.counts)
    rows_RD = experts(permute_rows(rows_RD, piece.order_R, piece.inverse_R), piece.counts)
    return permute_rows(rows_RD, piece.inverse_R, piece.order_R)


class _Way:
    """One direction of one exchange: pieces are put in, travel in groups, are taken out on the
    other side.
    """

    def __init__(self, place: Placement, sends: Sequence[list[int]], recvs: Sequence[list[int]],
                 groups: int, even: bool) -> None:
        self.place, self.sends, self.recvs, self.even = place, sends, recvs, even
        size = -(-len(sends) // groups)
        self.group_of = [number // size for number in range(len(sends))]
        self.members = [[n for n, g in enumerate(self.group_of) if g == group]
                        for group in range(self.group_of[-1] + 1)]
        self.put_in: dict[int, Tensor] = {}
        self.posted: dict[int, Handle] = {}
        self.arrived: dict[int, Tensor] = {}

    def put(self, number: int, rows: Tensor) -> None:
        """Hand over a piece; the group's last one sets it off."""
        self.put_in[number] = rows
        group = self.group_of[number]
        if all(n in self.put_in for n in self.members[group]):
            parts = [self.put_in.pop(n) for n in self.members[group]]
            lengths = [self.sends[n] for n in self.members[group]]
            send, recv = _sum(lengths), _sum([self.recvs[n] for n in self.members[group]])
            rows = _by_rank(parts, lengths)
            splits = (None, None) if self.even else (send, recv)
            self.posted[group] = start(self.place.comm, self.place.algorithm, rows, *splits)

    def take(self, number: int) -> Tensor:
        """A piece that has arrived; waits for it."""
        group = self.group_of[number]
        if group in self.posted:
            rows = self.posted.pop(group).wait()
            lengths = [self.recvs[n] for n in self.members[group]]
            self.arrived.update(zip(self.members[group], _by_piece(rows, lengths), strict=True))
        return self.arrived.pop(number)


def _sum(lengths: Sequence[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*lengths, strict=True)]


def _by_rank(parts: Sequence[Tensor], lengths: Sequence[list[int]]) -> Tensor:
    """Pieces, each by rank, to one buffer by rank."""
    if len(parts) == 1:
        return parts[0].contiguous()
    split = [part.split(length) for part, length in zip(parts, lengths, strict=True)]
    return torch.cat([piece[rank] for rank in range(len(lengths[0])) for piece in split])


def _by_piece(rows: Tensor, lengths: Sequence[list[int]]) -> list[Tensor]:
    """The inverse of `_by_rank`."""
    if len(lengths) == 1:
        return [rows]
    ranks = len(lengths[0])
    split = rows.split(
        [lengths[piece][rank] for rank in range(ranks) for piece in range(len(lengths))])
    return [torch.cat(split[piece :: len(lengths)]) for piece in range(len(lengths))]


class _Exchange:
    """One exchange of all pieces: the way of the rows, and of their gradients."""

    def __init__(self, place: Placement, sends: Sequence[list[int]], recvs: Sequence[list[int]],
                 groups: tuple[int, int], even: bool) -> None:
        self.sends, self.recvs = [sum(s) for s in sends], [sum(r) for r in recvs]
        self.forward = _Way(place, sends, recvs, groups[0], even)
        self.backward = _Way(place, recvs, sends, groups[1], even)


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _Send(torch.autograd.Function):
    """Rows of some pieces go in; out comes a token. Backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, numbers: range, rows: Tensor,
                anchor: Tensor | None) -> Tensor:
        ctx.exchange, ctx.numbers = exchange, numbers
        for number, part in zip(numbers,
                                rows.detach().split([exchange.sends[n] for n in numbers]),
                                strict=True):
            exchange.forward.put(number, part)
        return rows.new_zeros(())

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, token: Tensor) -> tuple[Any, ...]:
        return None, None, _one([ctx.exchange.backward.take(n) for n in ctx.numbers]), None


class _Receive(torch.autograd.Function):
    """Tokens of the pieces in, their rows out, when they have arrived. Backward sets their
    gradients off, last piece first.
    """

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, numbers: range, *tokens: Tensor) -> Tensor:
        ctx.exchange, ctx.numbers, ctx.tokens = exchange, numbers, len(tokens)
        return _one([exchange.forward.take(n) for n in numbers])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = grad.split([ctx.exchange.recvs[n] for n in ctx.numbers])
        for number, part in reversed(list(zip(ctx.numbers, parts, strict=True))):
            ctx.exchange.backward.put(number, part)
        return None, None, *(grad.new_zeros(()) for _ in range(ctx.tokens))
