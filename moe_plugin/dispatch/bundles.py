"""A token as one row to each target that has some of its experts, and (expert, weight) pairs beside
it: how rows and pairs are made where a token leaves, and read where it arrives.

A choice is a pair: the expert shard, the gate weight, and whether it begins a new row. Pairs lie by
target, within a target by token, within a token in choice order; so do rows. A pair is six to
twelve bytes (`code_dtype`), and no row number travels: the pairs between one that begins a row and
the next are of one row.

Legend: T tokens (or rows that arrived and go on), K choices, N rows, P pairs that leave, Q pairs
that arrive, R rows that arrive, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.base import Comm
from moe_plugin.comm.chunks import pack, unpack
from moe_plugin.comm.functional import all_to_all
from moe_plugin.dispatch.rows import positions, sort_by_expert
from moe_plugin.kernels.choices import expert_load, slot_sources, stable_order
from moe_plugin.records import RowCounts, RowPlan


def first_of_each(key_TK: Tensor) -> Tensor:
    """Whether a choice is the first of its token with this key, bool [T, K]; not where it is -1."""
    # sorted, since comparing all pairs of choices takes K times the memory
    sorted_TK, order_TK = key_TK.sort(dim=1, stable=True)
    first_TK = torch.ones_like(sorted_TK, dtype=torch.bool)
    first_TK[:, 1:] = sorted_TK[:, 1:] != sorted_TK[:, :-1]
    return (key_TK >= 0) & torch.empty_like(first_TK).scatter_(1, order_TK, first_TK)


@dataclass(frozen=True)
class Bundles:
    """Choices put together by target; nothing here is known on the host.

    Attributes:
        target_TK: int64, rank to which a choice goes next; -1: none.
        first_TK: bool, whether it is the first of its token that goes there.
        order_N: int64 [T*K], choices as pairs lie, those without a target last.
        first_N: bool, whether a pair begins a row.
        row_N: int64, the row of a pair.
        rows_W, pairs_W: int64, to each rank.
    """

    target_TK: Tensor
    first_TK: Tensor
    order_N: Tensor
    first_N: Tensor
    row_N: Tensor
    rows_W: Tensor
    pairs_W: Tensor

    @classmethod
    def of(cls, target_TK: Tensor, ranks: int) -> Bundles:
        """See the class."""
        order_N, pairs_W = sort_by_expert(target_TK, ranks)
        first_TK = first_of_each(target_TK)
        first_N = first_TK.reshape(-1)[order_N]
        rows_W = expert_load(torch.where(first_TK, target_TK, -1), ranks)
        return cls(target_TK, first_TK, order_N, first_N, first_N.cumsum(0) - 1, rows_W, pairs_W)

    def sources(self, rows: int) -> Tensor:
        """The choice that each row is sent for, the first of its token with that target, int64 [N];
        see `kernels.rows`. rows: N, which the host knows by now.
        """
        row_N = torch.where(self.first_N, self.row_N, -1)
        position_N = torch.empty_like(row_N).index_copy_(0, self.order_N, row_N)
        return slot_sources(position_N.view(self.target_TK.shape), rows)

    def pieces(self, share_WC: Tensor) -> Tensor:
        """The piece of each choice's row, int64 [T, K]; see `dispatch.pieces`.

        share_WC: int64, cumulative shares of the pieces of the rows to each rank.
        """
        end_WC = torch.div(self.rows_W[:, None] * share_WC, share_WC[:, -1:],
                           rounding_mode="floor")
        target_N = self.target_TK.reshape(-1)[self.order_N].clamp(min=0)
        before_W = self.rows_W.cumsum(0) - self.rows_W
        place_N1 = (self.row_N - before_W[target_N])[:, None]
        piece_N = (place_N1 >= end_WC[target_N, 1:-1]).sum(1)
        return torch.empty_like(piece_N).index_copy_(0, self.order_N, piece_N).view(
            self.target_TK.shape)


def code_dtype(shards: int) -> torch.dtype:
    """In which a pair's expert shard and whether it begins a row travel together."""
    return torch.int16 if 2 * shards <= torch.iinfo(torch.int16).max else torch.int32


