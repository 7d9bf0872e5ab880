"""kTop1 router: the experts in k prototypes, one expert of each."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels import route, top_k_stable
from moe_plugin.kernels.router import Routed, Rule
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.losses import LossInputs
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router, first_choice_priority


@routers.register("ktop1")
class PrototypeRouter(Router):
    """k prototypes of E/k consecutive experts: softmax and top-1 inside each.

    Weights are these probabilities, not divided by their sum. Losses are computed for each
    prototype, as of a router of E/k experts, and averaged. Source: M6-T (Yang et al. 2021).

    For one pass each prototype of a token is a row of its own, of E/k logits. The pass adds up
    importance over all rows, and losses need it by prototype: it is a sum of its own, made where a
    loss reads it.
    """

    one_pass = True
    needs_mask = False

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

    def route(self, x_TD: Tensor, mask_T: Tensor | None, k: int, info: TokenInfo) -> Routing:
        """Choice i is the best expert of prototype i; see `Router.route`."""
        self._check(k)
        experts = self.num_experts
        clean_TE, logits_TE = self.logits(x_TD)
        if self._fuses():
            return self._route_in_one_pass(logits_TE, mask_T, k, info)
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

    def _route_in_one_pass(self, logits_TE: Tensor, mask_T: Tensor | None, k: int,
                           info: TokenInfo) -> Routing:
        made, rule = [], Rule(1, normalize=False, z="z" in self.loss_names)
        tokens, width = logits_TE.shape[0], self.num_experts // k
        # N = T * k (token by token), P = E / k
        logits_NP, first_K = logits_TE.reshape(-1, width), self._first(k, width, logits_TE)
        mask_N = None if mask_T is None else mask_T.repeat_interleave(k)

        def choose() -> Tensor:
            made.append(route(logits_NP, mask_N, rule))
            return made[0].ids_TK.view(tokens, k) + first_K

        chosen_TK = self.replayed(choose, shape=(tokens, k))
        rows = made[0] if made else route(logits_NP, mask_N, rule,
                                          (chosen_TK - first_K).reshape(-1, 1))
        routed = self._of_tokens(rows, logits_NP, chosen_TK, mask_T)
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=logits_TE, probs_TE=logits_TE,
                                  routed=routed)
        best_TN = routed.weights_TK
        if self.config.batch_prioritized:  # a recorded choice need not be the best one here
            best_TN = F.softmax(logits_NP, dim=1).view_as(logits_TE)
        return self.finish(inputs, chosen_TK, routed.weights_TK, first_choice_priority(best_TN))

    def _of_tokens(self, rows: Routed, logits_NP: Tensor, chosen_TK: Tensor,
                   mask_T: Tensor | None) -> Routed:
        """What a pass over rows says of tokens, whose scores are 1/k of those in each prototype."""
        tokens, k = chosen_TK.shape
        real = tokens if mask_T is None else mask_T.sum(dtype=rows.p_log_p.dtype)
        importance_E = logits_NP.new_zeros(self.num_experts)  # where no loss reads it
        if not {"z"}.issuperset(self.loss_names):
            scores_TE = F.softmax(logits_NP, dim=1).view(tokens, self.num_experts)
            scores_TE = scores_TE if mask_T is None else scores_TE * mask_T[:, None]
            importance_E = scores_TE.sum(0) / k
        # the sum of (p / k) log(p / k)
        p_log_p = rows.p_log_p / k - real * math.log(k)
        return Routed(chosen_TK, rows.weights_TK.view(tokens, k), importance_E, rows.z, p_log_p)

    def _first(self, k: int, width: int, like: Tensor) -> Tensor:
        return torch.arange(k, device=like.device) * width

    def losses_of(self, inputs: LossInputs) -> dict[str, Tensor]:
        """The mean over prototypes of each loss."""
        if not self.loss_names:
            return {}
        k = inputs.ids_TK.shape[1]
        parts: list[dict[str, Tensor]] = []
        for i in range(k):
            part = _part(inputs, i, k)
            parts.append(super().losses_of(part))
            inputs._count = part._count  # the same tokens: counted once
        return {
            name: sum((part[name] for part in parts), value * 0) / k
            for name, value in parts[0].items()
        }


def _part(inputs: LossInputs, index: int, k: int) -> LossInputs:
    """The inputs of one prototype's losses."""
    width = inputs.probs_TE.shape[1] // k
    here = slice(index * width, (index + 1) * width)
    load_E = inputs.step_load_E
    penalty_E, routed = inputs.penalty_E, inputs.routed
    probs_TE, clean_TE = inputs.probs_TE[:, here], inputs.clean_probs_TE[:, here]
    if routed is None:
        probs_TE, clean_TE = probs_TE * k, clean_TE * k
    else:
        # all parts get the same z: their mean is what counts
        routed = replace(routed, importance_E=routed.importance_E[here] * k,
                         z=None if routed.z is None else routed.z / k)
    part = replace(
        inputs, logits_TE=inputs.logits_TE[:, here], probs_TE=probs_TE, clean_probs_TE=clean_TE,
        ids_TK=inputs.ids_TK[:, index:index + 1] - index * width,
        penalty_E=None if penalty_E is None else penalty_E[here] / penalty_E[here].mean(),
        step_load_E=None if load_E is None else F.pad(load_E[here], (0, 1)), routed=routed,
    )
    part._count, part._load_KE = inputs._count, inputs.own_load_KE[index : index + 1, here]
    return part
