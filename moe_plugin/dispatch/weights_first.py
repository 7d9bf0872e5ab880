"""Gate weights on the experts' inputs: y_t = sum_j E_j(w_tj x_t), in place of sum_j w_tj E_j(x_t).

Every choice becomes a token of its own that has its weight in it and one expert. So every
dispatcher and layout works unchanged, and the outputs of a token's choices are summed at the end.
With several choices per token, dispatchers that move whole tokens (all_gather, index_slice) move
each K times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_plugin.dispatch.base import Sent, WrappedDispatcher
from moe_plugin.kernels import weigh_rows
from moe_plugin.records import DispatchPlan, KeptRouting, Routing


@dataclass(frozen=True)
class WeighedChoices:
    """The choices of T tokens as N = T K tokens of one choice each.

    Attributes:
        weights_TK: gate weights, differentiable.
        source_N, position_TK: see `kernels.rows`; choice t * K + j is token t * K + j, or -1 where
            it has no expert.
    """

    weights_TK: Tensor
    source_N: Tensor
    position_TK: Tensor

    @classmethod
    def split(cls, kept: KeptRouting) -> tuple[KeptRouting, WeighedChoices]:
        """The routing of the N tokens, whose weights are 1, and how they are made."""
        routing = kept.routing
        here_TK = routing.ids_TK >= 0
        number_TK = torch.arange(here_TK.numel(), device=here_TK.device).view(here_TK.shape)
        position_TK = torch.where(here_TK, number_TK, -1)
        one_each = replace(
            routing, ids_TK=routing.ids_TK.reshape(-1, 1),
            weights_TK=here_TK.reshape(-1, 1).to(routing.weights_TK.dtype),
            priority_T=None, passthrough_T=None, chosen_TK=None,
            undropped_TK=None)
        slots_TK = None if kept.slots_TK is None else kept.slots_TK.reshape(-1, 1)
        return (replace(kept, routing=one_each, slots_TK=slots_TK),
                cls(routing.weights_TK, position_TK.reshape(-1), position_TK))

    def inputs(self, x_TD: Tensor) -> Tensor:
        """[N, D] from tokens [T, D]."""
        return weigh_rows(x_TD, self.weights_TK, self.source_N, self.position_TK)

    def sum(self, y_ND: Tensor) -> Tensor:
        """[T, D] from the outputs [N, D] of the choices; one without an expert has zeros."""
        tokens, choices = self.position_TK.shape
        return y_ND.view(tokens, choices, y_ND.shape[1]).sum(1)


@dataclass(frozen=True)
class WeighedPlan(DispatchPlan):
    """The plan of `WeightsFirst`.

    Attributes:
        inner: of the dispatcher that moves the choices.
        choices: see `WeighedChoices`.
    """

    inner: DispatchPlan
    choices: WeighedChoices


class WeightsFirst(WrappedDispatcher):
    """Moves choices by another dispatcher, as tokens with their gate weights in them."""

    def plan(self, kept: KeptRouting) -> WeighedPlan:
        kept, choices = WeighedChoices.split(kept)
        plan = self.inner.plan(kept)
        return WeighedPlan(plan.rows, plan, choices)

    def start_sizes(self, routing: Routing, tokens: bool = False) -> None:
        """See `Dispatcher`. Its tokens are others than the routing's."""
        return None

    def dispatch(self, x_TD: Tensor, plan: WeighedPlan, anchor: Tensor | None) -> Sent:
        return self.inner.dispatch(plan.choices.inputs(x_TD), plan.inner, anchor)

    def combine(self, sent: Sent, plan: WeighedPlan) -> Tensor:
        return plan.choices.sum(self.inner.combine(sent, plan.inner))
