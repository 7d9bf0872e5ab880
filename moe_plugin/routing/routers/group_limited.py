"""Group-limited top-k: experts of a few groups only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.kernels.router import Rule
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.groups import check_groups, top_k_in_groups
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.topk import TopKRouter


@routers.register("group_limited")
class GroupLimitedRouter(TopKRouter):
    """The `group_top_k` best of `groups` groups of consecutive experts, then their k best experts.

    The score of a group is the sum of its best `group_scores` scores (0: max(1, k // group_top_k)).
    Source: DeepSeek-V2 (1 score) and V3 (2 scores; 2024), node-limited routing; for V3's form use
    router sigmoid_bias with groups.

    Attributes:
        groups_needed: whether `router.groups` must be set.
    """

    second_expert_policy = "all"
    one_pass = True
    groups_needed = True

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters and check the groups; see `Router.build`."""
        super().build(dtype, device)
        self._check(self.config.top_k)

    @property
    def chosen_groups(self) -> int:
        """Groups per token."""
        return self.config.group_top_k

    def counted_scores(self, k: int) -> int:
        """How many of a group's best scores make up the score of the group."""
        return self.config.group_scores or max(1, k // self.chosen_groups)

    def _check(self, k: int) -> None:
        if self.groups_needed or self.config.groups:
            check_groups(self.config.groups, self.num_experts, k, self.chosen_groups,
                         self.config.name)
            size = self.num_experts // self.config.groups
            if self.config.group_scores > size:
                raise ValueError(
                    f"router.group_scores={self.config.group_scores} is out of bounds: must be <= "
                    f"{size}, the experts of a group; use 0 for k // group_top_k")

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """See `TopKRouter.route`."""
        self._check(k)
        return super().route(x_TD, mask_T, k, info)

    def rule(self, k: int) -> Rule:
        """See `TopKRouter.rule`."""
        if not self.config.groups:
            return super().rule(k)
        return replace(super().rule(k), groups=self.config.groups, take=self.chosen_groups,
                       best=self.counted_scores(k))

    def _select(self, scores_TE: Tensor, logits_TE: Tensor, mask_T: Tensor, k: int) -> Tensor:
        return self.limited(scores_TE.detach(), k)

    def limited(self, scores_TE: Tensor, k: int) -> Tensor:
        """The k best of scores_TE in the best groups, int64 [T, K]."""
        if not self.config.groups:
            return top_k_stable(scores_TE, k)
        return top_k_in_groups(scores_TE, self.config.groups, self.chosen_groups,
                               self.counted_scores(k), k)
