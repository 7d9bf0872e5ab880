"""Noisy top-k: the noise itself is learned."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels import top_k_stable
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
    """

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

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """Choose the k largest noisy logits; see `Router.route`."""
        x_TD = self.jittered(x_TD)
        clean_TE = self.clean_logits(x_TD)
        noisy_TE, deviation_TE = clean_TE, None
        if self.training:
            deviation_TE = F.softplus(linear_scores(x_TD, self.noise_ED))
            # recorded with the choice, because the weights depend on it
            noise_TE = self.replayed(lambda: torch.randn_like(clean_TE), "noise",
                                     tuple(clean_TE.shape))
            noisy_TE = clean_TE + noise_TE * deviation_TE
        chosen_TK = self.replayed(lambda: top_k_stable(noisy_TE.detach(), k),
                                  shape=(clean_TE.shape[0], k))
        weights_TK = F.softmax(noisy_TE.gather(1, chosen_TK), dim=1)
        probs_TE = torch.zeros_like(clean_TE).scatter(1, chosen_TK, weights_TK)
        margin_TE = None
        if deviation_TE is not None:
            margin_TE = _margin(clean_TE, noisy_TE, deviation_TE, chosen_TK, k)
        inputs = self.loss_inputs(chosen_TK, mask_T, info, logits_TE=noisy_TE, probs_TE=probs_TE,
                         margin_TE=margin_TE)
        return self.finish(inputs, chosen_TK, weights_TK, weights_TK.detach()[:, 0])


def _margin(clean_TE: Tensor, noisy_TE: Tensor, deviation_TE: Tensor, chosen_TK: Tensor,
            k: int) -> Tensor:
    """(clean - k-th largest noisy logit of the other experts) / deviation; with k = E every expert
    is always in.
    """
    if k == noisy_TE.shape[1]:
        return torch.full_like(clean_TE, float("inf")) + 0 * clean_TE
    # for a chosen expert the k-th largest of the others is the (k+1)-th of all, else the k-th
    top_TK = noisy_TE.gather(1, top_k_stable(noisy_TE.detach(), k + 1))
    inside_TE = torch.zeros_like(noisy_TE, dtype=torch.bool).scatter(1, chosen_TK, True)
    threshold_TE = torch.where(inside_TE, top_TK[:, k : k + 1], top_TK[:, k - 1 : k])
    return (clean_TE - threshold_TE) / deviation_TE
