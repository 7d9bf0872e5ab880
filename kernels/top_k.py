"""The k largest scores of each token, ties to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.registry import op

FEW = 8  # up to here k passes over the scores beat one sort
TINY = 512  # scores up to which launching operations takes longer than they do


@op
def top_k_stable(scores_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores in decreasing order, int64 [T, K]; ties to the lower index.

    scores_TE: floating point [T, E]. `torch.topk` does not promise which of two equal scores it
    returns; `max` and a stable sort do (`argmax` does, too, and takes up to three times as long).
    """
    if _sorts(scores_TE, k):
        return torch.argsort(scores_TE, dim=1, descending=True, stable=True)[:, :k].contiguous()
    left_TE, chosen = scores_TE, []
    for j in range(k):
        chosen.append(left_TE.max(1, keepdim=True).indices)
        if j + 1 < k:
            left_TE = left_TE.scatter(1, chosen[-1], float("-inf"))
    return torch.cat(chosen, 1)


def best_scores(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(indices as of `top_k_stable`, their scores [T, K]), differentiable in the scores."""
    # where a gradient is wanted a recomputation keeps as much by `gather`, with choices given
    if not scores_TE.requires_grad and _sorts(scores_TE, k) and not torch.compiler.is_compiling():
        sorted_TE, order_TE = torch.sort(scores_TE, dim=1, descending=True, stable=True)
        return order_TE[:, :k].contiguous(), sorted_TE[:, :k]
    ids_TK = top_k_stable.implementation("torch")(scores_TE.detach(), k)
    return ids_TK, scores_TE.gather(1, ids_TK)


def _sorts(scores_TE: Tensor, k: int) -> bool:
    # under torch.compile a limit would be a guard on the number of tokens
    tiny = not torch.compiler.is_compiling() and scores_TE.numel() <= TINY
    return k > FEW or scores_TE.shape[0] == 0 or tiny


def group_members(groups_TG: Tensor, groups: int, experts: int) -> Tensor:
    """Experts of each token's groups, bool [T, E]; groups_TG: int64, any number of groups."""
    chosen_TG = torch.zeros(groups_TG.shape[0], groups, dtype=torch.bool, device=groups_TG.device)
    return chosen_TG.scatter_(1, groups_TG, True).repeat_interleave(experts // groups, dim=1)


def in_best_groups(scores_TE: Tensor, groups: int, take: int, best: int) -> Tensor:
    """The scores of the `take` best groups of consecutive experts; -inf elsewhere, [T, E].

    best: a group's score is the sum of so many of its largest scores. Ties go to the lower index.
    """
    tokens, experts = scores_TE.shape
    scores_TGP = scores_TE.view(tokens, groups, experts // groups)
    if best < experts // groups:
        scores_TGP = scores_TGP.topk(best, dim=2).values
    groups_TG = top_k_stable.implementation("torch")(scores_TGP.sum(2), take)
    return scores_TE.masked_fill(~group_members(groups_TG, groups, experts), float("-inf"))
