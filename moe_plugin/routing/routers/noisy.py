"""Noisy top-k: the noise itself is learned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels import route, top_k_stable
from moe_plugin.kernels.router import Routed, Rule
from moe_plugin.kernels.scores import linear_scores
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.marks import keep_init
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("noisy_topk")
class NoisyTopKRouter(Router):
    """The k largest of H = W x + N(0, 1) * softplus(V x) (noise in training), softmax over them.

    V starts at zero. Balanced by losses `importance` and `noisy_load` (both CV^2). `router.noise`
    has no effect. Source: Shazeer et al. 2017, eqs. 3 to 5.

    As in eqs. 3 and 5 all other logits are -inf for the softmax. One pass over such logits gives
    weights, importance and entropy. The choice is made before it, by the logits themselves, because
    a softmax may round their differences away; `noisy_load` and `z` read the logits of all experts.
    """

    one_pass = True
    needs_mask = False
    own_losses = frozenset({"noisy_load"})

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create W, and V for the noise."""
        super().build(dtype, device)
        self.noise_ED = nn.Parameter(
            torch.empty(self.num_experts, self.model_dim, dtype=dtype, device=device))
        keep_init(self.noise_ED)

    def reset_parameters(self) -> None:
        """Draw W (Xavier) and set V to zero: noise of deviation log 2."""
        super().reset_parameters()
        nn.init.zeros_(self.noise_ED)

    def noise_scale(self) -> float:
        """0: the noise is its own."""
        return 0.0

    def route(self, x_TD: Tensor, mask_T: Tensor | None, k: int, info: TokenInfo) -> Routing:
        """Choose the k largest noisy logits; see `Router.route`."""
        clean_TE, noisy_TE, deviation_TE = self._noisy(self.jittered(x_TD))
        fuses, best_TN = self._fuses(), None
        # losses of the user's, with which nothing is fused, may read the margin
        if self.training and ("noisy_load" in self.loss_names or not fuses):
            best_TN = top_k_stable(noisy_TE.detach(), min(k + 1, self.num_experts))
        chosen_TK = self.replayed(lambda: _first(noisy_TE, best_TN, k),
                                  shape=(clean_TE.shape[0], k))
        outside_TE = torch.ones_like(noisy_TE, dtype=torch.bool).scatter_(1, chosen_TK, False)
        margin_TE = None
        if best_TN is not None and deviation_TE is not None:
            margin_TE = _margin(clean_TE, noisy_TE, deviation_TE, outside_TE, best_TN, k)
        if fuses:
            routed = _in_one_pass(noisy_TE, mask_T, chosen_TK, outside_TE)
            weights_TK, probs_TE = routed.weights_TK, noisy_TE
        else:
            routed, weights_TK = None, F.softmax(noisy_TE.gather(1, chosen_TK), dim=1)
            probs_TE = torch.zeros_like(clean_TE).scatter(1, chosen_TK, weights_TK)
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=noisy_TE, probs_TE=probs_TE,
                                  margin_TE=margin_TE, routed=routed)
        return self.finish(inputs, chosen_TK, weights_TK, weights_TK.detach()[:, 0])

    def _noisy(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits [T, E] without and with noise, and its deviation, None without noise."""
        clean_TE = self.clean_logits(x_TD)
        if not self.training:
            return clean_TE, clean_TE, None
        deviation_TE = F.softplus(linear_scores(x_TD, self.noise_ED))
        # recorded with the choice, because the weights depend on it
        noise_TE = self.replayed(lambda: torch.randn_like(clean_TE), "noise",
                                 tuple(clean_TE.shape))
        return clean_TE, clean_TE + noise_TE * deviation_TE, deviation_TE


def _first(noisy_TE: Tensor, best_TN: Tensor | None, k: int) -> Tensor:
    """The k best, int64 [T, K]; best_TN: k or more of them, None: not known."""
    if best_TN is None:
        return top_k_stable(noisy_TE.detach(), k)
    return best_TN[:, :k].contiguous()


def _in_one_pass(noisy_TE: Tensor, mask_T: Tensor | None, chosen_TK: Tensor,
                 outside_TE: Tensor) -> Routed:
    """Weights, importance and entropy of the choices; outside_TE: bool, all others."""
    among_TE = noisy_TE.masked_fill(outside_TE, float("-inf"))
    rule = Rule(chosen_TK.shape[1], normalize=False, z=False)
    # the loss z is of all logits
    return replace(route(among_TE, mask_T, rule, chosen_TK), z=None)


def _margin(clean_TE: Tensor, noisy_TE: Tensor, deviation_TE: Tensor, outside_TE: Tensor,
            best_TN: Tensor, k: int) -> Tensor:
    """(clean - k-th largest noisy logit of the other experts) / deviation; with k = E every expert
    is always in.

    outside_TE: bool, experts not chosen. best_TN: the k + 1 best (all, with k = E).
    """
    if k == noisy_TE.shape[1]:
        return torch.full_like(clean_TE, float("inf")) + 0 * clean_TE
    # for a chosen expert the k-th largest of the others is the (k+1)-th of all, else the k-th
    top_T2 = noisy_TE.gather(1, best_TN[:, k - 1 :])
    threshold_TE = torch.where(outside_TE, top_T2[:, :1], top_T2[:, 1:])
    return (clean_TE - threshold_TE) / deviation_TE
