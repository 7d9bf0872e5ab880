"""Routers that balance the load within each call: Sinkhorn and expert choice."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import SEVERAL
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("sinkhorn")
class SinkhornRouter(Router):
    """A router that, in training, chooses the k largest elements per token of a balanced plan.

    In evaluation, the router chooses the k largest scores. The plan is computed from `exp(logits)`
    of the real tokens on this rank. The rows (tokens) and the columns (experts) of the plan are
    scaled alternately, in `sinkhorn_rounds` rounds. For k = 1, the weight is the sigmoid of the
    logit. For k > 1, the weights are a softmax over all experts. The weights are not divided by
    their sum.
    Source: Clark et al., 2022 (S-BASE). The weights are computed as in Megatron-core.
    """

    reads = SEVERAL | {"sinkhorn_rounds"}
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """In training, choose experts from the plan; see `Router.select`."""
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
    """Return the logarithm of the plan, [T, E]. The columns of the plan sum to 1/E, and its row
    sums converge to 1/S.

    S is the number of real tokens. The computation uses logarithms, so that logits of any magnitude
    are allowed. The number of rounds is fixed, because testing for convergence would make the host
    wait for the device.

    Args:
        logits_TE: float tensor that does not require gradients.
        mask_T: bool, True for tokens that are not padding.
        rounds: number of rounds. Each round scales the rows and the columns once.
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
    """A router in which each expert chooses the `ceil(n k / E)` tokens with the highest scores
    among the n real tokens on this rank.

    The scores p are a softmax over experts and are also the weights of the choices. The load is
    always balanced, because all experts choose the same number of tokens. A token may be chosen by
    0 to E experts. On average, `top_k` experts choose a token. Among tokens with equal scores, the
    earlier token is chosen. An expert chooses among all tokens of a call. Do not use this router if
    a token must not depend on later tokens. For example, a language model would make different
    choices during generation than in training. Source: Zhou et al., 2022.
    """

    reads = SEVERAL
    any_number = True
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Return up to E choices per token, ordered by decreasing score; see `Router.select`."""
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
