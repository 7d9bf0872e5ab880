"""A dispatcher that sends a token's row only once to each rank, or to each node, that has experts
of the token.

For a token with k experts, `ragged` sends k rows, even if several of these experts are on the same
rank.
With `dispatch.send: ranks`, a token is sent as one row to each rank that has at least one of its
experts. The row is accompanied by (expert, weight) pairs (`dispatch.bundles`). The experts use an
index to read the rows. The rank of the experts multiplies their outputs by the gate weights, sums
the products in float32, rounds the sum once, and returns it as one row. If tokens are distributed
evenly over W ranks, `W (1 - (1 - 1/W)^k)` rows are sent per token instead of k.

With `dispatch.send: nodes`, a token is sent as one row to each node. The row is received by the
rank that has the same local rank as the sender (modulo m on a smaller node with m ranks). As in
2DH, all network cards are therefore used. The receiving rank forwards the row to the ranks of its
node, sums their outputs, and returns the sum as one row. Between nodes, rows are sent with the
algorithm set by `comm.all_to_all` (`leader` uses one network card per node) and in the format set
by `comm.wire`. Within a node, rows are sent in their original dtype.

The backward pass runs the exchanges of the forward pass in reverse. The gradient of a token's
output is sent only once, and the gradients of the token's input are summed before they are
returned. The ranks of the experts compute the gradients of the gate weights and return them as k
values per token. `plan` determines all row and pair counts with an exchange that takes the same
path as the rows (`Agreed`). The host waits for the device once in the forward pass, and never in
the backward pass. All pairs that share a row must be in the same piece. Rows can therefore be split
into pieces along the `rows` and `peers` axes, but not along the `experts` axis.

Sources: DeepEP (deepseek-ai), which implements this in GPU kernels; HierMoE (arXiv 2508.09591).
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
    """The row and pair counts of one exchange.

    Attributes:
        send: number of rows sent to each rank.
        recv: number of rows received from each rank.
        pairs_out: number of pairs sent to each rank.
        pairs_in_PW: for each piece, number of pairs received from each rank.
    """

    send: list[int]
    recv: list[int]
    pairs_out: list[int]
    pairs_in_PW: list[list[int]]

    @property
    def pairs_in(self) -> list[int]:
        """Total number of pairs received from each rank, over all pieces."""
        return [sum(column) for column in zip(*self.pairs_in_PW, strict=True)]


@dataclass(frozen=True)
class Agreed:
    """All row and pair counts of one call, on which the ranks agree.

    Attributes:
        first: sizes of the first exchange, in which each rank sends its own tokens.
        inner: for each piece, sizes of the exchange within the node. If rows are not forwarded,
            `inner` is an empty list.
        counts_PL: for each piece, number of rows of each expert on this rank.
    """

    first: Sizes
    inner: list[Sizes]
    counts_PL: list[list[int]]


@dataclass
class Forwarding:
    """Forwards the received rows of a piece to the ranks of the node that store the experts.

    Attributes:
        place: the ranks that store each expert.
        sizes: sizes of the exchange within the node.
        source_N: int64 [N], the routing choice for which each row is forwarded (`kernels.rows`).
        position_RK: int64 [R, K], the forwarded row of each routing choice, or -1 for no row.
        anchor: parameter that connects the exchange to the autograd graph (`comm.functional`).
    """

    place: Placement
    sizes: Sizes
    source_N: Tensor
    position_RK: Tensor
    anchor: Tensor | None

    def there(self, rows_RD: Tensor) -> Tensor:
        """Send the rows to the ranks of their experts, and return the rows that this rank receives.
        """
        rows_ND = gather_rows(rows_RD, self.source_N, self.position_RK)
        return self._exchange(rows_ND, self.sizes.send, self.sizes.recv)

    def back(self, rows_ND: Tensor) -> Tensor:
        """Send outputs to the forwarding ranks, and return the sum of the outputs for each row."""
        rows_ND = self._exchange(rows_ND, self.sizes.recv, self.sizes.send)
        return combine_rows(rows_ND, None, self.source_N, self.position_RK)

    def _exchange(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        return all_to_all(rows, self.place.comm, algorithms.get("linear"), send, recv, self.anchor)


@dataclass
class OncePiece:
    """A piece of rows that are sent together, with the same interface as `dispatch.pieces.Piece`.

    Attributes:
        send: number of rows sent to each rank.
        recv: number of rows received from each rank.
        local: True if all rows of the piece stay on their rank.
        weights_first: True if the experts' inputs, not outputs, are multiplied by the gate weights.
        rows: plan that maps the received rows to the experts. Set when the pairs have arrived.
        forwarding: object that forwards the rows within a node, or None if rows are not forwarded.
    """

    send: list[int]
    recv: list[int]
    local: bool
    weights_first: bool
    rows: RowPlan | None = None
    forwarding: Forwarding | None = None

    def work(self, rows_RD: Tensor, mapped: bool) -> ExpertRows:
        """See `Piece.work`. The experts read rows through an index or receive copies."""
        plan = self.rows
        assert plan is not None
        if self.forwarding is not None:
            rows_RD = self.forwarding.there(rows_RD)
        # with weights on the inputs, each expert needs a separate copy of the row
        if self.weights_first:
            rows_RD = weigh_rows(rows_RD, plan.weights_TK, plan.source_R, plan.position_TK)
        elif mapped:
            return ExpertRows(rows_RD, plan)
        else:
            rows_RD = gather_rows(rows_RD, plan.source_R, plan.position_TK, plan.complete)
        return ExpertRows(rows_RD, plan.counts)

    def results(self, rows_RD: Tensor, mapped: bool) -> Tensor:
        """See `Piece.results`. The returned tensor has one row per received row."""
        plan = self.rows
        assert plan is not None
        if self.weights_first or not mapped:
            weights_TK = None if self.weights_first else plan.weights_TK
            rows_RD = combine_rows(rows_RD, weights_TK, plan.source_R, plan.position_TK,
                                   plan.complete)
        return rows_RD if self.forwarding is None else self.forwarding.back(rows_RD)


@dataclass(frozen=True, kw_only=True)
class OncePlan(ExchangePlan):
    """The plan of a call in which each token's row is sent only once to each rank or node.
    `weights_TK` is None, because outputs are multiplied by the gate weights before they are sent
    back.

    Attributes:
        gates_TK: gate weights of the routing choices. They require gradients.
        pairs: encoded (expert, weight) pairs to send.
        agreed: all row and pair counts of the call.
        width: number of experts per rank, including borrowed experts.
        spill: plan that determines which rank computes each row, as in `SpillingPlan.spill`.
    """

    pieces: tuple[OncePiece, ...]
    gates_TK: Tensor
    pairs: Pairs
    agreed: Agreed
    width: int
    spill: SpillPlan | None = None


class OnceDispatcher(ExchangeDispatcher[OncePlan]):
    """A dispatcher that sends each token's row only once to each rank.

    `OnceDispatcher` is not registered under a name. If `dispatch.send` is set, this dispatcher
    replaces a configured dispatcher that declares `sends_once`.
    """

    traits = DispatchTraits(supports_pieces=True, piece_axes=("rows", "peers"), spills=True,
                            sends_once=True)

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.weights_first, self.planner = context.weights_first, context.spill_planner

    @property
    def maps_rows(self) -> bool:
        """See `ExchangeDispatcher`. False if the rows of borrowed experts are computed separately.
        """
        return self.planner is None

    def plan(self, kept: KeptRouting) -> OncePlan:
        """See `Dispatcher`.

        The plan requires one exchange of counts and one copy from device to host. With a spill
        planner, a second exchange and a second copy are needed, because the planner decides which
        rank computes each row.
        """
        place, comm = self.placement, self.placement.comm
        ids_TK, gates_TK = expand(place, kept.routing, kept.slots_TK)
        width, spill = place.local, None
        if self.planner is not None:
            # the ids become rank * width + local expert, for the rank that computes the row
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
        # pairs stay in the order of targets: they are sent before all pieces, in one exchange
        if shares.pieces > 1:
            source_N = source_N[order_by_piece(send_PW1, source_N)]
        complete = source_N.numel() == ids_TK.numel()
        pieces = tuple(
            OncePiece([rows for [rows] in send_W1], [rows for [rows] in recv_W1],
                      piece in shares.local, self.weights_first)
            for piece, (send_W1, recv_W1) in enumerate(zip(send_PW1, recv_PW1, strict=True)))
        pairs = Pairs.of(bundles, ids_TK, comm.size * width, first.pairs_out, first.pairs_in)
        plan = OncePlan(sum(map(sum, agreed.counts_PL)), source_N,
                        positions(source_N, ids_TK, complete), None, False, complete,
                        pieces=pieces, gates_TK=gates_TK, pairs=pairs, agreed=agreed, width=width,
                        spill=spill)
        count_rows(plan, place)
        return plan

    def dispatch(self, x_TD: Tensor, plan: OncePlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`. The (expert, weight) pairs are sent before the rows."""
        code_Q, weight_Q = plan.pairs.travel(plan.gates_TK, self.placement.comm, anchor)
        lengths = plan.agreed.first.pairs_in_PW
        parts = zip(by_piece(code_Q, lengths), by_piece(weight_Q, lengths), strict=True)
        choices = plan.gates_TK.shape[1]  # a router may choose an expert twice
        for number, (piece, part) in enumerate(zip(plan.pieces, parts, strict=True)):
            self.read_pairs(plan, number, Arrived.of(*part, sum(piece.recv), choices), anchor)
        return super().dispatch(x_TD, plan, anchor)

    def next_rank(self, rank_TK: Tensor) -> Tensor:
        """Return the rank that receives each routing choice in the first exchange, int64, or -1 for
        choices without an expert.

        Args:
            rank_TK: int64 [T, K], the rank of each choice's expert, or -1 if it has no expert.
        """
        return rank_TK

    def read_pairs(self, plan: OncePlan, number: int, arrived: Arrived,
                   anchor: Tensor | None) -> None:
        """Prepare piece `number` for the rows that it will receive."""
        plan.pieces[number].rows = arrived.row_plan(self.placement.comm.rank * plan.width,
                                                    plan.agreed.counts_PL[number])

    def agree(self, table_WPL: Tensor, rows_W: Tensor) -> Agreed:
        """Exchange the row and pair counts of a call. Collective.

        Args:
            table_WPL: row and pair counts for this rank's tokens; see `_table`.
            rows_W: int64 [W], the number of rows sent to each rank.
        """
        size = self.placement.comm.size
        # an even exchange, whose sizes all ranks know
        arriving = self.placement.comm.all_to_all(table_WPL.flatten(1))
        sent, got = torch.stack([table_WPL, arriving.view(table_WPL.shape)]).tolist()
        send, recv = ([sum(piece[0] for piece in row) for row in rows] for rows in (sent, got))
        pieces = range(table_WPL.shape[1])
        first = Sizes(send, recv, [pairs_of(row) for row in sent],
                      [[pairs_of([got[w][p]]) for w in range(size)] for p in pieces])
        return Agreed(first, [], [experts_of([row[p] for row in got]) for p in pieces])

    def _table(self, ids_TK: Tensor, rank_TK: Tensor, width: int, bundles: Bundles,
               shares: PieceShares) -> Tensor:
        """Return the row and pair counts for this rank's tokens, int64 [W, P, 1 + L].

        For each rank and piece, the first column contains the number of rows, and the other columns
        contain the numbers of pairs for each local expert. `width` is L.
        """
        place, pieces = self.placement, shares.pieces
        cell_TK = rank_TK
        if pieces > 1:
            ranks = range(place.comm.size)
            share_WC = to_device([shares.shares((rank - place.comm.rank) % len(ranks), 0)
                                  for rank in ranks], ids_TK.device)
            cell_TK = rank_TK * pieces + bundles.pieces(share_WC)
        cell_TK = cell_TK * (1 + width)
        # a token with several experts on a rank counts as one row there, but as several pairs
        rows_TK = torch.where(first_of_each(rank_TK), cell_TK, -1)
        pairs_TK = torch.where(rank_TK >= 0, cell_TK + 1 + ids_TK % width, -1)
        both_M1 = torch.cat([rows_TK, pairs_TK]).reshape(-1, 1)
        shape = place.comm.size, pieces, 1 + width
        return expert_load(both_M1, shape[0] * shape[1] * shape[2]).view(shape)


def pairs_of(table_PL: Sequence[Sequence[int]]) -> int:
    """Return the total number of pairs in the given pieces of a table."""
    return sum(sum(row[1:]) for row in table_PL)


def experts_of(table_WL: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of pairs for each expert, summed over all ranks."""
    return [sum(column) for column in zip(*table_WL, strict=True)][1:]
