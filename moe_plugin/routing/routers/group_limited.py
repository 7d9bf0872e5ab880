"""Group-limited top-k: experts of a few groups only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import BY_SCORE, Router


@routers.register("group_limited")
class GroupLimitedRouter(Router):
    """The `group_top_k` best of `groups` groups of consecutive experts, then their k best experts.

    The score of a group is the sum of its best `group_scores` scores (0: max(1, k // group_top_k)).
    Source: DeepSeek-V2 (1 score) and V3 (2 scores; 2024), node-limited routing; for V3's form use
    router sigmoid_bias with groups.

    Attributes:
        groups_needed: whether `router.groups` must be set.
    """

    reads = BY_SCORE | {"groups", "group_top_k", "group_scores"}
    leaves_none = True
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

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """See `Router.scores`."""
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
