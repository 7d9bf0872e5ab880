"""Group-limited top-k: experts of a few groups only."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_plugin.config import MoEConfig
from moe_plugin.kernels import top_k_stable
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.topk import TopKRouter
from moe_plugin.routing.selection import best_groups, check_groups, group_members, top_k_inside


@routers.register("group_limited")
class GroupLimitedRouter(TopKRouter):
    """The `group_top_k` best of `groups` groups of consecutive experts, then the k best experts in
    them.

    A group is worth the sum of its best max(1, k // group_top_k) scores. Source: DeepSeek-V2 and V3
    (2024), node-limited routing; for V3's form use router sigmoid_bias with groups.
    """

    second_expert_policy = "all"
    groups_needed = True

    def __init__(self, config: MoEConfig, **where: Any) -> None:
        super().__init__(config, **where)
        self._check(self.config.top_k)

    def _check(self, k: int) -> None:
        if self.groups_needed or self.config.groups:
            check_groups(self.config.groups, self.num_experts, k, self.config.group_top_k,
                         self.config.name)

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """See `TopKRouter.route`."""
        self._check(k)
        return super().route(x_TD, mask_T, k, info)

    def _select(self, scores_TE: Tensor, logits_TE: Tensor, mask_T: Tensor, k: int) -> Tensor:
        return self.limited(scores_TE.detach(), k)

    def limited(self, scores_TE: Tensor, k: int) -> Tensor:
        """The k best scores of the best groups, int64 [T, K]."""
        groups, take = self.config.groups, self.config.group_top_k
        if not groups:
            return top_k_stable(scores_TE, k)
        groups_TG = best_groups(scores_TE, groups, take, max(1, k // take))
        return top_k_inside(scores_TE, group_members(groups_TG, groups, self.num_experts), k)
