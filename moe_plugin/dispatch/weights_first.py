"""A dispatcher that multiplies the experts' inputs, instead of outputs, by the gate weights.

The output is `y_t = sum_j E_j(w_tj x_t)` instead of `sum_j w_tj E_j(x_t)`. Each choice is sent as a
separate token, which has only one expert and has already been multiplied by its gate weight. This
works with every dispatcher and every layout without changes. Finally, the outputs of each token's
choices are summed. Dispatchers that send whole tokens (`all_gather`, `index_slice`) send each token
K times.
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
    """The choices of T tokens, represented as N = T K new tokens that have one choice each.

    Attributes:
        weights_TK: [T, K], the gate weights. They require gradients.
        source_N: int64 [N], the index of the choice that each new token represents, or -1 if the
            choice has no expert.
        position_TK: int64 [T, K], the index of the new token for choice j of token t, which is t *
            K + j, or -1 if the choice has no expert.
    """

    weights_TK: Tensor
    source_N: Tensor
    position_TK: Tensor

    @classmethod
    def split(cls, kept: KeptRouting) -> tuple[KeptRouting, WeighedChoices]:
        """Return the routing of the N new tokens, with all weights set to 1, and the choices."""
        routing = kept.routing
        here_TK = routing.ids_TK >= 0
        number_TK = torch.arange(here_TK.numel(), device=here_TK.device).view(here_TK.shape)
        position_TK = torch.where(here_TK, number_TK, -1)
        # The weights become 1, because the tokens already contain them. Fields by token of the
        # original routing do not apply to the new tokens.
        one_each = replace(
            routing, ids_TK=routing.ids_TK.reshape(-1, 1),
            weights_TK=here_TK.reshape(-1, 1).to(routing.weights_TK.dtype),
            priority_T=None, passthrough_T=None, chosen_TK=None,
            undropped_TK=None)
        slots_TK = None if kept.slots_TK is None else kept.slots_TK.reshape(-1, 1)
        return (replace(kept, routing=one_each, slots_TK=slots_TK),
                cls(routing.weights_TK, position_TK.reshape(-1), position_TK))

    def inputs(self, x_TD: Tensor) -> Tensor:
        """Return the N new tokens [N, D], each multiplied by the gate weight of its choice."""
        return weigh_rows(x_TD, self.weights_TK, self.source_N, self.position_TK)

    def sum(self, y_ND: Tensor) -> Tensor:
        """For each token, sum the outputs [N, D] of its choices. The sums have the shape [T, D].
        The outputs of choices without an expert are zero.
        """
        tokens, choices = self.position_TK.shape
        return y_ND.view(tokens, choices, y_ND.shape[1]).sum(1)


@dataclass(frozen=True)
class WeighedPlan(DispatchPlan):
    """The plan of one call of the `WeightsFirst` dispatcher.

    Attributes:
        inner: plan of the wrapped dispatcher, which sends each choice as a token.
        choices: choices represented as new tokens.
    """

    inner: DispatchPlan
    choices: WeighedChoices


class WeightsFirst(WrappedDispatcher):
    """A dispatcher that sends each choice as a separate token, multiplied by its gate weight."""

    def plan(self, kept: KeptRouting) -> WeighedPlan:
        kept, choices = WeighedChoices.split(kept)
        plan = self.inner.plan(kept)
        return WeighedPlan(plan.rows, plan, choices)

    def start_sizes(self, routing: Routing, tokens: bool = False) -> None:
        """Return None, because the sizes of the new tokens cannot be exchanged early."""
        return None

    def dispatch(self, x_TD: Tensor, plan: WeighedPlan, anchor: Tensor | None) -> Sent:
        return self.inner.dispatch(plan.choices.inputs(x_TD), plan.inner, anchor)

    def combine(self, sent: Sent, plan: WeighedPlan) -> Tensor:
        return plan.choices.sum(self.inner.combine(sent, plan.inner))
