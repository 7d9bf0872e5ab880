"""Dispatchers that send bounded rows once to each rank or node; see `dispatch.once`.

A rank sends at most P pairs to another rank (`RowsLimit.slots`, the bound of `dispatch.bounded`),
and at most min(P, T) rows of its T tokens. All slots are sent, whether filled or empty. The
receiver counts the pairs on the device, so the host never waits. If a rank has more than P pairs
for another rank, all ranks are informed of this before rows are sent, as in `dispatch.bounded`. The
outputs and gradients of the call are then NaN.

With `dispatch.send: nodes`, a rank sends m P pairs to a node with m ranks. Within a node, a rank
forwards the pairs of all ranks that send to it. Therefore rows within the bound are within the
limits of both exchanges, and no further agreement is needed.

In tensor names, S is the number of sources of an exchange. `dispatch.bundles` explains the other
letters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.dispatch.base import DispatchContext, DispatchTraits, Sent, expand
from moe_plugin.dispatch.bounded import says_load
from moe_plugin.dispatch.bundles import Arrived, Bundles, Pairs, code_dtype
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.once import Forwarding, OncePiece, OncePlan, Sizes
from moe_plugin.dispatch.once_nodes import NodePeers
from moe_plugin.dispatch.pieces import count_rows, slot_positions
from moe_plugin.dispatch.rows import sort_by_expert
from moe_plugin.kernels.choices import expert_load, slot_sources
from moe_plugin.records import DeviceCounts, KeptRouting, RowPlan


@dataclass(frozen=True)
class SlotHop:
    """An exchange with the same number of slots for each target and from each source.

    Attributes:
        comm: the group of all ranks.
        targets: the ranks to which this rank sends, in ascending order.
        sources: the ranks from which this rank receives, in ascending order.
        rows: the number of slots for rows, per target and per source.
        pairs: the number of slots for pairs, per target and per source.
    """

    comm: Comm
    targets: Sequence[int]
    sources: Sequence[int]
    rows: int
    pairs: int

    def sizes(self, slots: int) -> tuple[list[int], list[int]]:
        """Return the sizes sent to and received from each rank, for `slots` slots per target."""
        ranks = range(self.comm.size)
        # the exchange runs over the whole group, in which other ranks send and receive nothing
        return ([slots if rank in self.targets else 0 for rank in ranks],
                [slots if rank in self.sources else 0 for rank in ranks])

    def loaded(self, target_TK: Tensor) -> Loaded:
        """Assign choices to slots.

        Args:
            target_TK: int64 [T, K], the index in `targets` for each choice, or -1.
        """
        bundles = Bundles.of(target_TK, len(self.targets))
        number_N = torch.arange(target_TK.numel(), device=target_TK.device)
        target_N = target_TK.reshape(-1)[bundles.order_N].clamp(min=0)

        def slots_of(each_N: Tensor, count_W: Tensor, slots: int) -> Tensor:
            before_W = count_W.cumsum(0) - count_W
            # choices that do not fit share a slot; the overflow is detected and all results are NaN
            slot_N = (each_N - before_W[target_N]).clamp(0, slots - 1)
            return torch.empty_like(slot_N).index_copy_(0, bundles.order_N, slot_N).view(
                target_TK.shape)

        return Loaded(self, target_TK, bundles.first_TK, bundles.rows_W,
                      slots_of(bundles.row_N, bundles.rows_W, self.rows),
                      slots_of(number_N, bundles.pairs_W, self.pairs))


@dataclass(frozen=True)
class Loaded:
    """The slots that the choices of tokens occupy in an exchange.

    Attributes:
        hop: the exchange.
        target_TK: int64 [T, K], the index of each choice's target, or -1.
        first_TK: bool [T, K], whether a choice begins a row.
        rows_W: int64 [W], the number of rows for each target.
        row_TK: int64 [T, K], the slot of each choice's row among the row slots of its target.
        pair_TK: int64 [T, K], the slot of each choice's pair among the pair slots of its target.
    """

    hop: SlotHop
    target_TK: Tensor
    first_TK: Tensor
    rows_W: Tensor
    row_TK: Tensor
    pair_TK: Tensor

    def rows(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the choice of each row and the row of each choice (`kernels.rows`).

        Args:
            starts: the first slot of each piece, followed by the number of slots.
        """
        targets = len(self.hop.targets)
        position_TK = slot_positions(torch.where(self.first_TK, self.target_TK, -1), self.row_TK,
                                     targets, list(starts))
        return slot_sources(position_TK, targets * self.hop.rows), position_TK

    def pairs(self, shard_TK: Tensor, shards: int) -> Pairs:
        """Encode the pairs in their slots.

        Args:
            shard_TK: int64 [T, K], the expert shard of each choice.
            shards: the number of expert shards on all ranks.
        """
        slots = self.hop.pairs
        position_TK = torch.where(self.target_TK >= 0, self.target_TK * slots + self.pair_TK, -1)
        choice_P = slot_sources(position_TK, len(self.hop.targets) * slots)
        code_N = (2 * shard_TK + self.first_TK).reshape(-1)
        code_N = torch.cat([code_N, code_N.new_full((1,), -1)])
        choice_P = torch.where(choice_P < 0, shard_TK.numel(), choice_P)
        return Pairs(code_N[choice_P].to(code_dtype(shards)), choice_P, *self.hop.sizes(slots),
                     filler=True)


