"""All-gather dispatch: every rank gets all tokens, computes its own experts' rows, and the sums go
back, without an all-to-all.

The experts' ids are gathered first, so that all sizes are known; then tokens and gate weights in
one exchange. One reduce-scatter adds the ranks' parts up. Backward is the mirror: the gradient of
the sums is gathered, those of tokens and gate weights come back in one reduce-scatter (two where
their dtypes differ). A sum's bytes do not grow with k: an all-to-all sends more where k S is above
W (S shards per expert, W ranks), and less below.

Under Megatron's sequence parallelism it is PPMoE's index-slice dispatch (Chen et al. 2023), with
the tensor-parallel all-reduce as its two halves. Elements that a rank sends, ring collectives:
(W - 1) T (D + 2K) in and (W - 1) T D out forward, (W - 1) T D and (W - 1) T (D + K) backward.

Legend: T tokens here; A tokens of all ranks, W times the longest rank's; D width; K choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_plugin.comm.base import Comm
from moe_plugin.comm.coalesce import pack, unpack
from moe_plugin.comm.functional import reduce_scatter
from moe_plugin.dispatch.base import Dispatcher, DispatchTraits, dispatchers
from moe_plugin.dispatch.local import TokenPlan, with_weights
from moe_plugin.dispatch.rows import rows_of_this_rank
from moe_plugin.records import ExpertRows, KeptRouting


@dataclass(frozen=True)
class GatheredPlan(TokenPlan):
    """row_plan: over the tokens of all ranks, each rank's padded to `longest`.

    Attributes:
        weights_TK: gate weights of this rank's tokens, differentiable.
        longest: tokens of the rank that has most.
    """

    weights_TK: Tensor
    longest: int


@dispatchers.register("all_gather")
class AllGatherDispatcher(Dispatcher):
    """Every rank gets all tokens, computes its own experts' rows; gather and reduce-scatter."""

    traits = DispatchTraits(single_layout=True)

    def plan(self, kept: KeptRouting) -> GatheredPlan:
        """See `Dispatcher`. Numbers of tokens, then ids of all ranks; two copies to the host."""
        comm, routing = self.placement.comm, kept.routing
        tokens = routing.ids_TK.shape[0]
        longest = int(comm.all_reduce(torch.tensor([tokens], device=routing.ids_TK.device), "max"))
        ids_AK = comm.all_gather(pad(routing.ids_TK, (0, 0, 0, longest - tokens), value=-1))
        # the weights of other ranks' tokens arrive with the tokens
        everywhere = dataclasses.replace(routing, ids_TK=ids_AK)
        rows = rows_of_this_rank(everywhere, self.placement)
        return GatheredPlan(rows.counts.total, rows, routing.weights_TK, longest)

    def dispatch(self, x_TD: Tensor, plan: GatheredPlan, anchor: Tensor | None) -> list[ExpertRows]:
        """See `Dispatcher`."""
        x_AD, weights_AK = _Gather.apply(x_TD, plan.weights_TK, anchor, self.placement.comm,
                                         plan.longest)
        return [ExpertRows(x_AD, with_weights(plan.row_plan, weights_AK))]

    def combine(self, outputs: Iterable[Tensor], plan: GatheredPlan,
                anchor: Tensor | None) -> Tensor:
        """See `Dispatcher`."""
        (part_AD,) = outputs
        return reduce_scatter(part_AD, self.placement.comm)[:plan.weights_TK.shape[0]]


class _Gather(torch.autograd.Function):
    """All ranks' tokens and weights, each rank's padded to `longest` tokens."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None, comm: Comm,
                longest: int) -> tuple[Tensor, ...]:
        ctx.comm, ctx.tokens, ctx.dtypes = comm, x_TD.shape[0], (x_TD.dtype, weights_TK.dtype)
        missing = (0, 0, 0, longest - x_TD.shape[0])
        packed, layout = pack([pad(x_TD, missing), pad(weights_TK, missing)])
        x_AD, weights_AK = unpack(comm.all_gather(packed), layout)
        return x_AD, weights_AK

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_AK: Tensor) -> tuple[Any, ...]:
        width, comm = grad_AD.shape[1], ctx.comm
        if grad_AD.dtype == grad_AK.dtype:
            both = comm.reduce_scatter(torch.cat([grad_AD, grad_AK], dim=1))
            mine_TD, mine_TK = both.split([width, grad_AK.shape[1]], dim=1)
        else:  # the gates' gradients keep their precision
            mine_TD = comm.reduce_scatter(grad_AD.contiguous())
            mine_TK = comm.reduce_scatter(grad_AK.contiguous())
        x_grad = mine_TD[:ctx.tokens].to(ctx.dtypes[0])
        return x_grad, mine_TK[:ctx.tokens].to(ctx.dtypes[1]), None, None, None
