"""The SparseMixer router. A router that chooses experts one after another and samples them in
training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router

# factor on the weight of a choice that is not the best; fraction of draws without this factor
_HALFWAY, _FULL = 1 / 3, 0.25


@routers.register("sparsemixer")
class SparseMixerRouter(Router):
    """A router that chooses the best remaining expert k times, with weights from a softmax over the
    experts that are close to the best remaining expert.

    An expert is close to the best expert if `(best - logit) / max(|logit|, best) <= 2 * mixer_eps`.
    In training, an expert is drawn from the softmax instead of choosing the best remaining expert.
    If the drawn expert is not the best remaining expert, its weight is multiplied by 1/3 in three
    out of four draws. The gradient of the weight is not multiplied by 1/3. Multiplying only the
    weight gives Heun's third-order estimate of the gradient with respect to the choice. Source: Liu
    et al., 2024, GRIN, arXiv 2409.12136; Phi-3.5-MoE.
    """

    reads = frozenset({"input_jitter", "input_dropout", "mixer_eps"})
    adds_noise = False
    leaves_none = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the best remaining expert, or draw an expert in training; see `Router.select`."""
        left_TE, chosen = call.logits_TE.detach(), list[Tensor]()
        for _ in range(call.k):
            near_TE = self._near(call.logits_TE.detach(), left_TE)
            if self.training:
                # With Gumbel noise, the argmax is distributed like a draw from the softmax.
                near_TE = near_TE - torch.empty_like(near_TE).exponential_().log()
            chosen.append(near_TE.argmax(1, keepdim=True))
            left_TE = left_TE.scatter(1, chosen[-1], float("-inf"))
        return torch.cat(chosen, 1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the weights described in the class docstring; see `Router.weigh`."""
        left_TE, weights = call.logits_TE, list[Tensor]()
        lowered_TK = self._lowered(ids_TK) if self.training else None
        for step, chosen_T1 in enumerate(ids_TK.split(1, 1)):
            near_TE = self._near(call.logits_TE, left_TE)
            weight_T1 = near_TE.softmax(1).gather(1, chosen_T1)
            if lowered_TK is not None:
                best_T1 = near_TE.argmax(1, keepdim=True)
                lower_T1 = lowered_TK[:, step:step + 1] & (best_T1 != chosen_T1)
                # Subtracting a detached part lowers the value and leaves the gradient as it is.
                weight_T1 = weight_T1 - weight_T1.detach() * lower_T1 * (1 - _HALFWAY)
            weights.append(weight_T1)
            left_TE = left_TE.scatter(1, chosen_T1, float("-inf"))
        return torch.cat(weights, 1)

    def _near(self, logits_TE: Tensor, left_TE: Tensor) -> Tensor:
        """Return the logits of the remaining experts that are close to the best remaining expert,
        and -inf for all other experts.
        """
        # Detached, because the set of close experts has no gradient.
        best_T1 = left_TE.detach().amax(1, keepdim=True)
        size_TE = torch.maximum(logits_TE.detach().abs(), best_T1)
        far_TE = (best_T1 - logits_TE.detach()) / size_TE > 2 * self.config.mixer_eps
        return left_TE.masked_fill(far_TE, float("-inf"))

    def _lowered(self, ids_TK: Tensor) -> Tensor:
        """Select three out of four choices at random. A recomputation selects the same choices."""
        return self.replayed(
            lambda: torch.rand(ids_TK.shape, device=ids_TK.device) > _FULL, "midpoint",
            tuple(ids_TK.shape))
