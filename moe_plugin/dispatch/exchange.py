"""Dispatch by all-to-all: what padded, ragged and Parm S2 dispatch have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from moe_plugin.comm import compiled
from moe_plugin.comm.compiled import Route
from moe_plugin.comm.functional import all_to_all
from moe_plugin.dispatch.base import DispatchContext, Dispatcher, Sent
from moe_plugin.dispatch.overlap import PipelinedExchange
from moe_plugin.dispatch.pieces import ExchangePlan
from moe_plugin.kernels import combine_rows, gather_rows
from moe_plugin.records import ExpertRows, KeptRouting


class SentPieces(Sent):
    """Several pieces: the results of each travel back while the next one is computed.

    Args:
        arriving, anchor: see `Sent`. plan: of the call. mapped: see `Piece.results`.
        back: the exchange by which results travel.
    """

    def __init__(self, arriving: Iterable[ExpertRows], anchor: Tensor | None, plan: ExchangePlan,
                 mapped: bool, back: PipelinedExchange) -> None:
        super().__init__(arriving, anchor)
        self.plan, self.mapped, self.back = plan, mapped, back

    def put_back(self, result: Tensor) -> None:
        """See `Sent`; a token of the exchange takes the place of the result."""
        number = len(self.results)
        rows_RD = self.plan.pieces[number].results(result, self.mapped)
        self.results.append(self.back.post(number, rows_RD, self.anchor))

    def returned(self) -> list[Tensor]:
        """The rows of every piece where they came from, [N, D] each; waits for them."""
        return [self.back.take(number, token) for number, token in enumerate(self.results)]


class ExchangeDispatcher(Dispatcher):
    """Rows out by all-to-all, through the experts, back by all-to-all. Subclasses give `plan`."""

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.route = Route(self.placement.comm, self.placement.algorithm)

    @property
    def pieces(self) -> int:
        """Pieces into which a call's rows are split; under `torch.compile` one, because a graph
        runs one exchange after the other.
        """
        return 1 if torch.compiler.is_compiling() else self.overlap.pieces

    @abstractmethod
    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`."""

    def dispatch(self, x_TD: Tensor, plan: ExchangePlan, anchor: Tensor | None) -> Sent:
        rows_ND = gather_rows(x_TD, plan.source_N, plan.position_TK, plan.complete)
        background = self.overlap.background and not torch.compiler.is_compiling()
        if len(plan.pieces) == 1 and not background:
            piece = plan.pieces[0]
            rows_RD = self._exchange(self.own_part(rows_ND), piece.send, piece.recv, plan.even,
                                     anchor)
            return Sent([piece.work(rows_RD, self.maps_rows)], anchor)
        arriving = self._in_background(rows_ND, plan, anchor)
        if len(plan.pieces) == 1:
            return Sent(arriving, anchor)
        back = PipelinedExchange(self.placement, plan.pieces, plan.even, self.overlap, reverse=True)
        return SentPieces(arriving, anchor, plan, self.maps_rows, back)

    def combine(self, sent: Sent, plan: ExchangePlan) -> Tensor:
        if isinstance(sent, SentPieces):
            rows_ND = torch.cat([self.all_parts(rows) for rows in sent.returned()])
        else:
            [piece], [result] = plan.pieces, sent.results
            rows_ND = self.all_parts(self._exchange(piece.results(result, self.maps_rows),
                                                    piece.recv, piece.send, plan.even, sent.anchor))
        return self.weigh(rows_ND, plan)

    def _in_background(self, rows_ND: Tensor, plan: ExchangePlan,
                       anchor: Tensor | None) -> Iterable[ExpertRows]:
        """All pieces start to travel now; work of each when it has arrived."""
        parts = rows_ND.split([self.sharers * sum(piece.send) for piece in plan.pieces])
        out = PipelinedExchange(self.placement, plan.pieces, plan.even, self.overlap)
        tokens = [out.post(number, self.own_part(part), anchor)
                  for number, part in enumerate(parts)]
        return (piece.work(out.take(number, tokens[number]), self.maps_rows)
                for number, piece in enumerate(plan.pieces))

    def weigh(self, rows_ND: Tensor, plan: ExchangePlan) -> Tensor:
        """Each token's rows weighted and summed, [T, D]."""
        return combine_rows(rows_ND, plan.weights_TK, plan.source_N, plan.position_TK,
                            plan.complete)

    @property
    def maps_rows(self) -> bool:
        """Whether experts take rows as they arrived, see `Piece.work`."""
        return True

    @property
    def sharers(self) -> int:
        """Ranks that share out the rows of their tokens."""
        return 1

    def own_part(self, rows_ND: Tensor) -> Tensor:
        """Of a piece [sharers * N, D] the rows that this rank sends, [N, D]."""
        return rows_ND

    def all_parts(self, rows_ND: Tensor) -> Tensor:
        """The inverse of `own_part`, on the rows that came back."""
        return rows_ND

    def _exchange(self, rows: Tensor, send: list[int], recv: list[int], even: bool,
                  anchor: Tensor | None) -> Tensor:
        splits = (None, None) if even else (send, recv)
        if torch.compiler.is_compiling():
            return compiled.all_to_all(rows, anchor, self.route.key, *splits)
        return all_to_all(rows, self.placement.comm, self.placement.algorithm, *splits, anchor)