@dataclass(frozen=True)
class ArrivedSlots:
    """The received pairs of an exchange, including padding.

    Attributes:
        shard_SP: int64 [S, P], the expert shard of each pair. -1 for padding.
        row_SP: int64 [S, P], the slot of the pair's row among the row slots of its source.
        number_SP: int64 [S, P], the index of the pair among the pairs of its row.
        weight_Q: [S * P], the gate weights, differentiable.
        rows: the number of slots for rows, per source.
        choices: the largest number K of choices that a row may have.
    """

    shard_SP: Tensor
    row_SP: Tensor
    number_SP: Tensor
    weight_Q: Tensor
    rows: int
    choices: int

    @classmethod
    def of(cls, code_Q: Tensor, weight_Q: Tensor, hop: SlotHop, choices: int) -> ArrivedSlots:
        """Decode the results of `Pairs.travel`.

        Args:
            code_Q: int64 [S * P], the codes.
            weight_Q: [S * P], the gate weights.
            hop: the exchange.
            choices: the largest number K of choices that a row may have.
        """
        code_SP = code_Q.view(len(hop.sources), hop.pairs)
        first_SP = (code_SP >= 0) & ((code_SP & 1) > 0)
        place_P = torch.arange(hop.pairs, device=code_SP.device)
        row_SP = first_SP.cumsum(1) - 1
        number_SP = place_P - torch.where(first_SP, place_P, 0).cummax(1).values
        # the last two conditions fail only after an overflow, when no result is used
        here_SP = (code_SP >= 0) & (row_SP >= 0) & (row_SP < hop.rows) & (number_SP < choices)
        return cls(torch.where(here_SP, code_SP >> 1, -1), row_SP, number_SP, weight_Q, hop.rows,
                   choices)

    def piece(self, start: int, end: int) -> Arrived:
        """Return the pairs of the rows in slots `start` to `end` of each source.

        All other pairs become padding.
        """
        sources, slots = self.shard_SP.shape[0], end - start
        inside_SP = (self.shard_SP >= 0) & (self.row_SP >= start) & (self.row_SP < end)
        source_S1 = torch.arange(sources, device=self.shard_SP.device)[:, None]
        row_SP = source_S1 * slots + self.row_SP - start
        choices = sources * slots * self.choices
        choice_SP = torch.where(inside_SP, row_SP * self.choices + self.number_SP, choices)
        shard_SP = torch.where(inside_SP, self.shard_SP, -1)
        weights_N = self.weight_Q.new_zeros(choices + 1).index_copy(
            0, choice_SP.view(-1), self.weight_Q)
        return Arrived(shard_SP.view(-1), choice_SP.view(-1),
                       weights_N[:choices].view(sources * slots, self.choices))


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


