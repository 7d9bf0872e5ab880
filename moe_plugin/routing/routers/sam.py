"""SAM router: a group of experts first, then the k best inside it."""

from __future__ import annotations

from torch import Tensor

from moe_plugin.kernels.top_k import group_members
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.group_limited import GroupLimitedRouter


@routers.register("sam")
class SAMRouter(GroupLimitedRouter):
    """The group of largest total probability, then the k likeliest experts in it.

    A token visits one of `router.groups` groups of consecutive experts, for example one node. Loss
    `sam_alignment` pulls the k likeliest experts into the chosen group. Source: HetuMoE (Nie et al.
    2022), Switch-and-Mixture gate; hierarchical top-k.
    """

    chosen_groups = 1
    one_pass = True

    def counted_scores(self, k: int) -> int:
        """All scores of a group count."""
        return self.num_experts // self.config.groups

    def _more(self, chosen_TK: Tensor) -> dict[str, Tensor]:
        group_T1 = chosen_TK[:, :1] // (self.num_experts // self.config.groups)
        return {"outside_TE": ~group_members(group_T1, self.config.groups, self.num_experts)}
