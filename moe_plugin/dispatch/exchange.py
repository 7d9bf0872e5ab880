"""The base class of all-to-all dispatchers, and classes that divide an exchange into pieces.

With several pieces, the exchange of one piece overlaps with the computation of another piece in
both the forward and the backward pass (Tutel's adaptive pipelining). The forward pass starts
sending all pieces immediately. Each piece is computed as soon as it has arrived, and its outputs
are sent back immediately. The last step of the forward pass waits for the outputs of all pieces.
The backward pass runs the exchanges of the forward pass in reverse, and may group the pieces
differently. Rows are divided into `lcm(d, d_backward)` pieces, and each exchange sends one group of
pieces. Pieces that stay on their rank are not part of any group.

Rows are stored in the exchange object instead of being passed through autograd. One autograd node
sends a piece, and another node receives it. A scalar token connects the two nodes, so that the
first node can finish before its rows have arrived. Autograd runs nodes in the reverse order of
their creation, so all ranks send the pieces in the same order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_plugin.comm import graph_ops
from moe_plugin.comm.base import Comm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.functional import all_to_all
from moe_plugin.comm.graph_ops import Route
from moe_plugin.comm.handles import Series
from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import DispatchContext, Dispatcher, Overlap, Sent
from moe_plugin.dispatch.pieces import ExchangePlan, RowsPiece
from moe_plugin.kernels import combine_rows, gather_rows
from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.records import ExpertRows, KeptRouting

ExchangePlanT = TypeVar("ExchangePlanT", bound=ExchangePlan)


class PipelinedExchange:
    """The exchange of all pieces of a plan. The object sends both rows and their gradients.

    Args:
        placement: the ranks that store each expert, and the all-to-all algorithm.
        pieces: pieces with their numbers of rows to send to and receive from each rank.
        even: True if every rank sends the same number of rows to every rank (`ExchangePlan.even`).
        overlap: number of groups of pieces in the forward pass and in the backward pass.
        reverse: True if the exchange returns outputs to the ranks of their tokens.
    """

    def __init__(self, placement: Placement, pieces: Sequence[RowsPiece], even: bool,
                 overlap: Overlap, reverse: bool = False) -> None:
        there = [_Sizes(p.recv, p.send, p.local) if reverse else _Sizes(p.send, p.recv, p.local)
                 for p in pieces]
        algorithm = placement.algorithm.back if reverse else placement.algorithm
        self.forward = _Direction(placement.comm, algorithm, there, overlap.forward, even)
        # autograd reverses the order of the nodes, so backward puts in the last piece first
        self.backward = _Direction(
            placement.comm, algorithm.back, [_Sizes(p.recv, p.send, p.local) for p in there],
            overlap.backward or overlap.forward, even, last_first=True)

    def post(self, number: int, rows_ND: Tensor, anchor: Tensor | None) -> Tensor:
        """Send a piece and return a scalar token, which must be passed to `take`. Call this method
        once for each piece, in the order of the pieces.

        Args:
            number: index of the piece.
            rows_ND: [N, D], the rows of the piece.
            anchor: parameter that connects the exchange to the autograd graph (`comm.functional`).
                Optional.
        """
        return _Send.apply(self, number, rows_ND, anchor)

    def take(self, number: int, token: Tensor) -> Tensor:
        """Wait for the rows of a piece, and return them. `token` was returned by `post`."""
        return _Receive.apply(self, number, token)


class _Sizes(NamedTuple):
    """The row counts of a piece per rank, and whether the piece stays on its rank."""

    send: list[int]
    recv: list[int]
    local: bool


class _Direction:
    """One direction of an exchange: it either sends rows or returns outputs. `put` sends pieces in
    groups, and `take` returns received pieces.

    Args:
        comm: the ranks.
        algorithm: all-to-all algorithm to use.
        pieces: row counts of the pieces.
        groups: number of groups of pieces.
        even: True if every rank sends the same number of rows to every rank.
        last_first: True if pieces are passed to `put` in reverse order.
    """

    def __init__(self, comm: Comm, algorithm: Exchange, pieces: Sequence[_Sizes], groups: int,
                 even: bool, last_first: bool = False) -> None:
        self.comm, self.algorithm, self.pieces, self.even = comm, algorithm, pieces, even
        # a piece that stays on its rank needs no exchange
        travelling = [number for number, piece in enumerate(pieces) if not piece.local]
        size = -(-len(travelling) // groups)
        self.members = [travelling[i : i + size] for i in range(0, len(travelling), size)]
        if last_first:
            self.members.reverse()
        self.group_of = {n: group for group, members in enumerate(self.members) for n in members}
        self.task: int | None = None  # autograd's number of the running backward; -1 in forward
        self._begin()

    def _begin(self) -> None:
        self.waiting: dict[int, Tensor] = {}
        self.series: Series | None = None
        self.arrived: dict[int, Tensor] = {}

    def put(self, number: int, rows: Tensor) -> None:
        """Add a piece to its group. The last piece of a group starts the group's exchange."""
        task = torch._C._current_graph_task_id()
        if task != self.task:  # another pass over this graph; an aborted pass may have left pieces
            self.task = task
            self._begin()
        if self.pieces[number].local:
            self.arrived[number] = rows
            return
        self.waiting[number] = rows
        members = self.members[self.group_of[number]]
        # A group is one exchange. All ranks put pieces in the same order and start a group with
        # its last piece, so they also start the groups in the same order.
        if any(n not in self.waiting for n in members):
            return
        if self.series is None:
            sends = [_sum([self.pieces[n].send for n in group]) for group in self.members]
            recvs = [_sum([self.pieces[n].recv for n in group]) for group in self.members]
            self.series = Series(self.comm, self.algorithm, sends, recvs, self.even)
        buffer = _by_rank([self.waiting.pop(n) for n in members],
                          [self.pieces[n].send for n in members])
        self.series.put(self.group_of[number], buffer)

    def take(self, number: int) -> Tensor:
        """Wait for a piece and return its rows."""
        if number not in self.arrived:
            members = self.members[self.group_of[number]]
            assert self.series is not None  # all pieces are put before the first is taken
            rows = self.series.take(self.group_of[number])
            parts = by_piece(rows, [self.pieces[n].recv for n in members])
            self.arrived.update(zip(members, parts, strict=True))
        return self.arrived.pop(number)


