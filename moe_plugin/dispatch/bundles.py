"""Encoding and decoding of (expert, weight) pairs for rows that are sent once to each target.

A token is sent as one row to each target rank that has some of its experts. In addition, a pair is
sent for each of these experts. A pair contains the expert shard, the gate weight, and a flag that
is set if the pair is the first pair of a row. Rows and pairs are ordered by target and then by
token. The pairs of a token are ordered by choice. A pair has 6 to 12 bytes (`code_dtype`). Row
indices are not sent, because a pair belongs to the same row as the previous pair unless its flag is
set.

In tensor names, T is the number of tokens (or of received rows that are forwarded), K of choices, N
of rows, P of sent pairs, Q of received pairs, R of received rows, and W of ranks.
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
from moe_plugin.records import DeviceCounts, RowCounts, RowPlan


def first_of_each(key_TK: Tensor) -> Tensor:
    """Return a bool tensor [T, K] that is true if a choice is the first of its token with its key.

    Args:
        key_TK: int64 [T, K], the keys. The result is False for a key of -1.
    """
    # sorting needs less memory than comparing all pairs of choices, by a factor of K
    sorted_TK, order_TK = key_TK.sort(dim=1, stable=True)
    first_TK = torch.ones_like(sorted_TK, dtype=torch.bool)
    first_TK[:, 1:] = sorted_TK[:, 1:] != sorted_TK[:, :-1]
    return (key_TK >= 0) & torch.empty_like(first_TK).scatter_(1, order_TK, first_TK)


@dataclass(frozen=True)
class Bundles:
    """Choices grouped by target. All values are on the device and unknown to the host.

    Attributes:
        target_TK: int64 [T, K], the rank to which each choice is sent next, or -1.
        first_TK: bool [T, K], whether the choice is the first of its token for this target.
        order_N: int64 [T*K], the indices of the choices in the order of their pairs. Choices
            without a target come last.
        first_N: bool [T*K], whether each pair begins a row.
        row_N: int64 [T*K], the row of each pair.
        rows_W: int64 [W], the number of rows for each rank.
        pairs_W: int64 [W], the number of pairs for each rank.
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
        """Group choices by target.

        Args:
            target_TK: int64 [T, K], the rank to which each choice is sent next, or -1.
            ranks: the number W of ranks.
        """
        order_N, pairs_W = sort_by_expert(target_TK, ranks)
        first_TK = first_of_each(target_TK)
        first_N = first_TK.reshape(-1)[order_N]
        # a token is one row for a target, counted by its first choice there
        rows_W = expert_load(torch.where(first_TK, target_TK, -1), ranks)
        return cls(target_TK, first_TK, order_N, first_N, first_N.cumsum(0) - 1, rows_W, pairs_W)

    def sources(self, rows: int) -> Tensor:
        """Return the choice that each row is sent for, int64 [N] (`kernels.rows`).

        Each row is sent for the first choice of its token for the row's target.

        Args:
            rows: the number N of rows.
        """
        row_N = torch.where(self.first_N, self.row_N, -1)
        position_N = torch.empty_like(row_N).index_copy_(0, self.order_N, row_N)
        return slot_sources(position_N.view(self.target_TK.shape), rows)

    def pieces(self, share_WC: Tensor) -> Tensor:
        """Return the piece of each choice's row, int64 [T, K] (`dispatch.pieces`).

        Args:
            share_WC: int64 [W, C], the cumulative shares of the pieces for the rows to each rank.
        """
        end_WC = torch.div(self.rows_W[:, None] * share_WC, share_WC[:, -1:],
                           rounding_mode="floor")
        target_N = self.target_TK.reshape(-1)[self.order_N].clamp(min=0)
        # the index of a row among the rows for its target decides its piece
        before_W = self.rows_W.cumsum(0) - self.rows_W
        place_N1 = (self.row_N - before_W[target_N])[:, None]
        piece_N = (place_N1 >= end_WC[target_N, 1:-1]).sum(1)
        return torch.empty_like(piece_N).index_copy_(0, self.order_N, piece_N).view(
            self.target_TK.shape)


def code_dtype(shards: int) -> torch.dtype:
    """Return the dtype of the integer that encodes the expert shard and the row flag of a pair."""
    return torch.int16 if 2 * shards <= torch.iinfo(torch.int16).max else torch.int32


