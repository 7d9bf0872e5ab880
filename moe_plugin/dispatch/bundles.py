"""Encoding and decoding of (expert, weight) pairs for rows that are sent only once to each target.

A token is sent as one row to each target rank that has at least one of the token's experts. In
addition to the row, one pair is sent for each of the token's experts on the target rank. A pair
contains the expert shard, the gate weight, and a flag that marks the first pair of a row. Rows and
pairs are ordered by target and then by token. The pairs of a token are ordered by choice. A pair
takes up 6 to 12 bytes, depending on the dtypes of its code (`code_dtype`) and its weight. Row
indices are not sent. A pair without the flag belongs to the same row as the previous pair.

Letters in tensor names denote sizes: T tokens (or received rows to forward), K choices, N rows, P
sent pairs, Q received pairs, R received rows, and W ranks.
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
    """Return a bool tensor [T, K]. Element [t, k] is True if no earlier routing choice of token t
    has the same key as choice k.

    Args:
        key_TK: int64 [T, K], the key of each choice. For a key of -1, the element is False.
    """
    # sorting needs less memory than comparing all pairs of choices, by a factor of K
    sorted_TK, order_TK = key_TK.sort(dim=1, stable=True)
    first_TK = torch.ones_like(sorted_TK, dtype=torch.bool)
    first_TK[:, 1:] = sorted_TK[:, 1:] != sorted_TK[:, :-1]
    return (key_TK >= 0) & torch.empty_like(first_TK).scatter_(1, order_TK, first_TK)


@dataclass(frozen=True)
class Bundles:
    """The routing choices of all tokens, grouped by target. All tensors are on the device, and the
    host does not read them.

    Attributes:
        target_TK: int64 [T, K], the next rank that receives each choice, or -1 without a target.
        first_TK: bool [T, K], True if the choice is the first choice of its token for this target.
        order_N: int64 [T*K], the indices of the choices, sorted as their pairs are sent. Choices
            without a target are at the end.
        first_N: bool [T*K], True if the pair is the first pair of a row.
        row_N: int64 [T*K], the index of each pair's row.
        rows_W: int64 [W], the number of rows sent to each rank.
        pairs_W: int64 [W], the number of pairs sent to each rank.
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
        """Group the routing choices by target.

        Args:
            target_TK: int64 [T, K], the rank to which each choice is sent next, or -1 if a choice
                has no target.
            ranks: number of ranks, W.
        """
        order_N, pairs_W = sort_by_expert(target_TK, ranks)
        first_TK = first_of_each(target_TK)
        first_N = first_TK.reshape(-1)[order_N]
        # a token is one row for a target, counted by its first choice there
        rows_W = expert_load(torch.where(first_TK, target_TK, -1), ranks)
        return cls(target_TK, first_TK, order_N, first_N, first_N.cumsum(0) - 1, rows_W, pairs_W)

    def sources(self, rows: int) -> Tensor:
        """Return the routing choice for which each row is sent, int64 [N] (`kernels.rows`). If
        several choices of a token have the row's target, the row is sent for the first of these
        choices.


        Args:
            rows: number of rows, N.
        """
        row_N = torch.where(self.first_N, self.row_N, -1)
        position_N = torch.empty_like(row_N).index_copy_(0, self.order_N, row_N)
        return slot_sources(position_N.view(self.target_TK.shape), rows)

    def pieces(self, share_WC: Tensor) -> Tensor:
        """Return the index of the piece that contains each choice's row, int64 [T, K]
        (`dispatch.pieces`).

        Args:
            share_WC: int64 [W, C], cumulative shares that divide each rank's rows into pieces.
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
    """Return the integer dtype that encodes the expert shard and the flag of a pair."""
    return torch.int16 if 2 * shards <= torch.iinfo(torch.int16).max else torch.int32


@dataclass(frozen=True)
class Pairs:
    """The (expert, weight) pairs that this rank sends in one call of the layer.

    Attributes:
        code_P: code of each pair. The code is 2 * shard + 1 for the first pair of a row, and 2 *
            shard for all other pairs. -1 for padding.
        choice_P: int64 [P], the index of each pair's choice, from 0 to T*K - 1. T*K for padding.
        send: number of pairs sent to each rank.
        recv: number of pairs received from each rank.
        filler: True if the pairs may include padding.
    """

    code_P: Tensor
    choice_P: Tensor
    send: list[int]
    recv: list[int]
    filler: bool = False

    @classmethod
    def of(cls, bundles: Bundles, shard_TK: Tensor, shards: int, send: list[int],
           recv: list[int]) -> Pairs:
        """Encode the pairs of the grouped routing choices.

        Args:
            bundles: choices grouped by target.
            shard_TK: int64 [T, K], the expert shard of each choice.
            shards: total number of expert shards on all ranks.
            send: number of pairs to send to each rank.
            recv: number of pairs to receive from each rank.
        """
        total = sum(send)
        choice_P = bundles.order_N[:total]
        code_P = 2 * shard_TK.reshape(-1)[choice_P] + bundles.first_N[:total]
        return cls(code_P.to(code_dtype(shards)), choice_P, send, recv)

    def travel(self, weights_TK: Tensor, comm: Comm,
               anchor: Tensor | None) -> tuple[Tensor, Tensor]:
        """Exchange the pairs. Return the received codes, int64 [Q], and the received weights [Q],
        which require gradients. Both tensors are ordered by source rank.
        """
        code_Q, weight_Q = _Travel.apply(weights_TK, anchor, self, comm)
        return code_Q.to(torch.int64), weight_Q


class _Travel(torch.autograd.Function):
    """Autograd function that sends codes and weights in a single exchange. The backward pass sends
    the gradients of the weights back.
    """

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
    """The received pairs. Each pair represents one routing choice of a received row.

    Attributes:
        shard_Q: int64 [Q], the expert shard of each pair. -1 for padding.
        choice_Q: int64 [Q], the index of each pair among the R*K choices of all received rows. R*K
            for padding.
        weights_RK: [R, K], the gate weights. They require gradients. If a row has fewer than K
            choices, the remaining weights are 0.
    """

    shard_Q: Tensor
    choice_Q: Tensor
    weights_RK: Tensor

    @classmethod
    def of(cls, code_Q: Tensor, weight_Q: Tensor, rows: int, choices: int) -> Arrived:
        """Decode the codes and weights returned by `Pairs.travel`.

        Args:
            code_Q: int64 [Q], the code of each pair.
            weight_Q: [Q], the gate weight of each pair.
            rows: number of received rows, R.
            choices: maximum number of choices per row, K.
        """
        first_Q = code_Q & 1
        number_Q = torch.arange(code_Q.numel(), device=code_Q.device)
        # the position of the pair that begins the row of each pair
        begin_Q = torch.where(first_Q > 0, number_Q, 0).cummax(0).values
        choice_Q = (first_Q.cumsum(0) - 1) * choices + number_Q - begin_Q
        weights_N = weight_Q.new_zeros(rows * choices).index_copy(0, choice_Q, weight_Q)
        return cls(code_Q >> 1, choice_Q, weights_N.view(rows, choices))

    def shards(self) -> Tensor:
        """Return the expert shard of each routing choice of the received rows, int64 [R, K], or -1
        if a row has fewer choices.
        """
        choices = self.weights_RK.numel()  # one more element absorbs the padding
        shard_N = torch.full((choices + 1,), -1, dtype=torch.int64, device=self.shard_Q.device)
        shard_N.index_copy_(0, self.choice_Q, self.shard_Q)
        return shard_N[:choices].view(self.weights_RK.shape)

    def row_plan(self, first_shard: int, counts: Sequence[int]) -> RowPlan:
        """Return an index with which this rank's experts read the received rows without copies.

        Args:
            first_shard: index of the first expert shard on this rank.
            counts: number of rows for each expert shard on this rank.
        """
        order_Q = stable_order(self.shard_Q - first_shard, len(counts))
        source_Q = self.choice_Q[order_Q]
        complete = source_Q.numel() == self.weights_RK.numel()
        return RowPlan(source_Q, positions(source_Q, self.weights_RK, complete), self.weights_RK,
                       RowCounts(list(counts)), complete)


def bounded_plan(arrived: Arrived, first_shard: int, local: int, most: int) -> RowPlan:
    """Return the same index as `Arrived.row_plan`, but in a buffer for `most` pairs and with counts
    that stay on the device.

    Args:
        arrived: the received pairs.
        first_shard: index of the first expert shard on this rank.
        local: number of expert shards on this rank.
        most: size of the buffer in pairs.
    """
    expert_Q = torch.where(arrived.shard_Q >= 0, arrived.shard_Q - first_shard, -1)
    order_Q, count_L = sort_by_expert(expert_Q[:, None], local)
    order_Q = order_Q[:most]
    source_R = torch.where(expert_Q[order_Q] >= 0, arrived.choice_Q[order_Q], -1)
    position_RK = slot_sources(source_R, arrived.weights_RK.numel()).view(arrived.weights_RK.shape)
    return RowPlan(source_R, position_RK, arrived.weights_RK,
                   DeviceCounts(count_L, source_R.numel()))