def _sum(lengths: Sequence[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*lengths, strict=True)]


def _by_rank(parts: Sequence[Tensor], lengths: Sequence[list[int]]) -> Tensor:
    """Merge pieces into one buffer. The rows of each piece and of the buffer are ordered by rank.
    """
    if len(parts) == 1:
        return parts[0].contiguous()
    split = [part.split(length) for part, length in zip(parts, lengths, strict=True)]
    return torch.cat([piece[rank] for rank in range(len(lengths[0])) for piece in split])


def by_piece(rows: Tensor, lengths: Sequence[list[int]]) -> list[Tensor]:
    """Divide a buffer whose rows are ordered by rank into pieces, the inverse of `_by_rank`.

    Args:
        rows: the rows of all pieces.
        lengths: for each piece, a list with its number of rows for each rank.
    """
    if len(lengths) == 1:
        return [rows]
    ranks = len(lengths[0])
    split = rows.split(
        [lengths[piece][rank] for rank in range(ranks) for piece in range(len(lengths))])
    return [torch.cat(split[piece :: len(lengths)]) for piece in range(len(lengths))]


class _Send(torch.autograd.Function):
    """Autograd function that sends the rows of a piece and returns a scalar token. The backward
    pass waits for the gradients of the rows.
    """

    @staticmethod
    def forward(ctx: Any, exchange: PipelinedExchange, number: int, rows: Tensor,
                anchor: Tensor | None) -> Tensor:
        ctx.exchange, ctx.number = exchange, number
        # detached, because gradients return through `exchange.backward` instead of autograd
        exchange.forward.put(number, rows.detach())
        return rows.new_zeros(())

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, token: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.exchange.backward.take(ctx.number), None


class _Receive(torch.autograd.Function):
    """Autograd function that receives the rows of a piece, given its scalar token. The backward
    pass sends the gradients of the rows.
    """

    @staticmethod
    def forward(ctx: Any, exchange: PipelinedExchange, number: int, token: Tensor) -> Tensor:
        ctx.exchange, ctx.number = exchange, number
        return exchange.forward.take(number)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.exchange.backward.put(ctx.number, grad)
        return None, None, grad.new_zeros(())


class SentPieces(Sent):
    """Rows that are sent in several pieces. The outputs of a piece are sent back while the next
    piece is computed.

    Args:
        arriving: iterator that yields the rows for the experts, one piece at a time (`Sent`).
        anchor: anchor that was passed to `Dispatcher.dispatch`.
        plan: the plan of the call.
        mapped: True if the experts write their outputs in arrival order of the rows
            (`Piece.results`).
        back: exchange that sends the outputs back.
    """

    def __init__(self, arriving: Iterable[ExpertRows], anchor: Tensor | None, plan: ExchangePlan,
                 mapped: bool, back: PipelinedExchange) -> None:
        super().__init__(arriving, anchor)
        self.plan, self.mapped, self.back = plan, mapped, back

    def put_back(self, result: Tensor) -> None:
        """See `Sent`. Only the scalar token of the exchange is stored, not the rows."""
        number = len(self.results)  # results are put back in the order of the pieces
        rows_RD = self.plan.pieces[number].results(result, self.mapped)
        self.results.append(self.back.post(number, rows_RD, self.anchor))

    def returned(self) -> Iterator[Tensor]:
        """Return an iterator over the outputs [N, D] of each piece on the rank of its tokens.

        The iterator waits for the pieces one by one.
        """
        return (self.back.take(number, token) for number, token in enumerate(self.results))


