"""Dispatch by all-to-all: what padded, ragged and Parm S2 dispatch have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from moe_plugin.comm import compiled
from moe_plugin.comm.compiled import Route
from moe_plugin.comm.functional import all_to_all
from moe_plugin.dispatch.base import Dispatcher
from moe_plugin.dispatch.overlap import PipelinedExchange
from moe_plugin.dispatch.pieces import ExchangePlan
from moe_plugin.kernels import combine_rows, gather_rows
from moe_plugin.records import ExpertRows, KeptRouting, Overlap, Placement


class ExchangeDispatcher(Dispatcher):
    """Rows out by all-to-all, through the experts, back by all-to-all. Subclasses give `plan`."""

    def __init__(self, placement: Placement, overlap: Overlap = Overlap()) -> None:
        super().__init__(placement, overlap)
        self.route = Route(placement.comm, placement.algorithm)

    @property
    def pieces(self) -> int:
        """Pieces into which a call's rows are split; under `torch.compile` one, because a graph
        runs one exchange after the other.
        """
        return 1 if torch.compiler.is_compiling() else self.overlap.pieces

    @abstractmethod
    def plan(self, kept: KeptRouting) -> ExchangePlan:
        """See `Dispatcher`."""

    def dispatch(self, x_TD: Tensor, plan: ExchangePlan,
                 anchor: Tensor | None) -> Iterable[ExpertRows]:
        """See `Dispatcher`."""
        rows_ND = gather_rows(x_TD, plan.source_N, plan.position_TK, plan.complete)
        background = self.overlap.background and not torch.compiler.is_compiling()
        if len(plan.pieces) == 1 and not background:
            piece = plan.pieces[0]
            rows_RD = self._exchange(self.own_part(rows_ND), piece.send, piece.recv, plan.even,
                                     anchor)
            return [piece.work(rows_RD, self.maps_rows)]
        pieces = rows_ND.split([self.sharers * sum(piece.send) for piece in plan.pieces])
        out = PipelinedExchange(self.placement, plan.pieces, plan.even, self.overlap)
        arriving = zip(plan.pieces, out.travel(map(self.own_part, pieces), anchor), strict=True)
        return (piece.work(rows, self.maps_rows) for piece, rows in arriving)

    def combine(self, outputs: Iterable[Tensor], plan: ExchangePlan,
                anchor: Tensor | None) -> Tensor:
        """See `Dispatcher`."""
        done = (piece.results(rows, self.maps_rows)
                for piece, rows in zip(plan.pieces, outputs, strict=True))
        if len(plan.pieces) == 1:
            piece = plan.pieces[0]
            rows_ND = self.all_parts(
                self._exchange(next(done), piece.recv, piece.send, plan.even, anchor))
        else:
            back = PipelinedExchange(self.placement, plan.pieces, plan.even, self.overlap,
                                     reverse=True)
            rows_ND = torch.cat([self.all_parts(rows) for rows in back.travel(done, anchor)])
        return self.weigh(rows_ND, plan)

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
