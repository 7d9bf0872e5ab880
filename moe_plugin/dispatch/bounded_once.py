"""Bounded rows that are sent once: `dispatch.once` in buffers of a fixed length.

From one rank to one other go at most P pairs (`RowsLimit.slots`, the bound on rows that are sent
for each expert) and as many rows, of T tokens at most T. So many slots travel, filled or not, and
the receiver counts on the device what is there: the host waits for nothing. Where a rank has more
pairs for another, all ranks learn it before rows leave, as in `dispatch.bounded`; the outputs and
gradients of that call are NaN.

To nodes: a hop to m ranks has m P pairs, and rank to rank inside a node those of all ranks that
send to the first. So what fits in the bound fits in both hops, and nothing else is agreed on.

Legend: see `dispatch.bundles`; S sources of a hop.
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
    """An exchange that has as many slots for every target as from every source.

    Attributes:
        targets, sources: ranks, ascending.
        rows, pairs: slots of each.
    """

    comm: Comm
    targets: Sequence[int]
    sources: Sequence[int]
    rows: int
    pairs: int

    def sizes(self, slots: int) -> tuple[list[int], list[int]]:
        """(to each rank, from each rank) where every target has so many slots."""
        ranks = range(self.comm.size)
        return ([slots if rank in self.targets else 0 for rank in ranks],
                [slots if rank in self.sources else 0 for rank in ranks])

    def loaded(self, target_TK: Tensor) -> Loaded:
        """Choices in their slots. target_TK: int64, which of `targets`; -1: none."""
        bundles = Bundles.of(target_TK, len(self.targets))
        number_N = torch.arange(target_TK.numel(), device=target_TK.device)
        target_N = target_TK.reshape(-1)[bundles.order_N].clamp(min=0)

        def slots_of(each_N: Tensor, count_W: Tensor, slots: int) -> Tensor:
            before_W = count_W.cumsum(0) - count_W
            # what does not fit shares a slot with others: it is found, and everything is NaN
            slot_N = (each_N - before_W[target_N]).clamp(0, slots - 1)
            return torch.empty_like(slot_N).index_copy_(0, bundles.order_N, slot_N).view(
                target_TK.shape)

        return Loaded(self, target_TK, bundles.first_TK, bundles.rows_W,
                      slots_of(bundles.row_N, bundles.rows_W, self.rows),
                      slots_of(number_N, bundles.pairs_W, self.pairs))


@dataclass(frozen=True)
class Loaded:
    """Choices in the slots of a hop.

    Attributes:
        target_TK: see `SlotHop.loaded`.
        first_TK: bool, whether a choice begins a row.
        rows_W: int64, rows for each target.
        row_TK, pair_TK: int64, slots among those of its target.
    """

    hop: SlotHop
    target_TK: Tensor
    first_TK: Tensor
    rows_W: Tensor
    row_TK: Tensor
    pair_TK: Tensor

    def rows(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(source_N, position_TK), see `kernels.rows`. starts: first slot of each piece, and the
        number of slots.
        """
        targets = len(self.hop.targets)
        position_TK = slot_positions(torch.where(self.first_TK, self.target_TK, -1), self.row_TK,
                                     targets, list(starts))
        return slot_sources(position_TK, targets * self.hop.rows), position_TK

    def pairs(self, shard_TK: Tensor, shards: int) -> Pairs:
        """Pairs in their slots. shard_TK: int64, expert shard of each choice, of `shards`."""
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
    """The pairs of a hop that arrived, filler among them.

    Attributes:
        shard_SP: int64, -1: filler.
        row_SP: int64, slot of its row among those of its source.
        number_SP: int64, which of its row's pairs it is.
        weight_Q: differentiable.
        rows: slots of a source.
        choices: K, the most that a row can have.
    """

    shard_SP: Tensor
    row_SP: Tensor
    number_SP: Tensor
    weight_Q: Tensor
    rows: int
    choices: int

    @classmethod
    def of(cls, code_Q: Tensor, weight_Q: Tensor, hop: SlotHop, choices: int) -> ArrivedSlots:
        """From what `Pairs.travel` gives."""
        code_SP = code_Q.view(len(hop.sources), hop.pairs)
        first_SP = (code_SP >= 0) & ((code_SP & 1) > 0)
        place_P = torch.arange(hop.pairs, device=code_SP.device)
        row_SP = first_SP.cumsum(1) - 1
        number_SP = place_P - torch.where(first_SP, place_P, 0).cummax(1).values
        # the last two where rows did not fit, of which nothing is used
        here_SP = (code_SP >= 0) & (row_SP >= 0) & (row_SP < hop.rows) & (number_SP < choices)
        return cls(torch.where(here_SP, code_SP >> 1, -1), row_SP, number_SP, weight_Q, hop.rows,
                   choices)

    def piece(self, start: int, end: int) -> Arrived:
        """The pairs of the rows in slots `start` to `end` of every source; others are filler."""
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
    """`Arrived.row_plan` in a buffer for `most` pairs, whose counts stay on the device."""
    expert_Q = torch.where(arrived.shard_Q >= 0, arrived.shard_Q - first_shard, -1)
    order_Q, count_L = sort_by_expert(expert_Q[:, None], local)
    order_Q = order_Q[:most]
    source_R = torch.where(expert_Q[order_Q] >= 0, arrived.choice_Q[order_Q], -1)
    position_RK = slot_sources(source_R, arrived.weights_RK.numel()).view(arrived.weights_RK.shape)
    return RowPlan(source_R, position_RK, arrived.weights_RK,
                   DeviceCounts(count_L, source_R.numel()))


