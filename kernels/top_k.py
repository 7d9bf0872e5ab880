"""The k largest scores of each token, ties to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.registry import op

FEW = 8  # up to here k passes over the scores beat one sort


@op
def top_k_stable(scores_TE: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores in decreasing order, int64 [T, K]; ties to the lower index.

    scores_TE: floating point [T, E]. `torch.topk` does not promise which of two equal scores it
    returns; `argmax` and a stable sort do.
    """
    if k > FEW or scores_TE.shape[0] == 0:
        return torch.argsort(scores_TE, dim=1, descending=True, stable=True)[:, :k].contiguous()
    left_TE, chosen = scores_TE, []
    for j in range(k):
        chosen.append(left_TE.argmax(1, keepdim=True))
        if j + 1 < k:
            left_TE = left_TE.scatter(1, chosen[-1], float("-inf"))
    return torch.cat(chosen, 1)
