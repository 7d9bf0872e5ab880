"""All-gather dispatch: every rank gets all tokens of the group, computes its own experts' rows, and
the sums go back. No all-to-all.

Tokens, ids and gate weights are gathered in one exchange; one reduce-scatter adds the ranks' parts
up. Backward is the mirror: the gradient of the sums is gathered, those of tokens and gates come
back in one reduce-scatter (two where their dtypes differ). A sum's bytes do not grow with k: an
all-to-all sends more where k S is above W (S shards an expert, W ranks), and less below.

Under Megatron's sequence parallelism it is PPMoE's index-slice dispatch (Chen et al. 2023), with
the tensor-parallel all-reduce as its two halves. Elements that a rank sends, ring collectives: (W -
1) T (D + 2K) in and (W - 1) T D out forward, (W - 1) T D and (W - 1) T (D + K) backward.

Legend: T tokens here; A tokens of all ranks, W times the longest rank's; D width; K choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_plugin.comm.base import Comm
from moe_plugin.comm.coalesce import pack, unpack
from moe_plugin.comm.functional import reduce_scatter
from moe_plugin.dispatch.base import dispatchers
from moe_plugin.dispatch.index_slice import local_plan
from moe_plugin.records import Placement, Routing, RowPlan


@dispatchers.register("all_gather")
class AllGatherDispatcher:
    """Every rank gets all tokens and computes its own experts' rows; one all-gather and one
    reduce-scatter, no all-to-all.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def run(self, x_TD: Tensor, routing: Routing, experts: Callable[[Tensor, RowPlan], Tensor],
            anchor: Tensor | None) -> tuple[Tensor, int]:
        """(y_TD, rows computed here). experts: tokens and plan to tokens, for this rank's experts.
        """
        place, tokens = self.placement, x_TD.shape[0]
        if place.comm.size == 1:
            plan = local_plan(routing, place)
            return experts(x_TD, plan), plan.counts.total
        longest = int(place.comm.all_reduce(torch.tensor([tokens], device=x_TD.device), "max"))
        x_AD, weights_AK, ids_AK = _Gather.apply(x_TD, routing.weights_TK, routing.ids_TK, anchor,
                                                 place.comm, longest)
        plan = local_plan(dataclasses.replace(routing, ids_TK=ids_AK, weights_TK=weights_AK), place)
        return reduce_scatter(experts(x_AD, plan), place.comm)[:tokens], plan.counts.total


class _Gather(torch.autograd.Function):
    """All ranks' tokens, weights and ids, each rank's filled up to `longest` tokens that chose
    nothing.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, anchor: Tensor | None,
                comm: Comm, longest: int) -> tuple[Tensor, ...]:
        ctx.comm, ctx.tokens, ctx.dtypes = comm, x_TD.shape[0], (x_TD.dtype, weights_TK.dtype)
        missing = (0, 0, 0, longest - x_TD.shape[0])
        packed, layout = pack(
            [pad(x_TD, missing),
             pad(weights_TK, missing),
             pad(ids_TK, missing, value=-1)])
        x_AD, weights_AK, ids_AK = unpack(comm.all_gather(packed), layout)
        ctx.mark_non_differentiable(ids_AK)
        return x_AD, weights_AK, ids_AK

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_AK: Tensor, _ids: Any) -> tuple[Any, ...]:
        width, comm = grad_AD.shape[1], ctx.comm
        if grad_AD.dtype == grad_AK.dtype:
            mine_TD, mine_TK = comm.reduce_scatter(torch.cat([grad_AD, grad_AK], dim=1)).split(
                [width, grad_AK.shape[1]], dim=1)
        else:  # the gates' gradients keep their precision
            mine_TD, mine_TK = comm.reduce_scatter(grad_AD.contiguous()), comm.reduce_scatter(
                grad_AK.contiguous())
        return mine_TD[:ctx.tokens].to(ctx.dtypes[0]), mine_TK[:ctx.tokens].to(
            ctx.dtypes[1]), None, None, None, None
