"""Top-k router: softmax or sigmoid scores, any k, GShard's second-expert policies."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels import route, top_k_stable
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.losses import FUSED
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router, first_choice_priority, shares


@routers.register("topk")
class TopKRouter(Router):
    """Linear scores, the k largest chosen; ties go to the lower expert index.

    Follows section "router" of Tutel (Hwang et al. 2022): noise of `noise / E` on the logits,
    scores divided by their sum over the chosen (clamped away from zero) before capacity drops
    anything.
    """

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """Scores, choice, weights, policy, losses; see `Router.route`."""
        if self.training and self.second_expert_policy != "all" and k != 2:
            raise ValueError(
                f"top_k={k} is out of bounds: must be 2 in training with "
                f"router.second_expert_policy={self.second_expert_policy!r}; pass None, or set the "
                "policy to 'all'")
        clean_TE, logits_TE = self.logits(x_TD)
        if self._one_pass():
            return self._route_in_one_pass(logits_TE, mask_T, k, info)
        scores_TE = self._scores(logits_TE)
        chosen_TK = self.replayed(lambda: self._select(scores_TE, logits_TE, mask_T, k))
        weights_TK = self._weigh(scores_TE, chosen_TK)
        ids_TK = self._policy(chosen_TK, weights_TK)
        probs_TE = self._distribution(scores_TE)
        clean_probs_TE = probs_TE
        if self.noise_scale():
            clean_probs_TE = self._distribution(self._scores(clean_TE))
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=logits_TE, probs_TE=probs_TE,
                                  clean_probs_TE=clean_probs_TE, **self._more(chosen_TK))
        routing = self.finish(inputs, ids_TK, self.normalized(weights_TK),
                              first_choice_priority(scores_TE))
        if ids_TK is chosen_TK:
            return routing
        return replace(routing, chosen_TK=chosen_TK.masked_fill(~mask_T[:, None], -1))

    def _one_pass(self) -> bool:
        """Whether one kernel can do it all: plain softmax routing, and losses that do not need the
        scores of every token.
        """
        plain = type(self) is TopKRouter and self.config.score == "softmax"
        drawn = self.noise_scale() or (self.training and self.second_expert_policy != "all")
        fused_losses = set(self.loss_names) - self.only_noisy <= FUSED
        return plain and not drawn and fused_losses and not torch.compiler.is_compiling()

    def _route_in_one_pass(self, logits_TE: Tensor, mask_T: Tensor, k: int,
                           info: TokenInfo) -> Routing:
        normalize, made = k > 1 and self.config.normalize == "before_drop", []

        def choose() -> Tensor:
            made.append(route(logits_TE, mask_T, k, normalize))
            return made[0].ids_TK

        chosen_TK = self.replayed(choose)
        routed = made[0] if made else route(logits_TE, mask_T, k, normalize, chosen_TK)
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=logits_TE,
                                  probs_TE=logits_TE.detach(), routed=routed)
        priority_T = torch.exp(first_choice_priority(logits_TE) - routed.lse_T)
        return self.finish(inputs, chosen_TK, routed.weights_TK, priority_T)

    def _weigh(self, scores_TE: Tensor, chosen_TK: Tensor) -> Tensor:
        return scores_TE.gather(1, chosen_TK)

    def _more(self, chosen_TK: Tensor) -> dict[str, Tensor]:
        """More fields of `LossInputs`, by a subclass."""
        return {}

    def _select(self, scores_TE: Tensor, logits_TE: Tensor, mask_T: Tensor, k: int) -> Tensor:
        if not (self.training and self.second_expert_policy == "sampling"):
            return top_k_stable(scores_TE.detach(), k)
        first_T1 = top_k_stable(scores_TE.detach(), 1)
        gumbel_TE = -torch.empty_like(logits_TE).exponential_().log()
        second_T1 = (logits_TE.detach() + gumbel_TE).scatter(1, first_T1,
                                                             float("-inf")).argmax(1, keepdim=True)
        return torch.cat([first_T1, second_T1], dim=1)

    @property
    def second_expert_policy(self) -> str:
        """What happens to a second expert in training."""
        return self.config.second_expert_policy

    def _policy(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if not (self.training and self.second_expert_policy == "random"):
            return ids_TK
        return self.replayed(lambda: self._drop_second(ids_TK, weights_TK.detach()))

    def _drop_second(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        second_T = self._second(weights_TK)
        keep_T = torch.rand_like(second_T) < 2 * second_T
        return torch.stack([ids_TK[:, 0], ids_TK[:, 1].masked_fill(~keep_T, -1)], dim=1)

    def _second(self, weights_TK: Tensor) -> Tensor:
        # a share only if weights are divided before dropping, else the score itself: as in
        # fairseq's `moe` branch
        return self.normalized(weights_TK)[:, 1]

    def _scores(self, logits_TE: Tensor) -> Tensor:
        if self.config.score == "softmax":
            return F.softmax(logits_TE, dim=1)
        return torch.sigmoid(logits_TE)

    def _distribution(self, scores_TE: Tensor) -> Tensor:
        return scores_TE if self.config.score == "softmax" else shares(scores_TE)
