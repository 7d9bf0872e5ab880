"""Routers that balance within a call: choices from a nearly balanced plan, and experts that pick
tokens.
"""

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
    """In training the k largest of the balanced plan of exp(logits), else the k largest scores.

    Plan: rows (tokens) and columns (experts) are scaled alternately, `sinkhorn_rounds` times, over
    this rank's real tokens. Weights: sigmoid of the logit for k = 1, softmax over all experts for k
    > 1, not divided by their sum. Source: Clark et al. 2022 (S-BASE); weights as in Megatron-core.
    """

    reads = SEVERAL | {"sinkhorn_rounds"}
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Choose by the plan; see `Router.select`."""
        if self.training:
            return top_k_stable(log_plan(call.logits_TE.detach(), call.real_T,
                                         self.config.sinkhorn_rounds), call.k)
        return top_k_stable(_scores(call).detach(), call.k)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """The scores; see `Router.weigh`."""
        return _scores(call).gather(1, ids_TK)


def _scores(call: RoutingCall) -> Tensor:
    return torch.sigmoid(call.logits_TE) if call.k == 1 else call.scores_TE


def log_plan(logits_TE: Tensor, mask_T: Tensor, rounds: int) -> Tensor:
    """Logarithm [T, E] of the plan whose columns sum to 1/E and whose rows tend to 1/S.

    S: real tokens. Logarithms allow logits of any size. The number of rounds is fixed: testing for
    convergence would make the host wait for the device.

    Args:
        logits_TE: float, without gradient.
        mask_T: bool, True = real token.
        rounds: of scaling.
    """
    tokens = mask_T.sum().clamp(min=1).to(logits_TE.dtype)
    plan_TE = torch.where(mask_T[:, None], logits_TE, torch.zeros_like(logits_TE))
    hidden_T1 = torch.zeros_like(plan_TE[:, :1]).masked_fill(~mask_T[:, None], float("-inf"))
    if not plan_TE.shape[0]:
        return plan_TE
    for _ in range(rounds):
        plan_TE = plan_TE - torch.logsumexp(plan_TE, 1, keepdim=True) - tokens.log()
        column_1E = torch.logsumexp(plan_TE + hidden_T1, 0, keepdim=True)
        column_1E = torch.where(column_1E.isfinite(), column_1E, 0.0)  # no real token at all
        plan_TE = plan_TE - column_1E - math.log(plan_TE.shape[1])
    return plan_TE


@routers.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Each expert takes the ceil(n k / E) of this rank's n real tokens with the highest scores.

    Scores are p = softmax over experts, which also weigh the choices. Balanced by construction; a
    token has between 0 and E experts, `top_k` on average. Of equal scores the earlier token wins.
    An expert sees all tokens of a call before it picks: do not use it where a token must not depend
    on later ones (a language model would generate with other choices than those of its training).
    Source: Zhou et al. 2022.
    """

    reads = SEVERAL
    any_number = True
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Up to E choices per token, the likeliest first; see `Router.select`."""
        probs_TE, real_T = call.scores_TE.detach(), call.real_T
        # the number of real tokens stays on the device: it is compared with the rank of each token
        order_TE = torch.sort(probs_TE.masked_fill(~real_T[:, None], -1.0), dim=0, descending=True,
                              stable=True).indices
        place_T1 = torch.arange(real_T.shape[0], device=real_T.device)[:, None]
        rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, place_T1.expand_as(order_TE))
        each = (real_T.sum() * call.k + self.num_experts - 1) // self.num_experts
        taken_TE = (rank_TE < each) & real_T[:, None]
        picked_TE = probs_TE.masked_fill(~taken_TE, -1.0)
        value_TE, ids_TE = torch.sort(picked_TE, dim=1, descending=True, stable=True)
        return ids_TE.masked_fill(value_TE < 0, -1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """p; see `Router.weigh`."""
        return call.scores_TE.gather(1, ids_TK.clamp(min=0))
