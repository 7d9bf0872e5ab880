"""Choosing among some experts only: groups of consecutive experts."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable


def check_groups(groups: int, experts: int, k: int, chosen_groups: int, router: str) -> None:
    """`ValueError` unless the experts fall into equal groups and those chosen hold k experts."""
    if groups < 1 or experts % groups:
        raise ValueError(
            f"router.groups={groups} does not fit router {router} with num_experts={experts}: must "
            "be a divisor; "
            "use e.g. the number of nodes")
    if k > experts // groups * chosen_groups:
        raise ValueError(
            f"router.top_k={k} does not fit router {router}: must be <= "
            f"{experts // groups * chosen_groups}, "
            f"the experts of {chosen_groups} of {groups} groups; lower top_k or groups")


def group_members(groups_TG: Tensor, groups: int, experts: int) -> Tensor:
    """bool [T, E]: experts of each token's chosen groups."""
    chosen_TG = torch.zeros(groups_TG.shape[0], groups, dtype=torch.bool,
                            device=groups_TG.device).scatter_(1, groups_TG, True)
    return chosen_TG.repeat_interleave(experts // groups, dim=1)


def best_groups(scores_TE: Tensor, groups: int, take: int, best: int) -> Tensor:
    """Indices of the `take` groups with the largest sum of their `best` largest scores, int64 [T,
    take], best first.
    """
    inside_TGP = scores_TE.view(scores_TE.shape[0], groups, scores_TE.shape[1] // groups)
    value_TG = inside_TGP.sum(2) if best >= inside_TGP.shape[2] else inside_TGP.topk(
        best, dim=2).values.sum(2)
    return top_k_stable(value_TG, take)


def top_k_inside(scores_TE: Tensor, inside_TE: Tensor, k: int) -> Tensor:
    """The k largest scores of the experts marked, int64 [T, K], ties to the lower index; at least k
    must be marked.
    """
    return top_k_stable(scores_TE.masked_fill(~inside_TE, float("-inf")), k)
