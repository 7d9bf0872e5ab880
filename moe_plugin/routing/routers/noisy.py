"""Routers that draw random numbers: noisy top-k, dense-to-sparse and SparseMixer."""

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


@routers.register("dense_to_sparse")
class DenseToSparseRouter(Router):
    """A router that chooses all experts with `p >= threshold`, where
    `p = softmax((logits + Gumbel noise) / t)` and the temperature t decreases during training.

    A token always uses its best expert. The weight of each choice is p. The temperature t decreases
    geometrically from `sparsity.start` to `sparsity.end` over `sparsity.steps` optimizer steps. The
    number of completed steps is saved with the weights. In evaluation, no noise is added. Choices
    are
    sorted by decreasing p. `top_k` has no effect, because a token may have up to E choices. Source:
    the dense-to-sparse gate of EvoMoE (Nie et al., 2021).
    """

    reads = SEVERAL | {"sparsity"}
    reads_top_k = False
    any_number = True
    own_losses = frozenset()
    score_name = "softmax"
    step: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and the counter of steps."""
        super().build(dtype, device)
        self.fixed_k = self.num_experts
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=device))

    def temperature(self) -> Tensor:
        """Return the temperature `start * (end / start)^min(1, step / steps)`, float64 [1]."""
        rules = self.config.sparsity
        done = (self.step.double() / rules.steps).clamp(max=1.0)
        return rules.start * (rules.end / rules.start) ** done

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return the logits, and set the scores p of all experts; see `Router.scores`."""
        logits_TE = noisy_TE = super().scores(x_TD, call)
        if self.training:
            self.note_adapter()
            # Recorded with the choice, because the weights depend on the noise.
            noisy_TE = logits_TE + self.replayed(
                lambda: -torch.empty_like(logits_TE).exponential_().log(), "noise",
                tuple(logits_TE.shape))
        call.scores_TE = F.softmax(noisy_TE / self.temperature().to(noisy_TE.dtype), dim=1)
        return logits_TE

    def select(self, call: RoutingCall) -> Tensor:
        """Return up to E choices per token; see `Router.select`."""
        sorted_TE, ids_TE = torch.sort(call.scores_TE.detach(), dim=1, descending=True, stable=True)
        skipped_TE = sorted_TE < self.config.sparsity.threshold
        # A token always keeps its best expert, even if its share is below the threshold.
        skipped_TE[:, 0] = False
        return ids_TE.masked_fill(skipped_TE, -1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the scores p; see `Router.weigh`."""
        return call.scores_TE.gather(1, ids_TK.clamp(min=0))

    def finish_step(self) -> None:
        """Count the step. If the router is frozen, its temperature does not change."""
        super().finish_step()
        if not self.frozen:
            self.step.add_(1)


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