@dataclass(frozen=True)
class Pairs:
    """The (expert, weight) pairs that this rank sends in one call.

    Attributes:
        code_P: the code of each pair, 2 * shard + 1 if it begins a row, otherwise 2 * shard. -1 for
            padding.
        choice_P: int64 [P], the index of the choice, from 0 to T*K - 1. T*K for padding.
        send: the number of pairs sent to each rank.
        recv: the number of pairs received from each rank.
        filler: whether the pairs may include padding.
    """

    code_P: Tensor
    choice_P: Tensor
    send: list[int]
    recv: list[int]
    filler: bool = False

    @classmethod
    def of(cls, bundles: Bundles, shard_TK: Tensor, shards: int, send: list[int],
           recv: list[int]) -> Pairs:
        """Encode the pairs of grouped choices.

        Args:
            bundles: the choices, grouped by target.
            shard_TK: int64 [T, K], the expert shard of each choice.
            shards: the number of expert shards on all ranks.
            send: the number of pairs for each rank.
            recv: the number of pairs from each rank.
        """
        total = sum(send)
        choice_P = bundles.order_N[:total]
        code_P = 2 * shard_TK.reshape(-1)[choice_P] + bundles.first_N[:total]
        return cls(code_P.to(code_dtype(shards)), choice_P, send, recv)

    def travel(self, weights_TK: Tensor, comm: Comm,
               anchor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Exchange the pairs. The result contains the received codes, int64 [Q], and the
        differentiable weights [Q]. Both are ordered by source rank.
        """
        code_Q, weight_Q = _Travel.apply(weights_TK, anchor, self, comm)
        return code_Q.to(torch.int64), weight_Q


class _Travel(torch.autograd.Function):
    """Autograd function that sends codes and weights in one exchange. The backward pass returns the
    gradients of the weights."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, anchor: Tensor | None, pairs: Pairs,
                comm: Comm) -> tuple[Tensor, Tensor]:
        ctx.pairs, ctx.comm, ctx.shape = pairs, comm, weights_TK.shape
        weights_N = weights_TK.reshape(-1)
        if pairs.filler:
            weights_N = torch.cat([weights_N, weights_N.new_zeros(1)])
        # one exchange for both, as raw bytes
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
        # the additional element absorbs the gradients of padding
        grad_N = grad_P.new_zeros(choices + pairs.filler).index_copy(0, pairs.choice_P, grad_P)
        return grad_N[:choices].view(ctx.shape), None, None, None


@dataclass(frozen=True)
class Arrived:
    """The received pairs, which are the choices of the received rows.

    Attributes:
        shard_Q: int64 [Q], the expert shard of each pair. -1 for padding.
        choice_Q: int64 [Q], the index of the pair among the R*K choices of rows. R*K for padding.
        weights_RK: [R, K], the gate weights, differentiable. The weight is 0 if a row has fewer
            than K choices.
    """

    shard_Q: Tensor
    choice_Q: Tensor
    weights_RK: Tensor

    @classmethod
    def of(cls, code_Q: Tensor, weight_Q: Tensor, rows: int, choices: int) -> Arrived:
        """Decode the results of `Pairs.travel`.

        Args:
            code_Q: int64 [Q], the codes.
            weight_Q: [Q], the gate weights.
            rows: the number R of received rows.
            choices: the largest number K of choices of a row.
        """
        first_Q = code_Q & 1
        number_Q = torch.arange(code_Q.numel(), device=code_Q.device)
        # the position of the pair that begins the row of each pair
        begin_Q = torch.where(first_Q > 0, number_Q, 0).cummax(0).values
        choice_Q = (first_Q.cumsum(0) - 1) * choices + number_Q - begin_Q
        weights_N = weight_Q.new_zeros(rows * choices).index_copy(0, choice_Q, weight_Q)
        return cls(code_Q >> 1, choice_Q, weights_N.view(rows, choices))

    def shards(self) -> Tensor:
        """Return the expert shard of each choice of the rows, int64 [R, K], or -1."""
        choices = self.weights_RK.numel()  # one more element absorbs the padding
        shard_N = torch.full((choices + 1,), -1, dtype=torch.int64, device=self.shard_Q.device)
        shard_N.index_copy_(0, self.choice_Q, self.shard_Q)
        return shard_N[:choices].view(self.weights_RK.shape)

    def row_plan(self, first_shard: int, counts: Sequence[int]) -> RowPlan:
        """Return the index through which this rank's experts read the rows without copying them.

        Args:
            first_shard: the first expert shard of this rank.
            counts: the number of rows of each local expert shard.
        """
        order_Q = stable_order(self.shard_Q - first_shard, len(counts))
        source_Q = self.choice_Q[order_Q]
        complete = source_Q.numel() == self.weights_RK.numel()
        return RowPlan(source_Q, positions(source_Q, self.weights_RK, complete), self.weights_RK,
                       RowCounts(list(counts)), complete)


def bounded_plan(arrived: Arrived, first_shard: int, local: int, most: int) -> RowPlan:
    """Return `Arrived.row_plan` in a buffer for `most` pairs, with counts on the device.

    Args:
        arrived: the received pairs.
        first_shard: the first expert shard of this rank.
        local: the number of expert shards on this rank.
        most: the size of the buffer.
    """
    expert_Q = torch.where(arrived.shard_Q >= 0, arrived.shard_Q - first_shard, -1)
    order_Q, count_L = sort_by_expert(expert_Q[:, None], local)
    order_Q = order_Q[:most]
    source_R = torch.where(expert_Q[order_Q] >= 0, arrived.choice_Q[order_Q], -1)
    position_RK = slot_sources(source_R, arrived.weights_RK.numel()).view(arrived.weights_RK.shape)
    return RowPlan(source_R, position_RK, arrived.weights_RK,
                   DeviceCounts(count_L, source_R.numel()))
