"""SAM router: a group of experts first, then the k best inside it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_plugin.config import MoEConfig
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.topk import TopKRouter
from moe_plugin.routing.selection import best_groups, check_groups, group_members, top_k_inside


@routers.register("sam")
class SAMRouter(TopKRouter):
    """The group of largest total probability, then the k likeliest experts in it: a token visits
    one group (a node, say).

    `router.groups` groups of consecutive experts. Loss `sam_alignment` pulls the k likeliest
    experts into the chosen group. Source: HetuMoE (Nie et al. 2022), Switch-and-Mixture gate;
    hierarchical top-k.
    """

    second_expert_policy = "all"

    def __init__(self, config: MoEConfig, **where: Any) -> None:
        super().__init__(config, **where)
        check_groups(self.config.groups, self.num_experts, self.config.top_k, 1, "sam")

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """See `TopKRouter.route`."""
        check_groups(self.config.groups, self.num_experts, k, 1, "sam")
        return super().route(x_TD, mask_T, k, info)

    def _select(self, scores_TE: Tensor, logits_TE: Tensor, mask_T: Tensor, k: int) -> Tensor:
        groups, experts = self.config.groups, self.num_experts
        group_T1 = best_groups(scores_TE.detach(), groups, 1, experts // groups)
        return top_k_inside(scores_TE.detach(), group_members(group_T1, groups, experts), k)

    def _more(self, chosen_TK: Tensor) -> dict[str, Tensor]:
        group_T1 = chosen_TK[:, :1] // (self.num_experts // self.config.groups)
        return {"outside_TE": ~group_members(group_T1, self.config.groups, self.num_experts)}