@dataclass(frozen=True)
class Pairs:
    """(expert, weight) pairs of one call on their way.

    Attributes:
        code_P: 2 * shard + (1: begins a row); -1: filler.
        choice_P: int64, which of the T*K choices it is; T*K: filler.
        send, recv: pairs to and from each rank.
        filler: whether there is some.
    """

    code_P: Tensor
    choice_P: Tensor
    send: list[int]
    recv: list[int]
    filler: bool = False

    @classmethod
    def of(cls, bundles: Bundles, shard_TK: Tensor, shards: int, send: list[int],
           recv: list[int]) -> Pairs:
        """shard_TK: int64, the expert shard of each choice, of `shards`."""
        total = sum(send)
        choice_P = bundles.order_N[:total]
        code_P = 2 * shard_TK.reshape(-1)[choice_P] + bundles.first_N[:total]
        return cls(code_P.to(code_dtype(shards)), choice_P, send, recv)

    def travel(self, weights_TK: Tensor, comm: Comm,
               anchor: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes int64 [Q], weights [Q], differentiable) as they arrive, by source rank."""
        code_Q, weight_Q = _Travel.apply(weights_TK, anchor, self, comm)
        return code_Q.to(torch.int64), weight_Q


class _Travel(torch.autograd.Function):
    """Codes and weights in one exchange; the gates' gradients come back in another."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, anchor: Tensor | None, pairs: Pairs,
                comm: Comm) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.comm, ctx.shape = pairs, comm, weights_TK.shape
        weights_N = weights_TK.reshape(-1)
        if pairs.filler:
            weights_N = torch.cat([weights_N, weights_N.new_zeros(1)])
        packed, layout = pack([pairs.code_P, weights_N[pairs.choice_P]])
        linear = algorithms.get("linear")
        code_Q, weight_Q = unpack(linear(comm, packed, pairs.send, pairs.recv), layout)
        ctx.mark_non_differentiable(code_Q)
        return code_Q, weight_Q

    @staticmethod
    def backward(ctx: Any, _: Any, grad_Q: Tensor) -> tuple[Any, ...]:
        pairs = ctx.pairs
        grad_P = all_to_all(grad_Q, ctx.comm, algorithms.get("linear"), pairs.recv, pairs.send)
        choices = ctx.shape.numel()
        grad_N = grad_P.new_zeros(choices + pairs.filler).index_copy(0, pairs.choice_P, grad_P)
        return grad_N[:choices].view(ctx.shape), None, None, None


@dataclass(frozen=True)
class Arrived:
    """The pairs of rows that arrived, as the choices of these rows.

    Attributes:
        shard_Q: int64, expert shard; -1: filler.
        choice_Q: int64, which of the R*K choices of rows it is; R*K: filler.
        weights_RK: gate weights, differentiable; 0 where a row has fewer choices.
    """

    shard_Q: Tensor
    choice_Q: Tensor
    weights_RK: Tensor

    @classmethod
    def of(cls, code_Q: Tensor, weight_Q: Tensor, rows: int, choices: int) -> Arrived:
        """From what `Pairs.travel` gives. rows: R. choices: K, the most that a row can have."""
        first_Q = code_Q & 1
        number_Q = torch.arange(code_Q.numel(), device=code_Q.device)
        begin_Q = torch.where(first_Q > 0, number_Q, 0).cummax(0).values
        choice_Q = (first_Q.cumsum(0) - 1) * choices + number_Q - begin_Q
        weights_N = weight_Q.new_zeros(rows * choices).index_copy(0, choice_Q, weight_Q)
        return cls(code_Q >> 1, choice_Q, weights_N.view(rows, choices))

    def shards(self) -> Tensor:
        """Expert shard of each choice of the rows, int64 [R, K]; -1: none."""
        choices = self.weights_RK.numel()  # and one place for filler
        shard_N = torch.full((choices + 1,), -1, dtype=torch.int64, device=self.shard_Q.device)
        shard_N.index_copy_(0, self.choice_Q, self.shard_Q)
        return shard_N[:choices].view(self.weights_RK.shape)

    def row_plan(self, first_shard: int, counts: Sequence[int]) -> RowPlan:
        """How this rank's experts read the rows: through a map, without a copy per expert.

        Args:
            first_shard: the first of this rank's.
            counts: rows of each.
        """
        order_Q = stable_order(self.shard_Q - first_shard, len(counts))
        source_Q = self.choice_Q[order_Q]
        complete = source_Q.numel() == self.weights_RK.numel()
        return RowPlan(source_Q, positions(source_Q, self.weights_RK, complete), self.weights_RK,
                       RowCounts(list(counts)), complete)
