"""SAM router: a group of experts first, then the k best inside it."""

from __future__ import annotations

from torch import Tensor

from moe_plugin.kernels.top_k import group_members
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import BY_SCORE
from moe_plugin.routing.routers.group_limited import GroupLimitedRouter


@routers.register("sam")
class SAMRouter(GroupLimitedRouter):
    """The group of largest total probability, then the k likeliest experts in it.

    A token visits one of `router.groups` groups of consecutive experts, for example one node. Loss
    `sam_alignment` pulls the k likeliest experts into the chosen group. Source: HetuMoE (Nie et al.
    2022), Switch-and-Mixture gate; hierarchical top-k.
    """

    reads = BY_SCORE | {"groups"}
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
