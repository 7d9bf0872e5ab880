"""Routers that choose experts from a few groups, and routers that balance the load with a bias.

The bias is added to an expert's score when experts are chosen, but not when weights are computed.
`QuantileRouter` computes its biases from quantiles of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.kernels.router import group_members
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import BY_SCORE, FORCED, LINEAR
from moe_plugin.routing.counting import add_counts
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("group_limited")
class GroupLimitedRouter(Router):
    """A router that chooses the `group_top_k` best of `groups` groups of consecutive experts, and
    then the k best experts within these groups.

    The score of a group is the sum of the `group_scores` highest scores within the group. If
    `group_scores` is 0, `max(1, k // group_top_k)` scores are summed. Source: node-limited routing
    of DeepSeek-V2 (1 score) and V3 (2 scores),
    2024. For the routing of V3, use the sigmoid_bias router and set `router.groups`.

    Attributes:
        groups_needed: True if `router.groups` must be set.
    """

    reads = BY_SCORE | FORCED | LINEAR | {"groups", "group_top_k", "group_scores"}
    leaves_none = True
    groups_needed = True

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters and check the groups; see `Router.build`."""
        super().build(dtype, device)
        for k in self.config.several_k:
            self._check(k)

    @property
    def chosen_groups(self) -> int:
        """Number of groups chosen per token."""
        return self.config.group_top_k

    def counted_scores(self, k: int) -> int:
        """Return how many of a group's highest scores are summed to obtain the score of the group.
        """
        return self.config.group_scores or max(1, k // self.chosen_groups)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        self._check(call.k)
        return super().scores(x_TD, call)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the k best experts of the best groups; see `Router.select`."""
        return call.choose(**self.limits(call.k))

    def limits(self, k: int) -> dict[str, Any]:
        """Return the arguments of `RoutingCall.choose` that restrict the choices to groups."""
        if not self.config.groups:
            return {}
        return {"groups": self.config.groups, "take": self.chosen_groups,
                "best": self.counted_scores(k)}

    def _check(self, k: int) -> None:
        groups, experts, config = self.config.groups, self.num_experts, self.config
        if not self.groups_needed and not groups:
            return
        if groups < 1 or experts % groups:
            raise ValueError(
                f"router.groups={groups} cannot be used by router {config.name}, because it is not "
                f"a divisor of num_experts={experts}. Use a divisor, e.g. the number of nodes.")
        size = experts // groups
        if k > size * self.chosen_groups:
            raise ValueError(
                f"router.top_k={k} is too large for router {config.name}, because "
                f"{self.chosen_groups} of {groups} groups have only {size * self.chosen_groups} "
                "experts. Use a smaller top_k or fewer groups.")
        if config.group_scores > size:
            raise ValueError(
                f"router.group_scores={config.group_scores} exceeds the {size} experts of a group. "
                "Use a smaller number, or 0 for k // group_top_k.")


@routers.register("sam")
class SAMRouter(GroupLimitedRouter):
    """A router that chooses the group with the largest total probability, and then the k experts of
    this group with the highest probabilities.

    Each token is sent to a single group out of `router.groups` groups of consecutive experts. A
    group can, for example, contain the experts of one node. The `sam_alignment` loss trains the
    router so that the k experts with the highest probabilities belong to the chosen group. Source:
    the Switch-and-Mixture gate (hierarchical top-k) of HetuMoE (Nie et al., 2022).
    """

    reads = BY_SCORE | LINEAR | {"groups"}
    chosen_groups = 1

    def counted_scores(self, k: int) -> int:
        """Return the number of experts in a group, because all scores of a group are summed."""
        return self.num_experts // self.config.groups

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the weights, and mark the experts outside the chosen group; see `Router.weigh`."""
        groups, experts = self.config.groups, self.num_experts
        # All choices of a token lie in one group, so the first choice identifies the group.
        group_T1 = ids_TK[:, :1] // (experts // groups)
        call.outside_TE = ~group_members(group_T1, groups, experts)
        return super().weigh(call, ids_TK)


@routers.register("sigmoid_bias")
class SigmoidBiasRouter(GroupLimitedRouter):
    """A router that chooses the experts with the k largest values of s + b, where s are sigmoid
    scores and b is a bias that decreases for experts with a high load.

    The weights are the scores s, without the bias. After each step,
    `b_e += bias_rate * sign(mean load - load_e)`, where load_e is the number of choices of expert e
    on all data-parallel ranks since the last step. If the router is frozen, its biases do not
    change. If `router.groups` is set, experts are chosen from a limited number of groups. Source:
    Wang et al., 2024 (auxiliary-loss-free balancing); DeepSeek-V3.

    Regardless of the layer's dtype, the bias is stored in the float32 buffer `bias_E`, which is
    saved with the weights. `moe_plugin.routing.counting.counts` decides which passes are counted.
    Passes with replayed choices are also counted. The router's only collective runs in
    `finish_step`.
    """

    reads = BY_SCORE | FORCED | LINEAR | {"groups", "group_top_k", "group_scores", "bias_rate"}
    groups_needed = False
    leaves_none = True
    score_name = "sigmoid"
    bias_E: Tensor
    load_E: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters, the biases and the counts; see `Router.build`."""
        super().build(dtype, device)
        # With a rate of 0 the biases never move, and a balance loss is needed.
        self.balances = self.config.bias_rate > 0
        self.register_buffer("bias_E",
                             torch.zeros(self.num_experts, dtype=torch.float32, device=device))
        self.register_buffer("load_E",
                             torch.zeros(self.num_experts, dtype=torch.int64, device=device),
                             persistent=False)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the experts with the k largest values of s + b; see `Router.select`."""
        return call.choose(bias_E=self.bias_E, **self.limits(call.k))

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Count the choices of this step; see `Router.after_choice`."""
        if self.training:
            self.note_adapter()
            add_counts(self.load_E, lambda: call.own_load_KE.sum(0), True)
        return call.ids_TK

    def step_sums(self) -> list[Tensor]:
        """Return the load of the current step; see `RouterModule.step_sums`."""
        return [self.load_E] if self.balances else []

    def finish_step(self) -> None:
        """Update the biases from the load of all ranks, and reset the counts. Collective."""
        # Float64, because float32 would round loads above 2^24.
        load_E = self.step_comm.all_reduce(self.load_E).double()
        if not self.frozen:
            step_E = self.config.bias_rate * torch.sign(load_E.mean() - load_E)
            self.bias_E.add_(step_E.to(self.bias_E.dtype))
        super().finish_step()

    def forget_step(self) -> None:
        """Reset the counts without changing the biases; see `Router.forget_step`."""
        super().forget_step()
        self.load_E.zero_()


@routers.register("softmax_bias")
class SoftmaxBiasRouter(SigmoidBiasRouter):
    """The `sigmoid_bias` router, but with softmax scores.

    Source: Ernie 4.5 (Baidu 2025).
    """

    reads = SigmoidBiasRouter.reads - {"score"}
    score_name = "softmax"


@routers.register("quantile")
class QuantileRouter(Router):
    """A router that chooses the experts with the k largest values of l + b, where l are the logits
    and b are biases.

    The weights are the scores of the chosen experts without b. The biases b are computed from
    quantiles of l. Computing b is one step of a dual method that finds a balanced plan.

    For a training pass with n real tokens, `a_t` is the (k + 1)-th largest value of `l_te + b_e`
    over the experts of token t. `q_e` is the (floor(n k / E) + 1)-th largest value of `l_te - a_t`
    over the tokens. With `b_e = -q_e`, about n k / E tokens would prefer expert e to their best
    unchosen expert. After each step, `b_e` is set to `c b_e - (1 - c) q_e`, minus the mean of this
    expression over the experts. Here, c is the `quantile_ema` setting, and q is averaged over the
    passes of all data-parallel ranks that had tokens. The biases of a frozen router do not change.
    Source: `quantile_balancing` of Megatron-core 0.19 (`qb_dual_update`). Megatron's `qb_beta` is
    -b. In Megatron, the tokens of all ranks that share a sequence form one pass. Here, the tokens
    of each rank form a separate pass.

    Regardless of the layer's dtype, the bias is stored in the float32 buffer `bias_E`, which is
    saved with the weights. `moe_plugin.routing.counting.counts` decides which passes are counted.
    Passes with replayed choices are also counted. A pass is not counted if a logit of a real token
    is not finite. The router's only collective runs in `finish_step`.
    """

    reads = BY_SCORE | FORCED | LINEAR | {"quantile_ema"}
    leaves_none = True
    balances = True
    bias_E: Tensor
    passes_E: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters, the biases and the sums; see `Router.build`."""
        super().build(dtype, device)
        zeros_E = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias_E", zeros_E)
        # sums of q over the passes of a step, and the number of passes (last element)
        self.register_buffer("passes_E", torch.cat([zeros_E, zeros_E[:1]]), persistent=False)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the experts with the k largest values of l + b; see `Router.select`."""
        return call.choose(top_k_stable(self._biased(call), call.k))

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Add the quantiles of this pass to the sums; see `Router.after_choice`."""
        if self.training and call.k < self.num_experts:
            self.note_adapter()
            if call.ids_TK.shape[0]:
                add_counts(self.passes_E, lambda: quantiles(
                    call.logits_TE.detach(), self._biased(call), call.real_T, call.k), True)
        return call.ids_TK

    def step_sums(self) -> list[Tensor]:
        """Return the sums of the quantiles; see `RouterModule.step_sums`."""
        return [self.passes_E]

    def _biased(self, call: RoutingCall) -> Tensor:
        return call.logits_TE.detach() + self.bias_E

    def finish_step(self) -> None:
        """Update the biases from the quantiles of all ranks, and reset the sums. Collective."""
        passes_E = self.step_comm.all_reduce(self.passes_E).double()
        if not self.frozen:
            keep, count = self.config.quantile_ema, passes_E[-1]
            mean_E = passes_E[:-1] / torch.where(count > 0, count, 1)
            new_E = keep * self.bias_E - (1 - keep) * mean_E
            # Without any pass the biases stay. The check runs on the device to avoid a wait.
            new_E = torch.where(count > 0, new_E - new_E.mean(), self.bias_E)
            self.bias_E.copy_(new_E)
        super().finish_step()


def quantiles(logits_TE: Tensor, biased_TE: Tensor, real_T: Tensor, k: int) -> Tensor:
    """Return a float32 tensor [E + 1]: the quantiles q of `QuantileRouter`, followed by 1.

    If there are no real tokens, or if a logit of a real token is not finite, all elements are 0.

    Args:
        logits_TE, biased_TE: logits l, and biased logits l + b.
        real_T: bool [T], True for tokens that are not padding. T must be at least 1.
        k: number of experts per token, which must be less than E.
    """
    tokens, experts = logits_TE.shape
    over_TE = logits_TE - biased_TE.topk(k + 1, dim=1).values[:, k:]
    over_TE = over_TE.masked_fill(~real_T[:, None], float("-inf"))
    # The number of real tokens stays on the device, so that the host does not wait for it.
    real = real_T.sum()
    rank_1E = (real * k // experts).clamp(max=tokens - 1).expand(1, experts)
    quantile_1E = torch.sort(over_TE, dim=0, descending=True).values.gather(0, rank_1E)
    # A single NaN would never leave the biases.
    finite = (biased_TE.isfinite() | ~real_T[:, None]).all()
    counts = (real > 0) & finite
    return torch.cat([torch.where(counts, quantile_1E[0], 0.0).float(), counts.float()[None]])
