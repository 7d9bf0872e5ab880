"""Routing to groups of consecutive experts: which groups, and the best experts in them."""

from __future__ import annotations

from torch import Tensor

from moe_plugin.kernels.top_k import in_best_groups, top_k_stable


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


def top_k_in_groups(scores_TE: Tensor, groups: int, take: int, best: int, k: int) -> Tensor:
    """The k largest scores within the `take` best groups, int64 [T, K], ties to the lower index.

    scores_TE: float, without gradient. The others: see `kernels.top_k.in_best_groups`.
    """
    return top_k_stable(in_best_groups(scores_TE, groups, take, best), k)