@dataclass(frozen=True)
class BoundedOncePlan(OncePlan):
    """Attributes: `hop`: from tokens on. `starts`: see `Loaded.rows`. `slots`: P. `sound`: 1, or
    NaN where rows did not fit.
    """

    hop: SlotHop | None = None
    starts: tuple[int, ...] = ()
    slots: int = 0
    sound: Tensor | None = None


class _GradTimes(torch.autograd.Function):
    """The same rows, without a copy; their gradient is multiplied by a scalar."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD * ctx.factor.to(grad_TD.dtype), None


class BoundedOnceDispatcher(ExchangeDispatcher):
    """Once to every rank. Not registered: see `OnceDispatcher`."""

    traits = DispatchTraits(supports_pieces=True, bounded=True, sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.limit, self.weights_first = context.limit, context.weights_first

    def plan(self, kept: KeptRouting) -> BoundedOncePlan:
        """See `Dispatcher`. One even exchange of counts; nothing is read on the host."""
        place = self.placement
        ids_TK, gates_TK = expand(place, kept.routing, kept.slots_TK)
        rank_TK = torch.div(ids_TK, place.local, rounding_mode="floor")
        slots, tokens = self.limit.slots(kept.routing.ids_TK, place)
        hop = self.first_hop(slots, tokens)
        loaded = hop.loaded(self.next_target(rank_TK))
        rows, over = self._agree(rank_TK, loaded, slots, says_load(ids_TK, gates_TK))
        # nothing computed without the rows that did not fit may pass for a result or a gradient
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
        # of a token that was lost no gradient comes back
        return super().dispatch(_GradTimes.apply(x_TD, plan.sound), plan, anchor)

    def weigh(self, rows_ND: Tensor, plan: BoundedOncePlan) -> Tensor:
        """See `ExchangeDispatcher`."""
        return super().weigh(rows_ND, plan) * plan.sound.to(rows_ND.dtype)

    @property
    def even(self) -> bool:
        """Whether every rank sends every rank as many rows."""
        return True

    def first_hop(self, slots: int, tokens: int) -> SlotHop:
        """From tokens on. slots: pairs of a rank for one other. tokens: T."""
        ranks = range(self.placement.comm.size)
        return SlotHop(self.placement.comm, ranks, ranks, min(slots, tokens), slots)

    def next_target(self, rank_TK: Tensor) -> Tensor:
        """Which of the first hop's targets a choice goes to on its way to a rank, int64; -1: none.
        """
        return rank_TK

    def read_pairs(self, piece: OncePiece, arrived: Arrived, slots: int, rows: int,
                   anchor: Tensor | None) -> None:
        """What a piece needs for the rows that will arrive, so many from each source."""
        place, choices = self.placement, arrived.weights_RK.shape[1]
        most = place.comm.size * min(slots, rows * choices)
        piece.rows = bounded_plan(arrived, place.comm.rank * place.local, place.local, most)

    def _agree(self, rank_TK: Tensor, loaded: Loaded, slots: int,
               counts: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of this rank's experts, whether any rank had more than fit), on the device.

        counts: see `says_load`.
        """
        comm = self.placement.comm
        pairs_W = expert_load(rank_TK, comm.size)
        rows, most = loaded.rows_W.amax(), pairs_W.amax()
        # more tokens than any rank had when they were counted, with few experts each
        beyond = torch.maximum(rows, most.new_full((), slots + 1)) * (rows > loaded.hop.rows)
        most_W = (torch.maximum(most, beyond) * counts).expand(comm.size)
        got_W2 = comm.all_to_all(torch.stack([pairs_W.clamp(max=slots), most_W], dim=1))
        over = self.limit.record(got_W2[:, 1].amax(), slots)
        # what is lost of a routing that says nothing of the load is NaN as well
        return got_W2[:, 0].sum(), over | (most > slots) | (rows > loaded.hop.rows)


class BoundedOnceToNodesDispatcher(BoundedOnceDispatcher):
    """Once to every node, to one rank that sends it on; see `dispatch.once_nodes`."""

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        comm = self.placement.comm
        topology, peers = comm.topology, NodePeers.of(comm)
        self.here, self.sources, self.targets = peers.here, peers.sources, sorted(peers.via)
        self.most_sources = max(map(peers.entry.count, self.here))
        self.most_on_a_node = max(map(len, topology.nodes))
        # made once, on the device: a captured call copies nothing there
        self.target_W = torch.tensor(
            [*(self.targets.index(peers.via[node]) for node in topology.node_of), -1],
            device=comm.device)
        self.mate_W = torch.tensor([self.here.index(rank) if rank in self.here else -1
                                    for rank in range(comm.size)] + [-1], device=comm.device)

    @property
    def even(self) -> bool:
        return False

    def first_hop(self, slots: int, tokens: int) -> SlotHop:
        pairs = slots * self.most_on_a_node
        return SlotHop(self.placement.comm, self.targets, self.sources, min(pairs, tokens), pairs)

    def next_target(self, rank_TK: Tensor) -> Tensor:
        return self.target_W.to(rank_TK.device)[rank_TK]  # of -1 the last one

    def read_pairs(self, piece: OncePiece, arrived: Arrived, slots: int, rows: int,
                   anchor: Tensor | None) -> None:
        """See `BoundedOnceDispatcher`. Pairs go on to the ranks of their experts, too."""
        place, comm = self.placement, self.placement.comm
        shard_RK = arrived.shards()
        choices = shard_RK.shape[1]
        all_rows = self.most_sources * rows
        pairs = min(self.most_sources * slots, all_rows * choices)
        hop = SlotHop(comm, self.here, self.here, min(pairs, all_rows), pairs)
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
                                  len(self.here) * pairs)
