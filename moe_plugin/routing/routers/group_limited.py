"""Routers that limit a choice to experts of a few groups, and balance by a bias on each expert's
score that only affects the choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.router import group_members
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.replay import counts
from moe_plugin.routing.routers.base import BY_SCORE, FORCED, LINEAR, Router


@routers.register("group_limited")
class GroupLimitedRouter(Router):
    """The `group_top_k` best of `groups` groups of consecutive experts, then their k best experts.

    The score of a group is the sum of its best `group_scores` scores (0: max(1, k // group_top_k)).
    Source: DeepSeek-V2 (1 score) and V3 (2 scores; 2024), node-limited routing; for V3's form use
    router sigmoid_bias with groups.

    Attributes:
        groups_needed: whether `router.groups` must be set.
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
        """Groups per token."""
        return self.config.group_top_k

    def counted_scores(self, k: int) -> int:
        """How many of a group's best scores make up the score of the group."""
        return self.config.group_scores or max(1, k // self.chosen_groups)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        self._check(call.k)
        return super().scores(x_TD, call)

    def select(self, call: RoutingCall) -> Tensor:
        """The k best of the best groups; see `Router.select`."""
        return call.choose(**self.limits(call.k))

    def limits(self, k: int) -> dict[str, int]:
        """Arguments of `RoutingCall.choose` that limit a choice to groups."""
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
                f"router.groups={groups} does not fit router {config.name} with num_experts="
                f"{experts}: must be a divisor; use e.g. the number of nodes")
        size = experts // groups
        if k > size * self.chosen_groups:
            raise ValueError(
                f"router.top_k={k} does not fit router {config.name}: must be <= "
                f"{size * self.chosen_groups}, the experts of {self.chosen_groups} of {groups} "
                "groups; lower top_k or groups")
        if config.group_scores > size:
            raise ValueError(
                f"router.group_scores={config.group_scores} is out of bounds: must be <= {size}, "
                "the experts of a group; use 0 for k // group_top_k")


@routers.register("sam")
class SAMRouter(GroupLimitedRouter):
    """The group of largest total probability, then the k likeliest experts in it.

    A token visits one of `router.groups` groups of consecutive experts, for example one node. Loss
    `sam_alignment` pulls the k likeliest experts into the chosen group. Source: HetuMoE (Nie et al.
    2022), Switch-and-Mixture gate; hierarchical top-k.
    """

    reads = BY_SCORE | LINEAR | {"groups"}
    chosen_groups = 1

    def counted_scores(self, k: int) -> int:
        """All scores of a group count."""
        return self.num_experts // self.config.groups

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Also notes the experts outside of the group; see `Router.weigh`."""
        groups, experts = self.config.groups, self.num_experts
        group_T1 = ids_TK[:, :1] // (experts // groups)
        call.outside_TE = ~group_members(group_T1, groups, experts)
        return super().weigh(call, ids_TK)


@routers.register("sigmoid_bias")
class SigmoidBiasRouter(GroupLimitedRouter):
    """The k largest s + b, s sigmoid scores; s alone is the weight; b moves against the load.

    After each step b_e += bias_rate * sign(mean load - load_e), load_e: choices of expert e by all
    data-parallel ranks since the last step; not where the router is frozen. With `router.groups`
    the choice is group-limited. Source: Wang et al. 2024 (auxiliary-loss-free balancing);
    DeepSeek-V3.

    The bias is a float32 buffer (`bias_E`, saved with the weights) for any dtype of the layer.
    Passes count as `moe_plugin.routing.replay.counts` says, those with replayed choices, too; the
    one collective is in `finish_step`.
    """

    reads = BY_SCORE | FORCED | LINEAR | {"groups", "group_top_k", "group_scores", "bias_rate"}
    groups_needed = False
    leaves_none = True
    score_name = "sigmoid"

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters, the biases and the counts; see `Router.build`."""
        super().build(dtype, device)
        self.balances = self.config.bias_rate > 0
        self.register_buffer("bias_E",
                             torch.zeros(self.num_experts, dtype=torch.float32, device=device))
        self.register_buffer("load_E",
                             torch.zeros(self.num_experts, dtype=torch.int64, device=device),
                             persistent=False)

    def select(self, call: RoutingCall) -> Tensor:
        """The k largest s + b; see `Router.select`."""
        return call.choose(bias_E=self.bias_E, **self.limits(call.k))

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Count the choices of a step; see `Router.after_choice`."""
        if counts(self.training):
            self.note_adapter()
            self.load_E.add_(call.own_load_KE.sum(0))
        return call.ids_TK

    def step_sums(self) -> list[Tensor]:
        """The load; see `RouterModule.step_sums`."""
        return [self.load_E] if self.balances else []

    def finish_step(self) -> None:
        """Move the biases by the load of all ranks and restart the counts. Collective."""
        load_E = self.step_comm.all_reduce(self.load_E).double()
        if not self.frozen:
            step_E = self.config.bias_rate * torch.sign(load_E.mean() - load_E)
            self.bias_E.add_(step_E.to(self.bias_E.dtype))
        super().finish_step()

    def forget_step(self) -> None:
        """Restart the counts, also of biases that stay; see `Router.forget_step`."""
        super().forget_step()
        self.load_E.zero_()


@routers.register("softmax_bias")
class SoftmaxBiasRouter(SigmoidBiasRouter):
    """As `sigmoid_bias` with softmax scores.

    Source: Ernie 4.5 (Baidu 2025).
    """

    reads = SigmoidBiasRouter.reads - {"score"}
    score_name = "softmax"
