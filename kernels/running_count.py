"""Running count of each choice inside its expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.registry import op
from moe_plugin.kernels.stable_order import stable_order


@op
def running_count(ids_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(rank_N, count_E), int64: earlier choices with the same id, and how often each id occurs.

    ids_N: int64 in -1..E-1; the rank of id -1 is -1. One stable sort; no tensor is [N, E].
    """
    key_N = torch.where(ids_N < 0, experts, ids_N)
    order_N = stable_order(key_N, experts + 1)
    sorted_N = key_N[order_N]
    start_E = torch.searchsorted(sorted_N, torch.arange(experts + 1, device=ids_N.device))
    place_N = torch.arange(ids_N.numel(), device=ids_N.device) - start_E[sorted_N]
    rank_N = torch.empty_like(ids_N).index_copy_(0, order_N, place_N)
    return rank_N.masked_fill_(ids_N < 0, -1), start_E.diff()


def slot_index(ids_TK: Tensor, experts: int) -> Tensor:
    """Slot of each choice inside its expert, int64 [T, K]; -1 where ids_TK (int64 [T, K]) is -1.

    slot(t, j) = number of tokens whose choice i < j is the same expert, plus number of tokens
    before t whose choice j is the same expert (Tutel's "location").
    """
    tokens, k = ids_TK.shape
    ids_N = ids_TK.t().reshape(-1)  # choice-major: all first choices before all second choices
    return running_count(ids_N, experts)[0].view(k, tokens).t().contiguous()
