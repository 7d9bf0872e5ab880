"""kTop1 router: the experts in k prototypes, one expert of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.losses import LossInputs
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router, first_choice_priority


@routers.register("ktop1")
class PrototypeRouter(Router):
    """k prototypes of E/k consecutive experts: softmax and top-1 inside each.

    Weights are these probabilities, not divided by their sum. Losses are computed for each
    prototype, as of a router of E/k experts, and averaged. Source: M6-T (Yang et al. 2021).
    """

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters and check the number of prototypes; see `Router.build`."""
        super().build(dtype, device)
        self._check(self.config.top_k)

    def _check(self, k: int) -> None:
        experts = self.num_experts
        if experts % k:
            raise ValueError(
                f"router.top_k={k} does not fit num_experts={experts}: ktop1 needs a divisor; use "
                f"{max(d for d in range(1, k + 1) if experts % d == 0)}")

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """Choice i is the best expert of prototype i; see `Router.route`."""
        self._check(k)
        experts = self.num_experts
        clean_TE, logits_TE = self.logits(x_TD)
        tokens, width = x_TD.shape[0], experts // k
        # N = T * k (token by token), P = E / k
        scores_NP = F.softmax(logits_TE.reshape(-1, width), dim=1)
        first_K = self._first(k, width, logits_TE)
        chosen_TK = self.replayed(
            lambda: top_k_stable(scores_NP.detach(), 1).view(tokens, k) + first_K,
            shape=(tokens, k))
        weights_TK = scores_NP.gather(1, (chosen_TK - first_K).reshape(-1, 1)).view(tokens, k)
        clean_NP = F.softmax(clean_TE.reshape(-1, width),
                             dim=1) if self.noise_scale() else scores_NP
        # a distribution over all experts: each prototype has 1/k of it
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=logits_TE,
                         probs_TE=scores_NP.reshape(tokens, experts) / k,
                         clean_probs_TE=clean_NP.reshape(tokens, experts) / k)
        return self.finish(inputs, chosen_TK, weights_TK,
                           first_choice_priority(scores_NP.view(tokens, experts)))

    def _first(self, k: int, width: int, like: Tensor) -> Tensor:
        return torch.arange(k, device=like.device) * width

    def losses_of(self, inputs: LossInputs) -> dict[str, Tensor]:
        """The mean over prototypes of each loss."""
        k = inputs.ids_TK.shape[1]
        parts = [super(PrototypeRouter, self).losses_of(_part(inputs, i, k)) for i in range(k)]
        return {
            name: sum((part[name] for part in parts), value * 0) / k
            for name, value in parts[0].items()
        }


def _part(inputs: LossInputs, index: int, k: int) -> LossInputs:
    """The inputs of one prototype's losses."""
    width = inputs.probs_TE.shape[1] // k
    here = slice(index * width, (index + 1) * width)
    load_E = inputs.step_load_E
    penalty_E = inputs.penalty_E
    return replace(
        inputs, logits_TE=inputs.logits_TE[:, here], probs_TE=inputs.probs_TE[:, here] * k,
        clean_probs_TE=inputs.clean_probs_TE[:, here] * k,
        ids_TK=inputs.ids_TK[:, index:index + 1] - index * width,
        penalty_E=None if penalty_E is None else penalty_E[here] / penalty_E[here].mean(),
        step_load_E=None if load_E is None else F.pad(load_E[here], (0, 1)),
    )
