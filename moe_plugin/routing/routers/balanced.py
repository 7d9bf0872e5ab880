"""Routers that balance the load within a call: Sinkhorn and expert choice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import SEVERAL, Router


@routers.register("sinkhorn")
class SinkhornRouter(Router):
    """A router that chooses the k largest entries of a balanced plan in training.

    Outside of training, it chooses the k largest scores. The plan is computed from `exp(logits)`
    for the real tokens of this rank. The plan's rows (tokens) and columns (experts) are scaled
    alternately, `sinkhorn_rounds` times. For k = 1 the weight is the sigmoid of the logit. For k >
    1, the weights are the softmax over all experts. The weights are not divided by their sum.
    Source: Clark et al., 2022 (S-BASE); weights as in Megatron-core.
    """

    reads = SEVERAL | {"sinkhorn_rounds"}
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Choose experts by the plan in training; see `Router.select`."""
        if self.training:
            return top_k_stable(log_plan(call.logits_TE.detach(), call.real_T,
                                         self.config.sinkhorn_rounds), call.k)
        return top_k_stable(_scores(call).detach(), call.k)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the scores; see `Router.weigh`."""
        return _scores(call).gather(1, ids_TK)


def _scores(call: RoutingCall) -> Tensor:
    return torch.sigmoid(call.logits_TE) if call.k == 1 else call.scores_TE


def log_plan(logits_TE: Tensor, mask_T: Tensor, rounds: int) -> Tensor:
    """Return the logarithm [T, E] of the plan, whose columns sum to 1/E and whose row sums converge
    to 1/S.

    S is the number of real tokens. The computation uses logarithms, so logits may have any size.
    The number of rounds is fixed, because the host would have to wait for the device to test for
    convergence.

    Args:
        logits_TE: float tensor without gradient.
        mask_T: bool, True for tokens that are not padding.
        rounds: number of rounds in which rows and columns are scaled.
    """
    tokens = mask_T.sum().clamp(min=1).to(logits_TE.dtype)
    plan_TE = torch.where(mask_T[:, None], logits_TE, torch.zeros_like(logits_TE))
    # Adding -inf removes padding from the sums over tokens without a change of shape.
    hidden_T1 = torch.zeros_like(plan_TE[:, :1]).masked_fill(~mask_T[:, None], float("-inf"))
    if not plan_TE.shape[0]:
        return plan_TE
    for _ in range(rounds):
        plan_TE = plan_TE - torch.logsumexp(plan_TE, 1, keepdim=True) - tokens.log()
        column_1E = torch.logsumexp(plan_TE + hidden_T1, 0, keepdim=True)
        # Without any real token the sums are -inf, which would turn the plan into NaN.
        column_1E = torch.where(column_1E.isfinite(), column_1E, 0.0)
        plan_TE = plan_TE - column_1E - math.log(plan_TE.shape[1])
    return plan_TE


@routers.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Each expert chooses the `ceil(n k / E)` tokens with the highest scores among the n real
    tokens of this rank.

    The scores p, which are also the weights of the choices, are a softmax over experts. The load is
    always balanced, because each expert chooses the same number of tokens. A token has between 0
    and E experts. The average number is `top_k`. If scores are equal, the earlier token is chosen.
    An expert sees all tokens of a call before it chooses, so do not use this router if a token must
    not depend on later tokens. Otherwise the choices of a language model in generation would differ
    from its choices in training. Source: Zhou et al., 2022.
    """

    reads = SEVERAL
    any_number = True
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Return up to E choices per token, with the likeliest first; see `Router.select`."""
        probs_TE, real_T = call.scores_TE.detach(), call.real_T
        # Ranks of tokens are compared with a number on the device. `topk` would need the number of
        # real tokens on the host, which would have to wait for the device.
        order_TE = torch.sort(probs_TE.masked_fill(~real_T[:, None], -1.0), dim=0, descending=True,
                              stable=True).indices
        place_T1 = torch.arange(real_T.shape[0], device=real_T.device)[:, None]
        rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, place_T1.expand_as(order_TE))
        tokens_per_expert = (real_T.sum() * call.k + self.num_experts - 1) // self.num_experts
        taken_TE = (rank_TE < tokens_per_expert) & real_T[:, None]
        # Probabilities are not negative, so -1 sorts experts that did not choose the token last.
        picked_TE = probs_TE.masked_fill(~taken_TE, -1.0)
        value_TE, ids_TE = torch.sort(picked_TE, dim=1, descending=True, stable=True)
        return ids_TE.masked_fill(value_TE < 0, -1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the scores p; see `Router.weigh`."""
        return call.scores_TE.gather(1, ids_TK.clamp(min=0))
