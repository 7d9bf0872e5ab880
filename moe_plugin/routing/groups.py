"""Routing to groups of consecutive experts: which groups, and the best experts in them."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable


def check_groups(groups: int, experts: int, k: int, chosen_groups: int, router: str) -> None:
    """`ValueError` unless experts form equal groups and the chosen groups hold k experts."""
    if groups < 1 or experts % groups:
        raise ValueError(
            f"router.groups={groups} does not fit router {router} with num_experts={experts}: must "
            "be a divisor; use e.g. the number of nodes")
    most = experts // groups * chosen_groups
    if k > most:
        raise ValueError(
            f"router.top_k={k} does not fit router {router}: must be <= {most}, the experts of "
            f"{chosen_groups} of {groups} groups; lower top_k or groups")


def group_members(groups_TG: Tensor, groups: int, experts: int) -> Tensor:
    """Experts of each token's groups, bool [T, E]; groups_TG: int64, any number of groups."""
    chosen_TG = torch.zeros(groups_TG.shape[0], groups, dtype=torch.bool, device=groups_TG.device)
    return chosen_TG.scatter_(1, groups_TG, True).repeat_interleave(experts // groups, dim=1)


def top_k_in_groups(scores_TE: Tensor, groups: int, take: int, best: int, k: int) -> Tensor:
    """The k largest scores within the `take` best groups, int64 [T, K], ties to the lower index.

    Args:
        scores_TE: float, without gradient.
        groups: groups of consecutive experts.
        take: groups per token: those with the largest sum of their `best` largest scores.
        best: scores that count for a group.
        k: experts per token.
    """
    tokens, experts = scores_TE.shape
    scores_TGP = scores_TE.view(tokens, groups, experts // groups)
    if best < experts // groups:
        scores_TGP = scores_TGP.topk(best, dim=2).values
    groups_TG = top_k_stable(scores_TGP.sum(2), take)
    outside_TE = ~group_members(groups_TG, groups, experts)
    return top_k_stable(scores_TE.masked_fill(outside_TE, float("-inf")), k)
