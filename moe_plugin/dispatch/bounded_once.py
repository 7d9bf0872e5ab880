"""Dispatchers that send bounded rows. The row of each token is sent only once to each rank or node;
see `dispatch.once`.

A rank sends at most P (expert, weight) pairs to another rank. P is `RowsLimit.slots`, as in
`dispatch.bounded`. A rank with T tokens sends at most min(P, T) rows to another rank. All slots are
sent, including empty slots. The receiver counts the pairs on the device, so the host never waits.
If a rank has more than P pairs for another rank, all ranks are informed before rows are sent, as in
`dispatch.bounded`. After such an overflow, all outputs and gradients of the call are NaN.

With `dispatch.send: nodes`, a rank sends up to m P pairs to a node with m ranks. Within the node,
each rank forwards the pairs that it received from other ranks. Rows that are within the limit P
therefore fit both exchanges, and the ranks need no further agreement.

In tensor names, S is the number of source ranks in an exchange. See `dispatch.bundles` for the
meaning of the other letters.
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
from moe_plugin.dispatch.bundles import Arrived, Bundles, Pairs, bounded_plan, code_dtype
from moe_plugin.dispatch.exchange import ExchangeDispatcher
from moe_plugin.dispatch.once import Forwarding, OncePiece, Sizes
from moe_plugin.dispatch.once_nodes import NodePeers
from moe_plugin.dispatch.pieces import ExchangePlan, count_rows, slot_positions
from moe_plugin.kernels.choices import expert_load, slot_sources
from moe_plugin.records import KeptRouting


@dataclass(frozen=True)
class SlotHop:
    """An exchange in which all target ranks and all source ranks have the same number of slots.

    Attributes:
        comm: group of all ranks.
        targets: ranks that receive data from this rank, in ascending order.
        sources: ranks that send data to this rank, in ascending order.
        rows: number of row slots per target and per source.
        pairs: number of pair slots per target and per source.
    """

    comm: Comm
    targets: Sequence[int]
    sources: Sequence[int]
    rows: int
    pairs: int

    def sizes(self, slots: int) -> tuple[list[int], list[int]]:
        """Return the numbers of slots sent to and received from each rank (`slots` per target)."""
        ranks = range(self.comm.size)
        # the exchange runs over the whole group, in which other ranks send and receive nothing
        return ([slots if rank in self.targets else 0 for rank in ranks],
                [slots if rank in self.sources else 0 for rank in ranks])

    def loaded(self, target_TK: Tensor) -> Loaded:
        """Assign routing choices to the slots of the exchange.

        Args:
            target_TK: int64 [T, K], the index of each choice's target in `targets`, or -1 if a
                choice has no target.
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
    """The slots that an exchange assigns to the tokens' choices of experts.

    Attributes:
        hop: the exchange.
        target_TK: int64 [T, K], the index of each choice's target, or -1 if a choice has no target.
        first_TK: bool [T, K], True if the choice is the first choice of a row.
        rows_W: int64 [W], the number of rows sent to each target.
        row_TK: int64 [T, K], the row slot of each choice at the choice's target.
        pair_TK: int64 [T, K], the pair slot of each choice at the choice's target.
    """

    hop: SlotHop
    target_TK: Tensor
    first_TK: Tensor
    rows_W: Tensor
    row_TK: Tensor
    pair_TK: Tensor

    def rows(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the routing choice of each row and the row of each routing choice
        (`kernels.rows`).

        Args:
            starts: first slot of each piece, followed by the total number of slots.
        """
        targets = len(self.hop.targets)
        position_TK = slot_positions(torch.where(self.first_TK, self.target_TK, -1), self.row_TK,
                                     targets, list(starts))
        return slot_sources(position_TK, targets * self.hop.rows), position_TK

    def pairs(self, shard_TK: Tensor, shards: int) -> Pairs:
        """Encode the (expert, weight) pairs and write them to their slots.

        Args:
            shard_TK: int64 [T, K], the expert shard of each choice.
            shards: total number of expert shards on all ranks.
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
        row_SP: int64 [S, P], the row slot of each pair at its source.
        number_SP: int64 [S, P], the index of each pair among the pairs of its row.
        weight_Q: [S * P], the gate weight of each pair. The weights require gradients.
        rows: number of row slots per source.
        choices: maximum number of choices per row, K.
    """

    shard_SP: Tensor
    row_SP: Tensor
    number_SP: Tensor
    weight_Q: Tensor
    rows: int
    choices: int

    @classmethod
    def of(cls, code_Q: Tensor, weight_Q: Tensor, hop: SlotHop, choices: int) -> ArrivedSlots:
        """Decode the codes and weights returned by `Pairs.travel`.

        Args:
            code_Q: int64 [S * P], the code of each pair.
            weight_Q: [S * P], the gate weight of each pair.
            hop: the exchange.
            choices: maximum number of choices per row, K.
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
        """Return the pairs of the rows in slots `start` (inclusive) to `end` (exclusive) per
        source.

        All other pairs are replaced with padding.
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


@dataclass(frozen=True, kw_only=True)
class BoundedOncePlan(ExchangePlan):
    """The plan of a call with bounded rows, where each row is sent only once to each rank or node.

    Attributes:
        gates_TK: gate weights of the routing choices. They require gradients.
        pairs: encoded (expert, weight) pairs to send.
        hop: first exchange, in which this rank sends its tokens.
        starts: first slot of each piece, followed by the total number of slots.
        slots: maximum number of pairs from one rank to another, P.
        sound: factor by which all outputs are multiplied, which is 1, or NaN if the rows of any
            rank exceeded the limit.
    """

    pieces: tuple[OncePiece, ...]
    gates_TK: Tensor
    pairs: Pairs
    hop: SlotHop
    starts: tuple[int, ...]
    slots: int
    sound: Tensor


class _GradTimes(torch.autograd.Function):
    """Autograd function that returns rows unchanged and multiplies their gradients by a scalar."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return grad_TD * ctx.factor.to(grad_TD.dtype), None


class BoundedOnceDispatcher(ExchangeDispatcher[BoundedOncePlan]):
    """A dispatcher for bounded rows that sends each token's row only once to each rank.

    Like `OnceDispatcher`, this class is not registered under a name.
    """

    traits = DispatchTraits(supports_pieces=True, bounded=True, sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        assert context.limit is not None
        self.limit, self.weights_first = context.limit, context.weights_first

    def plan(self, kept: KeptRouting) -> BoundedOncePlan:
        """See `Dispatcher`. The plan requires one exchange of counts, in which all ranks send the
        same number of elements. The host does not read any value from the device.
        """
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
            rows, source_N, position_TK, None, self.even, False, pieces=pieces,
            gates_TK=gates_TK * sound, pairs=loaded.pairs(ids_TK, place.virtual), hop=hop,
            starts=starts, slots=slots, sound=sound)
        count_rows(plan, place)
        return plan

    def dispatch(self, x_TD: Tensor, plan: BoundedOncePlan, anchor: Tensor | None) -> Sent:
        arrived = ArrivedSlots.of(
            *plan.pairs.travel(plan.gates_TK, self.placement.comm, anchor), plan.hop,
            plan.gates_TK.shape[1])
        for piece, (start, end) in zip(plan.pieces, pairwise(plan.starts), strict=True):
            self.read_pairs(piece, arrived.piece(start, end), plan.slots, end - start, anchor)
        # a lost token would receive a gradient of zero, so its gradient is made NaN here
        return super().dispatch(_GradTimes.apply(x_TD, plan.sound), plan, anchor)

    def weigh(self, rows_ND: Tensor, plan: BoundedOncePlan) -> Tensor:
        return super().weigh(rows_ND, plan) * plan.sound.to(rows_ND.dtype)

    @property
    def even(self) -> bool:
        """True if every rank sends the same number of rows to every rank."""
        return True

    def first_hop(self, slots: int, tokens: int) -> SlotHop:
        """Return the exchange in which a rank sends its own tokens.

        Args:
            slots: maximum number of pairs from one rank to another, P.
            tokens: largest number of tokens on any rank, T.
        """
        ranks = range(self.placement.comm.size)
        return SlotHop(self.placement.comm, ranks, ranks, min(slots, tokens), slots)

    def next_target(self, rank_TK: Tensor) -> Tensor:
        """Return the index of each routing choice's target in the first exchange, int64, or -1 for
        choices without an expert.

        Args:
            rank_TK: int64 [T, K], the rank of each choice's expert, or -1 if it has no expert.
        """
        return rank_TK

    def read_pairs(self, piece: OncePiece, arrived: Arrived, slots: int, rows: int,
                   anchor: Tensor | None) -> None:
        """Prepare a piece that receives `rows` rows from each source."""
        place, choices = self.placement, arrived.weights_RK.shape[1]
        # a source sends at most `slots` pairs, and at most K of them for each row
        most = place.comm.size * min(slots, rows * choices)
        piece.rows = bounded_plan(arrived, place.comm.rank * place.local, place.local, most)

    def _agree(self, rank_TK: Tensor, loaded: Loaded, slots: int,
               counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of rows for this rank's experts, and whether the rows of any rank
        exceeded the limit.

        Both returned tensors stay on the device.

        Args:
            rank_TK: int64 [T, K], the rank of each choice's expert, or -1 for choices without an
                expert.
            loaded: slots assigned to the routing choices.
            slots: maximum number of pairs from one rank to another, P.
            counts: bool scalar, True if the routing represents the actual load (`says_load`).
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
    """A dispatcher for bounded rows that sends each token's row only once to each node. A rank of
    the node forwards the row to the other ranks.

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
        """See `BoundedOnceDispatcher`. The pairs are also forwarded to the ranks of their experts.
        """
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
