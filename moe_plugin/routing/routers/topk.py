"""Top-k router: softmax or sigmoid scores, any k, GShard's second-expert policies."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels import route, top_k_stable
from moe_plugin.kernels.router import Routed, Rule
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.losses import LossInputs
from moe_plugin.routing.registry import routers
from moe_plugin.routing.replay import inside_backward
from moe_plugin.routing.routers.base import Router, first_choice_priority, shares


@routers.register("topk")
class TopKRouter(Router):
    """Linear scores, the k largest chosen; ties go to the lower expert index.

    Follows section "router" of Tutel (Hwang et al. 2022): noise of `noise / E` on the logits,
    scores divided by their sum over the chosen (clamped away from zero) before capacity drops
    anything.

    Attributes:
        one_pass: declares that nothing but what `rule`, `choice_bias`, `second_expert_policy` and
            `_pass` say differs from this class; see `Router`.
    """

    needs_mask = False
    one_pass = True

    def route(self, x_TD: Tensor, mask_T: Tensor | None, k: int, info: TokenInfo) -> Routing:
        """Scores, choice, weights, policy, losses; see `Router.route`."""
        if self.training and self.second_expert_policy != "all" and k != 2:
            raise ValueError(
                f"top_k={k} is out of bounds: must be 2 in training with "
                f"router.second_expert_policy={self.second_expert_policy!r}; pass None, or set the "
                "policy to 'all'")
        clean_TE, logits_TE = self.logits(x_TD)
        if self._fuses():
            return self._route_in_one_pass(logits_TE, mask_T, k, info)
        scores_TE, made = self._scores(logits_TE), []

        def choose() -> Tensor:
            made.append(self._select(scores_TE, logits_TE, mask_T, k))
            return made[0]

        chosen_TK = self.replayed(choose, shape=(logits_TE.shape[0], k))
        weights_TK = self._weigh(scores_TE, chosen_TK)
        probs_TE = self._distribution(scores_TE)
        clean_probs_TE = probs_TE
        if self.noise_scale():
            clean_probs_TE = self._distribution(self._scores(clean_TE))
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=logits_TE, probs_TE=probs_TE,
                                  clean_probs_TE=clean_probs_TE, **self._more(chosen_TK))
        if made or not inside_backward():
            self.chosen(inputs)
        ids_TK = self._policy(chosen_TK, weights_TK)
        return self._finished(inputs, ids_TK, self.normalized(weights_TK), scores_TE)

    def _finished(self, inputs: LossInputs, ids_TK: Tensor, weights_TK: Tensor,
                  scores_TE: Tensor | None) -> Routing:
        """The routing; scores_TE: [T, E], None: computed where they are needed."""
        priority_T, chosen_TK, mask_T = None, inputs.ids_TK, inputs.mask_T
        if self.config.batch_prioritized:
            scores_TE = self._scores(inputs.logits_TE) if scores_TE is None else scores_TE
            priority_T = first_choice_priority(scores_TE)
        routing = self.finish(inputs, ids_TK, weights_TK, priority_T)
        if ids_TK is chosen_TK:
            return routing
        if mask_T is not None:
            chosen_TK = chosen_TK.masked_fill(~mask_T[:, None], -1)
        return replace(routing, chosen_TK=chosen_TK)

    def _route_in_one_pass(self, logits_TE: Tensor, mask_T: Tensor | None, k: int,
                           info: TokenInfo) -> Routing:
        rule, made = self.rule(k), []

        def choose() -> Tensor:
            drawn_TK, bias_E = None, self.choice_bias()
            if self.training and self.second_expert_policy == "sampling":
                drawn_TK = self._select(logits_TE, logits_TE, mask_T, k)
            made.append(self._pass(logits_TE, mask_T, rule, drawn_TK, bias_E))
            return made[0].ids_TK

        chosen_TK = self.replayed(choose, shape=(logits_TE.shape[0], k))
        routed = made[0] if made else self._pass(logits_TE, mask_T, rule, chosen_TK, None)
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=logits_TE, probs_TE=logits_TE,
                                  routed=routed)
        if made or not inside_backward():
            self.chosen(inputs)
        ids_TK = self._policy(chosen_TK, routed.weights_TK)
        return self._finished(inputs, ids_TK, routed.weights_TK, None)

    def _pass(self, logits_TE: Tensor, mask_T: Tensor | None, rule: Rule,
              chosen_TK: Tensor | None, bias_E: Tensor | None) -> Routed:
        return route(logits_TE, mask_T, rule, chosen_TK, bias_E)

    def rule(self, k: int) -> Rule:
        """How one pass chooses and weighs k experts of a token."""
        return Rule(k, k > 1 and self.divides, self.sigmoid, z="z" in self.loss_names)

    def choice_bias(self) -> Tensor | None:
        """What is added to the scores for the choice alone, [E]; None: nothing."""
        return None

    def chosen(self, inputs: LossInputs) -> None:
        """Called in each pass but recomputations in backward, which repeat an earlier choice."""

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
        return self.replayed(lambda: self._drop_second(ids_TK, weights_TK.detach()),
                             "kept second choice", tuple(ids_TK.shape))

    def _drop_second(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        second_T = self._second(weights_TK)
        keep_T = torch.rand_like(second_T) < 2 * second_T
        return torch.stack([ids_TK[:, 0], ids_TK[:, 1].masked_fill(~keep_T, -1)], dim=1)

    def _second(self, weights_TK: Tensor) -> Tensor:
        # a share only if weights are divided before dropping, else the score itself: as in
        # fairseq's `moe` branch
        return self.normalized(weights_TK)[:, 1]

    @property
    def sigmoid(self) -> bool:
        """Whether a score is the sigmoid of the expert's logit, or softmax over experts."""
        return self.config.score == "sigmoid"

    def _scores(self, logits_TE: Tensor) -> Tensor:
        return torch.sigmoid(logits_TE) if self.sigmoid else F.softmax(logits_TE, dim=1)

    def _distribution(self, scores_TE: Tensor) -> Tensor:
        return shares(scores_TE) if self.sigmoid else scores_TE
