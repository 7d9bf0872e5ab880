"""The dispatcher `all_gather`. Every rank receives all tokens and computes the rows of its own
experts.

First, the expert ids are gathered, so that all sizes are known. After the ids, the tokens and gate
weights are gathered in a single exchange. Finally, a reduce-scatter sums the outputs of all ranks.
The backward pass runs the exchanges of the forward pass in reverse. The gradients of the summed
outputs are gathered. The gradients of tokens and gate weights are summed in one reduce-scatter, or
in two if their dtypes differ. The number of bytes sent does not depend on the number of choices per
token, k. Compared with `all_gather`, an all-to-all sends more bytes if k S > W, and fewer bytes if
k S < W, where S is the number of shards per expert and W the number of ranks.

With Megatron's sequence parallelism, this dispatcher corresponds to PPMoE's index-slice dispatch
(Chen et al. 2023), except that the all-reduce is split into an all-gather and a reduce-scatter.
With ring collectives, a rank sends the following numbers of elements in the forward pass:
`(W - 1) T (D + 2 K)` for the tokens and `(W - 1) T D` for the outputs. In the backward pass, a rank
sends `(W - 1) T D` elements for the gradients of the outputs and `(W - 1) T (D + K)` elements for
the gradients of the tokens and gate weights.

In tensor names, T is the number of tokens on this rank, and A is W times the largest number of
tokens on any rank. D is the width of a token, and K is the number of choices per token.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_plugin.comm.base import Comm
from moe_plugin.comm.by_nodes import Wanted, gather_by_nodes, reduce_scatter_by_nodes, wanted_rows
from moe_plugin.comm.chunks import pack, unpack
from moe_plugin.dispatch.base import Dispatcher, DispatchTraits, Sent, dispatchers
from moe_plugin.dispatch.rows import TokenPlan, rows_of_this_rank, with_weights
from moe_plugin.records import ExpertRows, KeptRouting


@dataclass(frozen=True)
class GatheredPlan(TokenPlan):
    """The plan of one call of the `all_gather` dispatcher.

    `row_plan` describes the rows for the tokens of all ranks. The tokens of each rank are padded to
    `longest` tokens.

    Attributes:
        weights_TK: [T, K], the gate weights of this rank's tokens. They require gradients.
        longest: the largest number of tokens on any rank.
        wanted: for each node, the tokens that it needs because at least one of their experts is on
            the node. If `wanted` is None, all tokens are sent to all nodes.
    """

    weights_TK: Tensor
    longest: int
    wanted: Wanted | None


@dispatchers.register("all_gather")
class AllGatherDispatcher(Dispatcher[GatheredPlan]):
    """A dispatcher that gathers all tokens on every rank and reduce-scatters the outputs."""

    traits = DispatchTraits(single_layout=True)

    def plan(self, kept: KeptRouting) -> GatheredPlan:
        """See `Dispatcher`. The ranks exchange their numbers of tokens in host memory, and then the
        expert ids are gathered.

        The host waits for the device once.
        """
        comm, routing = self.placement.comm, kept.routing
        tokens = routing.ids_TK.shape[0]
        # ranks may have different numbers of tokens, but an all-gather needs equal sizes
        longest = _longest(comm, routing.ids_TK)
        ids_AK = _all_ids(comm, pad(routing.ids_TK, (0, 0, 0, longest - tokens), value=-1),
                          self.placement.experts)
        # the weights of other ranks' tokens arrive with the tokens
        everywhere = dataclasses.replace(routing, ids_TK=ids_AK)
        rows = rows_of_this_rank(everywhere, self.placement)
        wanted = wanted_rows(comm, self._nodes_of(ids_AK)) if comm.by_nodes else None
        return GatheredPlan(rows.counts.total, rows, routing.weights_TK, longest, wanted)

    def _nodes_of(self, ids_AK: Tensor) -> Tensor:
        """Return a bool tensor [A, nodes], True if the node has any of the token's experts."""
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
    """Return the largest number of tokens on any rank. The ranks exchange their numbers of tokens
    on the host.

    With collectives in two steps between nodes, `agree_max` needs fewer rounds than an all-reduce.
    """
    if comm.by_nodes:
        return int(comm.agree_max([len(ids_TK)])[0])
    return int(comm.hosts.all_reduce(torch.tensor([len(ids_TK)]), "max"))


def _all_ids(comm: Comm, ids_TK: Tensor, experts: int) -> Tensor:
    """Gather the expert ids of all ranks, int64 [A, K]. Between nodes, the ids are sent as int16 if
    all expert ids fit in int16.
    """
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
    """Autograd function that sums outputs over ranks and returns the sums of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, part_AD: Tensor, comm: Comm, wanted: Wanted | None) -> Tensor:
        ctx.comm, ctx.wanted = comm, wanted
        return _reduce(comm, part_AD, wanted)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        return _gather(ctx.comm, grad_TD.contiguous(), ctx.wanted), None, None


class _Gather(torch.autograd.Function):
    """Autograd function that gathers the tokens and gate weights of all ranks. The tensors of each
    rank are padded to `longest` tokens.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None, comm: Comm,
                longest: int, wanted: Wanted | None) -> tuple[Tensor, ...]:
        ctx.comm, ctx.tokens, ctx.dtypes = comm, x_TD.shape[0], (x_TD.dtype, weights_TK.dtype)
        ctx.wanted = wanted
        missing = (0, 0, 0, longest - x_TD.shape[0])
        # one exchange for tokens and weights, whatever their dtypes
        packed, layout = pack([pad(x_TD, missing), pad(weights_TK, missing)])
        x_AD, weights_AK = unpack(_gather(comm, packed, wanted), layout)
        return x_AD, weights_AK

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_AK: Tensor) -> tuple[Any, ...]:
        width, comm, wanted = grad_AD.shape[1], ctx.comm, ctx.wanted
        if grad_AD.dtype == grad_AK.dtype:
            both = _reduce(comm, torch.cat([grad_AD, grad_AK], dim=1), wanted)
            mine_TD, mine_TK = both.split([width, grad_AK.shape[1]], dim=1)
        else:  # the gradients of the gate weights keep their precision
            mine_TD = _reduce(comm, grad_AD, wanted)
            mine_TK = _reduce(comm, grad_AK, wanted)
        # the gradients of padding are cut off
        x_grad = mine_TD[:ctx.tokens].to(ctx.dtypes[0])
        return x_grad, mine_TK[:ctx.tokens].to(ctx.dtypes[1]), None, None, None, None
