"""Rows that travel in pieces while others are computed (Tutel's adaptive pipelining), forward and
backward.

Forward posts all pieces at once; each is computed when it has arrived and posted back when it is
done; the last step waits for all. Backward is the mirror and may group the pieces differently: rows
are split in `lcm(d, d_backward)` pieces, and exchanges carry groups of them.

There are two kinds of autograd node, tied by scalar tokens: rows bypass autograd, the exchange
object carries them. So a node may end before its rows have arrived. Nodes run in the reverse order
of their creation on all ranks, so all ranks post in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.handles import Handle, start
from moe_plugin.dispatch.pieces import ExchangePlan
from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.records import Overlap, Placement


class PipelinedExchange:
    """One exchange of all pieces of a plan, for rows and, in backward, for their gradients.

    Args:
        placement: the ranks and the exchange algorithm.
        plan: its pieces travel from `send` to `recv`.
        overlap: groups of pieces that travel together, forward and backward.
        reverse: rows travel from `recv` to `send`, back to their tokens.
    """

    def __init__(self, placement: Placement, plan: ExchangePlan, overlap: Overlap,
                 reverse: bool) -> None:
        sends, recvs = [p.send for p in plan.pieces], [p.recv for p in plan.pieces]
        if reverse:
            sends, recvs = recvs, sends
        self.sends, self.recvs = [sum(s) for s in sends], [sum(r) for r in recvs]
        self.forward = _Direction(placement, sends, recvs, overlap.forward, plan.even)
        self.backward = _Direction(placement, recvs, sends, overlap.backward or overlap.forward,
                                   plan.even)

    def deliver(self, rows_ND: Tensor, anchor: Tensor | None) -> Iterator[Tensor]:
        """Post all pieces of rows_ND [N, D] now; each piece of rows when it has arrived.

        anchor: a parameter, see `comm.functional`.
        """
        every = range(len(self.sends))
        posted = _Send.apply(self, every, rows_ND, anchor)
        return (_Receive.apply(self, range(number, number + 1), posted) for number in every)

    def collect(self, pieces: Iterable[Tensor], anchor: Tensor | None) -> Tensor:
        """Post each piece when it is there; all rows [N, D] when the last has arrived."""
        posted = [_Send.apply(self, range(number, number + 1), rows, anchor)
                  for number, rows in enumerate(pieces)]
        return _Receive.apply(self, range(len(posted)), *posted)


class _Direction:
    """One direction: pieces are put in, travel in groups, are taken out on the other side."""

    def __init__(self, placement: Placement, sends: Sequence[list[int]],
                 recvs: Sequence[list[int]], groups: int, even: bool) -> None:
        self.placement, self.sends, self.recvs, self.even = placement, sends, recvs, even
        size = -(-len(sends) // groups)
        self.group_of = [number // size for number in range(len(sends))]
        self.members = [[n for n, g in enumerate(self.group_of) if g == group]
                        for group in range(self.group_of[-1] + 1)]
        self.waiting: dict[int, Tensor] = {}
        self.posted: dict[int, Handle] = {}
        self.arrived: dict[int, Tensor] = {}

    def put(self, number: int, rows: Tensor) -> None:
        """Hand over a piece; the group's last one starts the exchange."""
        self.waiting[number] = rows
        members = self.members[self.group_of[number]]
        if any(n not in self.waiting for n in members):
            return
        lengths = [self.sends[n] for n in members]
        splits = (None, None) if self.even else (_sum(lengths),
                                                 _sum([self.recvs[n] for n in members]))
        buffer = _by_rank([self.waiting.pop(n) for n in members], lengths)
        self.posted[self.group_of[number]] = start(self.placement.comm, self.placement.algorithm,
                                                   buffer, *splits)

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


def _one(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class _Send(torch.autograd.Function):
    """Rows of some pieces go in; a scalar token comes out. Backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: PipelinedExchange, numbers: range, rows: Tensor,
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
    """Scalar tokens of the pieces in, their rows out when they have arrived.

    Backward posts their gradients, last piece first.
    """

    @staticmethod
    def forward(ctx: Any, exchange: PipelinedExchange, numbers: range, *tokens: Tensor) -> Tensor:
        ctx.exchange, ctx.numbers, ctx.tokens = exchange, numbers, len(tokens)
        return _one([exchange.forward.take(n) for n in numbers])

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = grad.split([ctx.exchange.recvs[n] for n in ctx.numbers])
        for number, part in reversed(list(zip(ctx.numbers, parts, strict=True))):
            ctx.exchange.backward.put(number, part)
        return None, None, *(grad.new_zeros(()) for _ in range(ctx.tokens))