@dataclass(frozen=True)
class BoundedOncePlan(OncePlan):
    """The plan of bounded rows that are sent once.

    Attributes:
        hop: the first exchange, which sends the tokens.
        starts: the first slot of each piece, followed by the number of slots.
        slots: the bound P.
        sound: a factor of all results, which is 1, or NaN if rows exceeded the bound.
    """

    hop: SlotHop | None = None
    starts: tuple[int, ...] = ()
    slots: int = 0
    sound: Tensor | None = None


class _GradTimes(torch.autograd.Function):
    """Autograd function that returns rows unchanged and multiplies their gradient by a scalar."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD * ctx.factor.to(grad_TD.dtype), None


class BoundedOnceDispatcher(ExchangeDispatcher):
    """A dispatcher that sends bounded rows once to each rank.

    Like `OnceDispatcher`, the class has no registered name.
    """

    traits = DispatchTraits(supports_pieces=True, bounded=True, sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.limit, self.weights_first = context.limit, context.weights_first

    def plan(self, kept: KeptRouting) -> BoundedOncePlan:
        """See `Dispatcher`. Costs one even exchange of counts. The host reads nothing."""
        place = self.placement
        ids_TK, gates_TK = expand(place, kept.routing, kept.slots_TK)
        rank_TK = torch.div(ids_TK, place.local, rounding_mode="floor")
        slots, tokens = self.limit.slots(kept.routing.ids_TK, place)
        hop = self.first_hop(slots, tokens)
        loaded = hop.loaded(self.next_target(rank_TK))
        rows, over = self._agree(rank_TK, loaded, slots, says_load(ids_TK, gates_TK))
        # if rows did not fit, all results and gradients become NaN, so that they cannot be used
        sound = gates_TK.new_ones(()).masked_fill(over, torch.nan)
        number = min(self.pieces, hop.rows)
        starts = tuple(hop.rows * c // number for c in range(number + 1))
        source_N, position_TK = loaded.rows(starts)
        pieces = tuple(OncePiece(*hop.sizes(end - start), False, self.weights_first)
                       for start, end in pairwise(starts))
        plan = BoundedOncePlan(
            rows, source_N, position_TK, None, pieces, self.even, False, gates_TK * sound,
            loaded.pairs(ids_TK, place.virtual), hop=hop, starts=starts, slots=slots,
            sound=sound)
        count_rows(plan, place)
        return plan

    def dispatch(self, x_TD: Tensor, plan: BoundedOncePlan, anchor: Tensor | None) -> Sent:
        """See `OnceDispatcher`."""
        arrived = ArrivedSlots.of(
            *plan.pairs.travel(plan.gates_TK, self.placement.comm, anchor), plan.hop,
            plan.gates_TK.shape[1])
        for piece, (start, end) in zip(plan.pieces, pairwise(plan.starts), strict=True):
            self.read_pairs(piece, arrived.piece(start, end), plan.slots, end - start, anchor)
        # a lost token would receive a gradient of zero, so its gradient is made NaN here
        return super().dispatch(_GradTimes.apply(x_TD, plan.sound), plan, anchor)

    def weigh(self, rows_ND: Tensor, plan: BoundedOncePlan) -> Tensor:
        """See `ExchangeDispatcher`."""
        return super().weigh(rows_ND, plan) * plan.sound.to(rows_ND.dtype)

    @property
    def even(self) -> bool:
        """True if all ranks send each other the same number of rows."""
        return True

    def first_hop(self, slots: int, tokens: int) -> SlotHop:
        """Return the exchange that sends the tokens.

        Args:
            slots: the bound P on the pairs from one rank to another.
            tokens: the largest number T of tokens of any rank.
        """
        ranks = range(self.placement.comm.size)
        return SlotHop(self.placement.comm, ranks, ranks, min(slots, tokens), slots)

    def next_target(self, rank_TK: Tensor) -> Tensor:
        """Return the index of each choice's target in the first exchange, int64, or -1.

        Args:
            rank_TK: int64 [T, K], the rank of each choice's expert, or -1.
        """
        return rank_TK

    def read_pairs(self, piece: OncePiece, arrived: Arrived, slots: int, rows: int,
                   anchor: Tensor | None) -> None:
        """Prepare a piece for receiving `rows` rows from each source."""
        place, choices = self.placement, arrived.weights_RK.shape[1]
        # a source sends at most `slots` pairs, and at most K of them for each row
        most = place.comm.size * min(slots, rows * choices)
        piece.rows = bounded_plan(arrived, place.comm.rank * place.local, place.local, most)

    def _agree(self, rank_TK: Tensor, loaded: Loaded, slots: int,
               counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank's experts, and whether the rows of any rank exceeded the
        bound.

        Both values stay on the device.

        Args:
            rank_TK: int64 [T, K], the rank of each choice's expert, or -1.
            loaded: the slots of the choices.
            slots: the bound P.
            counts: whether the routing reflects an actual load (`says_load`).
        """
        comm = self.placement.comm
        pairs_W = expert_load(rank_TK, comm.size)
        rows, most = loaded.rows_W.amax(), pairs_W.amax()
        # A rank may have more tokens than any rank had when T was determined. Its rows can then
        # exceed their slots although its pairs fit, so the number of rows is reported instead.
        beyond = torch.maximum(rows, most.new_full((), slots + 1)) * (rows > loaded.hop.rows)
        most_W = (torch.maximum(most, beyond) * counts).expand(comm.size)
        got_W2 = comm.all_to_all(torch.stack([pairs_W.clamp(max=slots), most_W], dim=1))
        over = self.limit.record(got_W2[:, 1].amax(), slots)
        # lost rows make the results NaN even if the routing does not reflect a real load
        return got_W2[:, 0].sum(), over | (most > slots) | (rows > loaded.hop.rows)


