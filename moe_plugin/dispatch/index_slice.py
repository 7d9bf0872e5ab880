"""Index-slice dispatch (PPMoE): experts inside a group of ranks that all hold the same tokens. No
all-to-all.

Every rank routes alike, computes the rows of its own experts and adds them up; one all-reduce makes
the parts whole, the one that a dense feed-forward layer under tensor parallelism pays anyway.
Backward is one all-reduce of the input's gradient, in which the gates' gradients travel along: so
the router's gradients, those of the balance losses included, are whole and equal on all ranks.

Source: Chen et al. 2023 (PPMoE). Elements a rank and direction: ring all-reduce of T D forward, T
(D + K) backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from moe_plugin.comm.regions import enter, sum_parts
from moe_plugin.dispatch.base import dispatchers
from moe_plugin.dispatch.ragged import exact_rows
from moe_plugin.records import Placement, Routing, RowPlan


@dispatchers.register("index_slice")
class IndexSliceDispatcher:
    """For tensor-parallel ranks that hold the same tokens: own experts' rows are computed in place,
    one all-reduce sums them.
    """

    same_tokens = True

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def run(self, x_TD: Tensor, routing: Routing, experts: Callable[[Tensor, RowPlan], Tensor],
            anchor: Tensor | None) -> tuple[Tensor, int]:
        """(y_TD, rows computed here), y equal on all ranks. experts: tokens and plan to tokens, for
        this rank's experts.
        """
        place = self.placement
        x_TD, weights_TK = enter(x_TD, routing.weights_TK, anchor, place.comm)
        plan = local_plan(dataclasses.replace(routing, weights_TK=weights_TK), place)
        return sum_parts(experts(x_TD, plan), place.comm), plan.counts.total


def local_plan(routing: Routing, place: Placement) -> RowPlan:
    """The rows of this rank's experts (or of its slices of them)."""
    ids_TK = routing.ids_TK - place.first_expert
    mine_TK = (ids_TK >= 0) & (ids_TK < place.local) & (routing.ids_TK >= 0)
    return exact_rows(torch.where(mine_TK, ids_TK, -1), routing.weights_TK, place.local)