class ExchangeDispatcher(Dispatcher[ExchangePlanT]):
    """Base class of dispatchers that send rows with an all-to-all. Subclasses implement `plan`."""

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.route = Route(self.placement.comm, self.placement.algorithm)

    @property
    def pieces(self) -> int:
        """Number of pieces per call.

        Under `torch.compile`, the number is 1, because a compiled graph runs one exchange at a
        time.
        """
        return 1 if torch.compiler.is_compiling() else self.overlap.pieces

    @abstractmethod
    def plan(self, kept: KeptRouting) -> ExchangePlanT:
        """See `Dispatcher`."""

    def dispatch(self, x_TD: Tensor, plan: ExchangePlanT, anchor: Tensor | None) -> Sent:
        rows_ND = gather_rows(x_TD, plan.source_N, plan.position_TK, plan.complete)
        background = self.overlap.background and not torch.compiler.is_compiling()
        # one piece without other work has nothing to overlap with
        if len(plan.pieces) == 1 and not background:
            piece = plan.pieces[0]
            rows_RD = self._exchange(self.route, self.own_part(rows_ND), piece.send, piece.recv,
                                     plan.even, anchor)
            return Sent([piece.work(rows_RD, self.maps_rows)], anchor)
        arriving = self._in_background(rows_ND, plan, anchor)
        if len(plan.pieces) == 1:
            return Sent(arriving, anchor)
        back = PipelinedExchange(self.placement, plan.pieces, plan.even, self.overlap, reverse=True)
        return SentPieces(arriving, anchor, plan, self.maps_rows, back)

    def combine(self, sent: Sent, plan: ExchangePlanT) -> Tensor:
        if isinstance(sent, SentPieces):
            rows_ND = torch.cat([self.all_parts(rows) for rows in sent.returned()])
        else:
            [piece], [result] = plan.pieces, sent.results
            rows_ND = self.all_parts(self._exchange(
                self.route.back, piece.results(result, self.maps_rows), piece.recv, piece.send,
                plan.even, sent.anchor))
        return self.weigh(rows_ND, plan)

    def _in_background(self, rows_ND: Tensor, plan: ExchangePlan,
                       anchor: Tensor | None) -> Iterable[ExpertRows]:
        """Send all pieces, and return an iterator over their received rows for the experts."""
        parts = rows_ND.split([self.sharers * sum(piece.send) for piece in plan.pieces])
        out = PipelinedExchange(self.placement, plan.pieces, plan.even, self.overlap)
        # all pieces are posted before the first one is awaited
        tokens = [out.post(number, self.own_part(part), anchor)
                  for number, part in enumerate(parts)]
        return (piece.work(out.take(number, tokens[number]), self.maps_rows)
                for number, piece in enumerate(plan.pieces))

    def weigh(self, rows_ND: Tensor, plan: ExchangePlanT) -> Tensor:
        """Return the weighted sum of the rows of each token, [T, D]."""
        return combine_rows(rows_ND, plan.weights_TK, plan.source_N, plan.position_TK,
                            plan.complete)

    @property
    def maps_rows(self) -> bool:
        """True if the experts use an index to read rows in arrival order (`Piece.work`)."""
        return True

    @property
    def sharers(self) -> int:
        """Number of ranks that have the same tokens and divide the tokens' rows among themselves.
        """
        return 1

    def own_part(self, rows_ND: Tensor) -> Tensor:
        """Return the part [N, D] of a piece's rows [sharers * N, D] that this rank processes."""
        return rows_ND

    def all_parts(self, rows_ND: Tensor) -> Tensor:
        """Apply the inverse of `own_part` to returned rows."""
        return rows_ND

    def _exchange(self, route: Route, rows: Tensor, send: list[int], recv: list[int], even: bool,
                  anchor: Tensor | None) -> Tensor:
        sent, got = (None, None) if even else (send, recv)
        if torch.compiler.is_compiling():
            return graph_ops.all_to_all(rows, anchor, route.key, sent, got)
        return all_to_all(rows, route.comm, route.algorithm, sent, got, anchor)
