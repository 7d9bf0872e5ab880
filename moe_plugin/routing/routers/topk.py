"""The topk router (with GShard's policies for the second expert), the Switch and GShard routers,
and the cosine router.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.config import MoEConfig
from moe_plugin.kernels import top_k_stable
from moe_plugin.kernels.scores import linear_scores, shares
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import BY_SCORE, FORCED, LINEAR, SCORED, WITH_POLICY, keep_init
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router
from moe_plugin.utils.tensors import fill_, xavier_


@routers.register("topk")
class TopKRouter(Router):
    """A router with linear scores that chooses the experts with the k largest scores. Among equal
    scores, the expert with the lower index is chosen.

    The router is described in the Tutel paper (Hwang et al., 2022), section "router". Noise with a
    standard deviation of `noise / E` is added to the logits. Before any choice is dropped because
    of the capacity, the scores are divided by their sum over the chosen experts. This sum is
    clamped to a positive minimum.

    Attributes:
        second_expert_policy: how the router treats the second expert in training. If
            `second_expert_policy` is an empty string, the configured policy is used.
    """

    reads = WITH_POLICY | FORCED | LINEAR
    leaves_none = True
    second_expert_policy = ""

    def __init__(self, config: MoEConfig, **where: Any) -> None:
        super().__init__(config, **where)
        self.second_expert_policy = self.second_expert_policy or self.config.second_expert_policy

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the k best experts. With the policy "sampling", the second expert is drawn at
        random. See `Router.select`.
        """
        policy = self.second_expert_policy
        if not self.training or policy == "all":
            return call.choose()
        if call.k != 2:
            raise ValueError(
                f"top_k={call.k} cannot be used in training with "
                f"router.second_expert_policy={policy!r}, which requires top_k=2. Pass None, or "
                "set the policy to 'all'.")
        # The draw uses the logits without their graph, because a choice has no gradient.
        return call.choose(_drawn(call.logits_TE.detach()) if policy == "sampling" else None)

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """With the policy "random", drop some of the second experts; see `Router.after_choice`."""
        if not self.training or self.second_expert_policy != "random":
            return call.ids_TK
        # The draw is recorded, because a recomputation must drop the same experts.
        call.chosen_TK = call.ids_TK
        return self.replayed(lambda: self._drop_second(call.ids_TK, weights_TK.detach()),
                             "kept second choice", tuple(call.ids_TK.shape))

    def _drop_second(self, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        second_T = self.second_share(weights_TK)
        keep_T = torch.rand_like(second_T) < 2 * second_T
        return torch.stack([ids_TK[:, 0], ids_TK[:, 1].masked_fill(~keep_T, -1)], dim=1)

    def second_share(self, weights_TK: Tensor) -> Tensor:
        """Return the weight of the second expert, [T], half the probability of keeping it.

        If weights are divided by their sum before choices are dropped, the method returns the
        divided weight. If weights are not divided by their sum, the method returns the score, as in
        fairseq's `moe` branch.
        """
        return weights_TK[:, 1]


def _drawn(logits_TE: Tensor) -> Tensor:
    """Return the best expert and a second expert, [T, 2]. The second expert is drawn from a softmax
    over all experts except the best expert.
    """
    first_T1 = top_k_stable(logits_TE, 1)
    # The argmax of logits plus Gumbel noise is distributed like a draw from their softmax.
    gumbel_TE = -torch.empty_like(logits_TE).exponential_().log()
    second_T1 = (logits_TE + gumbel_TE).scatter(1, first_T1, float("-inf")).argmax(1, keepdim=True)
    return torch.cat([first_T1, second_T1], dim=1)


@routers.register("gshard")
class GShardRouter(TopKRouter):
    """A router that chooses the two experts with the highest probabilities. In training, the second
    expert is kept with probability `min(1, 2 g2)`.

    Here, `g2 = p2 / (p1 + p2)`, where p1 and p2 are the probabilities of the first and the second
    expert. The weights g are computed before the second expert is dropped.
    Source: GShard (Lepikhin et al., 2020), algorithm 1.
    """

    reads = BY_SCORE | LINEAR | {"second_expert_policy=random"}
    fixed_k = 2
    second_expert_policy = "random"

    def second_share(self, weights_TK: Tensor) -> Tensor:
        """Return the weight g2 of the second expert; see `TopKRouter.second_share`."""
        return shares(weights_TK)[:, 1]


@routers.register("switch")
class SwitchRouter(Router):
    """A router that chooses the expert with the highest probability. The weight of the expert is
    its probability.

    As in the paper, `router.input_jitter` is applied to the input. Source: Switch Transformer
    (Fedus et al., 2021).
    """

    reads = SCORED | {"score"} | FORCED | LINEAR
    fixed_k = 1


START, MOST = math.log(1 / 0.5), math.log(1 / 0.01)
SHORT = 1e-4  # vectors up to this length are treated as zero


@routers.register("cosine")
class CosineRouter(TopKRouter):
    """A router whose logits are `exp(min(temperature, log 100)) * cos(P x + b, a_e)`.

    Tokens and experts are compared in `cosine_dim` dimensions. The projection P, the bias b, the
    directions of the experts `a_e` and the temperature (initially log 2) are learned. In all other
    respects, the router is equivalent to the topk router. Source: the cosine gate of Tutel (Hwang
    et al., 2022); Chi et al., 2022.

    The cosine `cos(y, a)` is the dot product of `y / |y|` and `a / |a|`. If `|y| <= 1e-4`, the
    cosine is 0 and the gradient with respect to y is zero. Without the limit on `|y|`, a row of
    zeros (for example a padding token without a mask) could have an arbitrarily large gradient.
    """

    reads = WITH_POLICY | FORCED | {"cosine_dim"}
    multiplies_in_blocks = False

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the projection, the bias, the directions and the temperature. Host frameworks must
        not initialize the parameters again.
        """
        where, width = {"dtype": dtype, "device": device}, self.config.cosine_dim
        self.project_PD = nn.Parameter(torch.empty(width, self.model_dim, **where))
        self.project_P = nn.Parameter(torch.empty(width, **where))
        self.direction_EP = nn.Parameter(torch.empty(self.num_experts, width, **where))
        self.temperature = nn.Parameter(torch.empty(1, **where))
        for parameter in self.parameters():
            keep_init(parameter)

    def reset_parameters(self) -> None:
        """Initialize the projection with the Xavier distribution, the directions with a standard
        deviation of 0.01, and the temperature to log 2.
        """
        xavier_(self.project_PD)
        fill_(self.direction_EP, torch.randn(self.direction_EP.shape) * 0.01)
        with torch.no_grad():
            self.project_P.zero_()
            self.temperature.fill_(START)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return the scaled cosines; see `Router.scores`."""
        x_TP = linear_scores(x_TD, self.project_PD)
        dtype = x_TP.dtype
        x_TP = _directions(x_TP + self.project_P.to(dtype))
        direction_EP = F.normalize(self.direction_EP.to(dtype), dim=1)
        scale = self.temperature.to(dtype).clamp(max=MOST).exp()
        return self.noisy(F.linear(x_TP, direction_EP) * scale, call)


def _directions(y_TP: Tensor) -> Tensor:
    """Return `y / |y|`. Each row has length 1. Rows that are not longer than `SHORT` are replaced
    by zeros and have no gradient.
    """
    squared_T1 = y_TP.square().sum(1, keepdim=True)
    # Dividing by infinity gives zeros, and a gradient of zero instead of NaN.
    return y_TP / squared_T1.masked_fill(squared_T1 <= SHORT**2, math.inf).sqrt()
