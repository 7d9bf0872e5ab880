"""Noisy top-k, a router with learned noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels import route, route_by_steps, top_k_stable
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import SOFTMAX, Softmax, linear_scores
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import SEVERAL, keep_init
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("noisy_topk")
class NoisyTopKRouter(Router):
    """A router that chooses the experts with the k largest values of
    `H = W x + N(0, 1) * softplus(V x)`.

    The weights are a softmax over the chosen experts. Noise is added only in training. V is
    initialized to zero. The `importance` and `noisy_load` losses balance the load. Both losses are
    squared coefficients of variation. The `router.noise` setting has no effect. Source: Shazeer et
    al., 2017, equations 3 to 5.

    As in equations 3 and 5, the logits of experts that were not chosen are set to -inf before the
    softmax. A single run of the kernel on the masked logits computes the weights, the importance
    and the entropy. Experts are chosen from the logits before the kernel runs, because rounding in
    a softmax may remove small differences. The `noisy_load` and `z` losses read the logits of all
    experts.
    """

    reads = SEVERAL - {"noise"}
    adds_noise = False
    leaves_none = True
    score_name = "softmax"
    own_losses = frozenset({"noisy_load"})

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the matrix W of the logits and the matrix V of the noise."""
        super().build(dtype, device)
        self.noise_ED = nn.Parameter(
            torch.empty(self.num_experts, self.model_dim, dtype=dtype, device=device))
        keep_init(self.noise_ED)

    def reset_parameters(self) -> None:
        """Initialize W with the Xavier distribution and V with zeros. Initially, the noise has a
        standard deviation of log 2.
        """
        super().reset_parameters()
        nn.init.zeros_(self.noise_ED)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return the logits with the learned noise added; see `Router.scores`."""
        clean_TE = linear_scores(x_TD, self.weight_ED)
        if not self.training:
            return clean_TE
        call.clean_TE, call.deviation_TE = clean_TE, F.softplus(linear_scores(x_TD, self.noise_ED))
        # Recorded with the choice, because the weights depend on the noise.
        noise_TE = self.replayed(lambda: torch.randn_like(clean_TE), "noise",
                                 tuple(clean_TE.shape))
        return clean_TE + noise_TE * call.deviation_TE

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the experts with the k largest noisy logits; see `Router.select`."""
        return top_k_stable(call.logits_TE.detach(), call.k)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the softmax over the chosen experts; see `Router.weigh`."""
        call.score = _SoftmaxAmong(call.unchosen_TE)
        rule = Rule(call.k, False, SOFTMAX, z=False)  # the loss z must use all logits
        if call.one_pass:
            call.routed = route(call.score.masked(call.logits_TE), call.mask_T, rule, ids_TK)
        else:
            call.routed = route_by_steps(call.logits_TE, call.scores_TE, call.scores_TE,
                                         call.mask_T, rule, ids_TK)
        # z would be that of the masked logits; None makes the loss compute it from all logits.
        call.routed = replace(call.routed, z=None)
        call.priority_T = call.routed.weights_TK.detach()[:, 0]
        return call.routed.weights_TK


class _SoftmaxAmong(Softmax):
    """A score function that computes a softmax over some of the experts. outside_TE: bool [T, E],
    True for experts that are excluded from the softmax.
    """

    def __init__(self, outside_TE: Tensor) -> None:
        self.outside_TE = outside_TE

    def masked(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.masked_fill(self.outside_TE, float("-inf"))

    def scores(self, logits_TE: Tensor) -> Tensor:
        return super().scores(self.masked(logits_TE))