class BoundedOnceToNodesDispatcher(BoundedOnceDispatcher):
    """A dispatcher that sends bounded rows once to each node. A rank of the node forwards them.

    See `dispatch.once_nodes`.
    """

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        comm = self.placement.comm
        topology, peers = comm.topology, NodePeers.of(comm)
        self.node_ranks, self.sources = peers.node_ranks, peers.sources
        self.targets = sorted(peers.via)
        self.most_sources = max(map(peers.entry.count, self.node_ranks))
        self.most_on_a_node = max(map(len, topology.nodes))
        # created once, because a captured call must not copy from the host to the device
        self.target_W = torch.tensor(
            [*(self.targets.index(peers.via[node]) for node in topology.node_of), -1],
            device=comm.device)
        self.mate_W = torch.tensor([self.node_ranks.index(rank) if rank in self.node_ranks else -1
                                    for rank in range(comm.size)] + [-1], device=comm.device)

    @property
    def even(self) -> bool:
        return False

    def first_hop(self, slots: int, tokens: int) -> SlotHop:
        # the rows for all ranks of a node go to one of them; a token is one row
        pairs = slots * self.most_on_a_node
        return SlotHop(self.placement.comm, self.targets, self.sources, min(pairs, tokens), pairs)

    def next_target(self, rank_TK: Tensor) -> Tensor:
        return self.target_W.to(rank_TK.device)[rank_TK]  # the last element is for -1

    def read_pairs(self, piece: OncePiece, arrived: Arrived, slots: int, rows: int,
                   anchor: Tensor | None) -> None:
        """See `BoundedOnceDispatcher`. The pairs are forwarded to the ranks of their experts."""
        place, comm = self.placement, self.placement.comm
        shard_RK = arrived.shards()
        choices = shard_RK.shape[1]
        all_rows = self.most_sources * rows
        pairs = min(self.most_sources * slots, all_rows * choices)
        hop = SlotHop(comm, self.node_ranks, self.node_ranks, min(pairs, all_rows), pairs)
        rank_RK = torch.div(shard_RK, place.local, rounding_mode="floor")
        mate_RK = self.mate_W.to(rank_RK.device)[rank_RK]
        loaded = hop.loaded(mate_RK)
        source_N, position_RK = loaded.rows((0, hop.rows))
        there = ArrivedSlots.of(
            *loaded.pairs(shard_RK, place.virtual).travel(arrived.weights_RK, comm, anchor), hop,
            choices).piece(0, hop.rows)
        piece.forwarding = Forwarding(place, Sizes(*hop.sizes(hop.rows), [], []), source_N,
                                      position_RK, anchor)
        piece.rows = bounded_plan(there, comm.rank * place.local, place.local,
                                  len(self.node_ranks) * pairs)
