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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_plugin.comm.base import Comm
from moe_plugin.comm.by_nodes import (
    Wanted,
    gather_by_nodes,
    reduce_scatter_by_nodes,
    wanted_rows,
)
from moe_plugin.comm.chunks import pack, unpack
from moe_plugin.dispatch.base import Dispatcher, DispatchTraits, Sent, dispatchers
from moe_plugin.dispatch.rows import TokenPlan, rows_of_this_rank, with_weights
from moe_plugin.records import ExpertRows, KeptRouting


@dataclass(frozen=True)
class GatheredPlan(TokenPlan):
    """row_plan: over the tokens of all ranks, each rank's padded to `longest`.

    Attributes:
        weights_TK: gate weights of this rank's tokens, differentiable.
        longest: tokens of the rank that has most.
        wanted: the tokens that each node gets: those with an expert there; None: all.
    """

    weights_TK: Tensor
    longest: int
    wanted: Wanted | None


@dispatchers.register("all_gather")
class AllGatherDispatcher(Dispatcher):
    """Every rank gets all tokens, computes its own experts' rows; gather and reduce-scatter."""

    traits = DispatchTraits(single_layout=True)

    def plan(self, kept: KeptRouting) -> GatheredPlan:
        """See `Dispatcher`. Numbers of tokens between hosts, then ids; one copy to the host."""
        comm, routing = self.placement.comm, kept.routing
        tokens = routing.ids_TK.shape[0]
        longest = _longest(comm, routing.ids_TK)
        ids_AK = _all_ids(comm, pad(routing.ids_TK, (0, 0, 0, longest - tokens), value=-1),
                          self.placement.experts)
        # the weights of other ranks' tokens arrive with the tokens
        everywhere = dataclasses.replace(routing, ids_TK=ids_AK)
        rows = rows_of_this_rank(everywhere, self.placement)
        wanted = wanted_rows(comm, self._nodes_of(ids_AK)) if comm.by_nodes else None
        return GatheredPlan(rows.counts.total, rows, routing.weights_TK, longest, wanted)

    def _nodes_of(self, ids_AK: Tensor) -> Tensor:
        """Whether a token has an expert, or a shard of one, on a node: bool [A, nodes]."""
        place, topology = self.placement, self.placement.comm.topology
        on_node_EN = torch.zeros(place.experts + 1, len(topology.nodes), dtype=torch.bool)
        for expert in range(place.experts):
            for shard in range(place.shards):
                on_node_EN[expert, topology.node_of[place.owner_of(expert, shard)[0]]] = True
        return on_node_EN[ids_AK].any(1)  # -1, no expert: the last row

    def dispatch(self, x_TD: Tensor, plan: GatheredPlan, anchor: Tensor | None) -> Sent:
        x_AD, weights_AK = _Gather.apply(x_TD, plan.weights_TK, anchor, self.placement.comm,
                                         plan.longest, plan.wanted)
        return Sent([ExpertRows(x_AD, with_weights(plan.row_plan, weights_AK))], anchor)

    def combine(self, sent: Sent, plan: GatheredPlan) -> Tensor:
        [part_AD] = sent.results
        total_TD = _Scatter.apply(part_AD, self.placement.comm, plan.wanted)
        return total_TD[:plan.weights_TK.shape[0]]


def _longest(comm: Comm, ids_TK: Tensor) -> int:
    """Tokens of the rank that has most, agreed between hosts; over nodes in fewer rounds than an
    all-reduce.
    """
    if comm.by_nodes:
        return int(comm.agree_max([len(ids_TK)])[0])
    return int(comm.hosts.all_reduce(torch.tensor([len(ids_TK)]), "max"))


def _all_ids(comm: Comm, ids_TK: Tensor, experts: int) -> Tensor:
    """All ranks' ids, int64 [A, K]; between nodes they travel in two bytes where they fit."""
    if not comm.by_nodes or experts > torch.iinfo(torch.int16).max:
        return comm.all_gather(ids_TK)
    packed, layout = pack([ids_TK.to(torch.int16)])
    return unpack(comm.all_gather(packed), layout)[0].to(torch.int64)


def _gather(comm: Comm, x: Tensor, wanted: Wanted | None) -> Tensor:
    return comm.collectives.all_gather(comm, x) if wanted is None else gather_by_nodes(
        comm, x, wanted)


def _reduce(comm: Comm, x: Tensor, wanted: Wanted | None) -> Tensor:
    return (comm.collectives.reduce_scatter(comm, x.contiguous()) if wanted is None else
            reduce_scatter_by_nodes(comm, x, wanted))


class _Scatter(torch.autograd.Function):
    """The ranks' parts of this rank's tokens, summed."""

    @staticmethod
    def forward(ctx: Any, part_AD: Tensor, comm: Comm, wanted: Wanted | None) -> Tensor:
        ctx.comm, ctx.wanted = comm, wanted
        return _reduce(comm, part_AD, wanted)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        return _gather(ctx.comm, grad_TD.contiguous(), ctx.wanted), None, None


class _Gather(torch.autograd.Function):
    """All ranks' tokens and weights, each rank's padded to `longest` tokens."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None, comm: Comm,
                longest: int, wanted: Wanted | None) -> tuple[Tensor, ...]:
        ctx.comm, ctx.tokens, ctx.dtypes = comm, x_TD.shape[0], (x_TD.dtype, weights_TK.dtype)
        ctx.wanted = wanted
        missing = (0, 0, 0, longest - x_TD.shape[0])
        packed, layout = pack([pad(x_TD, missing), pad(weights_TK, missing)])
        x_AD, weights_AK = unpack(_gather(comm, packed, wanted), layout)
        return x_AD, weights_AK

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_AK: Tensor) -> tuple[Any, ...]:
        width, comm, wanted = grad_AD.shape[1], ctx.comm, ctx.wanted
        if grad_AD.dtype == grad_AK.dtype:
            both = _reduce(comm, torch.cat([grad_AD, grad_AK], dim=1), wanted)
            mine_TD, mine_TK = both.split([width, grad_AK.shape[1]], dim=1)
        else:  # the gates' gradients keep their precision
            mine_TD = _reduce(comm, grad_AD, wanted)
            mine_TK = _reduce(comm, grad_AK, wanted)
        x_grad = mine_TD[:ctx.tokens].to(ctx.dtypes[0])
        return x_grad, mine_TK[:ctx.tokens].to(ctx.dtypes[1]), None, None, None, None
