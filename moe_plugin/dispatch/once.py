"""Exact rows of which a token sends one to every rank, or every node, that has some of its experts.

With k experts per token `ragged` sends k rows, also where several of them are on one rank. Here a
token sends one row to each rank that has some (`dispatch.send: ranks`), with (expert, weight) pairs
beside it (`dispatch.bundles`). The experts read rows through a map; what they give is weighted and
summed there in float32, rounded once, and one row comes back. For even routing these are
W (1 - (1 - 1/W)^k) rows of a token in place of k.

`dispatch.send: nodes`: one row to each node, to the rank with the sender's place on it (all network
cards work, as in 2DH; on a smaller node with m ranks the place modulo m). That rank sends it on to
the ranks of its node, adds up what they give back, and returns one row. Rows between nodes travel
by `comm.all_to_all` (through one card a node with `leader`) and in `comm.wire`; inside a node they
travel as they are.

Backward is the mirror: the gradient of a token's output goes out once, that of its input comes back
once, summed; the gradients of gate weights are computed where the experts are, and come back as k
numbers. Sizes are agreed in `plan`, in an exchange that takes the way of the rows (`_Agreed`); the
host reads once, and in backward never. Rows of a piece have all their choices with them, so that
pieces are cut by rows or peers, never by experts.

Sources: DeepEP (deepseek-ai), which does this in kernels; HierMoE (arXiv 2508.09591).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.algorithms import algorithms
from moe_plugin.comm.functional import all_to_all
from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import DispatchContext, DispatchTraits, Sent, expand
from moe_plugin.dispatch.bundles import Arrived, Bundles, Pairs, first_of_each
from moe_plugin.dispatch.exchange import ExchangeDispatcher, by_piece
from moe_plugin.dispatch.pieces import (
    ExchangePlan,
    PieceShares,
    count_rows,
    order_by_piece,
    shares_along,
)
from moe_plugin.dispatch.rows import positions
from moe_plugin.dispatch.spill import spilled
from moe_plugin.kernels import combine_rows, gather_rows, weigh_rows
from moe_plugin.kernels.choices import expert_load
from moe_plugin.planner.spill import SpillPlan
from moe_plugin.records import ExpertRows, KeptRouting, RowPlan
from moe_plugin.utils.machine import to_device


@dataclass(frozen=True)
class Sizes:
    """Of one hop, by rank: rows to it and from it, pairs to it, and from it in every piece."""

    send: list[int]
    recv: list[int]
    pairs_out: list[int]
    pairs_in_PW: list[list[int]]

    @property
    def pairs_in(self) -> list[int]:
        """Pairs of all pieces from each rank."""
        return [sum(column) for column in zip(*self.pairs_in_PW, strict=True)]


@dataclass(frozen=True)
class Agreed:
    """All sizes of a call.

    Attributes:
        first: from tokens on.
        inner: of each piece inside a node, where rows go on; else empty.
        counts_PL: rows of this rank's experts in every piece.
    """

    first: Sizes
    inner: list[Sizes]
    counts_PL: list[list[int]]


@dataclass
class Forwarding:
    """Rows of a piece that arrived on a node, on to the ranks of it that have their experts.

    Attributes:
        source_N, position_RK: of these rows, see `kernels.rows`.
        anchor: see `comm.functional`.
    """

    place: Placement
    sizes: Sizes
    source_N: Tensor
    position_RK: Tensor
    anchor: Tensor | None

    def there(self, rows_RD: Tensor) -> Tensor:
        """Rows as they arrive on the ranks of their experts."""
        rows_ND = gather_rows(rows_RD, self.source_N, self.position_RK)
        return self._exchange(rows_ND, self.sizes.send, self.sizes.recv)

    def back(self, rows_ND: Tensor) -> Tensor:
        """What these ranks give for each row, summed."""
        rows_ND = self._exchange(rows_ND, self.sizes.recv, self.sizes.send)
        return combine_rows(rows_ND, None, self.source_N, self.position_RK)

    def _exchange(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return all_to_all(rows, self.place.comm, algorithms.get("linear"), send, recv, self.anchor)


@dataclass
class OncePiece:
    """Rows that travel together, as `dispatch.pieces.Piece`.

    Attributes:
        weights_first: gate weights are on the experts' inputs.
        rows, forwarding: set when pairs have arrived, before rows leave.
    """

    send: list[int]
    recv: list[int]
    local: bool
    weights_first: bool
    rows: RowPlan | None = None
    forwarding: Forwarding | None = None

    def work(self, rows_RD: Tensor, mapped: bool) -> ExpertRows:
        """See `Piece.work`; a row of several experts is taken through a map, or copied to each."""
        plan = self.rows
        if self.forwarding is not None:
            rows_RD = self.forwarding.there(rows_RD)
        if self.weights_first:
            rows_RD = weigh_rows(rows_RD, plan.weights_TK, plan.source_R, plan.position_TK)
        elif mapped:
            return ExpertRows(rows_RD, plan)
        else:
            rows_RD = gather_rows(rows_RD, plan.source_R, plan.position_TK, plan.complete)
        return ExpertRows(rows_RD, plan.counts)

    def results(self, rows_RD: Tensor, mapped: bool) -> Tensor:
        """See `Piece.results`: one for each row that arrived."""
        plan = self.rows
        if self.weights_first or not mapped:
            weights_TK = None if self.weights_first else plan.weights_TK
            rows_RD = combine_rows(rows_RD, weights_TK, plan.source_R, plan.position_TK,
                                   plan.complete)
        return rows_RD if self.forwarding is None else self.forwarding.back(rows_RD)


@dataclass(frozen=True)
class OncePlan(ExchangePlan):
    """Its `weights_TK` is None: results arrive weighted.

    Attributes:
        gates_TK: gate weights, differentiable.
        pairs: they and their experts, on their way.
        agreed: all sizes.
        width: experts of a rank, those that it borrows among them.
        spill: see `SpillingPlan`.
    """

    gates_TK: Tensor | None = None
    pairs: Pairs | None = None
    agreed: Agreed | None = None
    width: int = 0
    spill: SpillPlan | None = None


class OnceDispatcher(ExchangeDispatcher):
    """Once to every rank. Not registered: `dispatch.send` puts it in the place of a dispatcher that
    declares `sends_once`.
    """

    traits = DispatchTraits(supports_pieces=True, piece_axes=("rows", "peers"), spills=True,
                            sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.weights_first, self.planner = context.weights_first, context.spill_planner

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. Rows of borrowed experts lie apart."""
        return self.planner is None

    def plan(self, kept: KeptRouting) -> OncePlan:
        """See `Dispatcher`. One exchange of counts, and one copy of them from device to host; with
        a spill planner one more before them, since its plan says which rows there are.
        """
        place, comm = self.placement, self.placement.comm
        ids_TK, gates_TK = expand(place, kept.routing, kept.slots_TK)
        width, spill = place.local, None
        if self.planner is not None:
            ids_TK, width, spill = spilled(ids_TK, place, self.planner)
        rank_TK = torch.div(ids_TK, width, rounding_mode="floor")
        bundles = Bundles.of(self.next_rank(rank_TK), comm.size)
        shares = shares_along(self.overlap.piece_axis, self.overlap.pieces, comm.size, 1)
        table_WPL = self._table(ids_TK, rank_TK, width, bundles, shares)
        agreed = self.agree(table_WPL, bundles.rows_W)
        first = agreed.first
        send_PW1, recv_PW1 = (
            shares.parts([[rows] for rows in by_rank], comm.rank, outgoing)
            for by_rank, outgoing in ((first.send, True), (first.recv, False)))
        source_N = bundles.sources(sum(first.send))
        if shares.pieces > 1:
            source_N = source_N[order_by_piece(send_PW1, source_N)]
        complete = source_N.numel() == ids_TK.numel()
        pieces = tuple(
            OncePiece(*([rows for [rows] in by_rank] for by_rank in both), piece in shares.local,
                      self.weights_first)
            for piece, both in enumerate(zip(send_PW1, recv_PW1, strict=True)))
        pairs = Pairs.of(bundles, ids_TK, comm.size * width, first.pairs_out, first.pairs_in)
        plan = OncePlan(sum(map(sum, agreed.counts_PL)), source_N,
                        positions(source_N, ids_TK, complete), None, pieces, False, complete,
                        gates_TK, pairs, agreed, width, spill)
        count_rows(plan, place)
        return plan

    def dispatch(self, x_TD: Tensor, plan: OncePlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`. Pairs go first, in a small exchange of their own."""
        code_Q, weight_Q = plan.pairs.travel(plan.gates_TK, self.placement.comm, anchor)
        lengths = plan.agreed.first.pairs_in_PW
        parts = zip(by_piece(code_Q, lengths), by_piece(weight_Q, lengths), strict=True)
        choices = plan.gates_TK.shape[1]  # a router may choose an expert twice
        for number, (piece, part) in enumerate(zip(plan.pieces, parts, strict=True)):
            self.read_pairs(plan, number, Arrived.of(*part, sum(piece.recv), choices), anchor)
        return super().dispatch(x_TD, plan, anchor)

    def next_rank(self, rank_TK: Tensor) -> Tensor:
        """To which rank a choice goes next on its way to one, int64; -1: it has none."""
        return rank_TK

    def read_pairs(self, plan: OncePlan, number: int, arrived: Arrived,
                   anchor: Tensor | None) -> None:
        """What piece `number` needs for the rows that will arrive."""
        plan.pieces[number].rows = arrived.row_plan(self.placement.comm.rank * plan.width,
                                                    plan.agreed.counts_PL[number])

    def agree(self, table_WPL: Tensor, rows_W: Tensor) -> Agreed:
        """Sizes of all ranks that concern this one; collective.

        Args:
            table_WPL: see `_table`.
            rows_W: int64, rows to each rank.
        """
        size = self.placement.comm.size
        arriving = self.placement.comm.all_to_all(table_WPL.flatten(1))
        sent, got = torch.stack([table_WPL, arriving.view(table_WPL.shape)]).tolist()
        send, recv = ([sum(piece[0] for piece in row) for row in rows] for rows in (sent, got))
        pieces = range(table_WPL.shape[1])
        first = Sizes(send, recv, [pairs_of(row) for row in sent],
                      [[pairs_of([got[w][p]]) for w in range(size)] for p in pieces])
        return Agreed(first, [], [experts_of([row[p] for row in got]) for p in pieces])

    def _table(self, ids_TK: Tensor, rank_TK: Tensor, width: int, bundles: Bundles,
               shares: PieceShares) -> Tensor:
        """What ranks will compute of this rank's tokens, int64 [W, P, 1 + L]: in every piece its
        rows, and its pairs by local expert. width: L.
        """
        place, pieces = self.placement, shares.pieces
        cell_TK = rank_TK
        if pieces > 1:
            ranks = range(place.comm.size)
            share_WC = to_device([shares.shares((rank - place.comm.rank) % len(ranks), 0)
                                  for rank in ranks], ids_TK.device)
            cell_TK = rank_TK * pieces + bundles.pieces(share_WC)
        cell_TK = cell_TK * (1 + width)
        rows_TK = torch.where(first_of_each(rank_TK), cell_TK, -1)
        pairs_TK = torch.where(rank_TK >= 0, cell_TK + 1 + ids_TK % width, -1)
        both_M1 = torch.cat([rows_TK, pairs_TK]).reshape(-1, 1)
        shape = place.comm.size, pieces, 1 + width
        return expert_load(both_M1, shape[0] * shape[1] * shape[2]).view(shape)


def pairs_of(table_PL: Sequence[Sequence[int]]) -> int:
    """Pairs in some pieces of a table."""
    return sum(sum(row[1:]) for row in table_PL)


def experts_of(table_WL: Sequence[Sequence[int]]) -> list[int]:
    """Pairs of each expert from all ranks."""
    return [sum(column) for column in zip(*table_WL, strict=True)][1:]
