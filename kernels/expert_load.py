"""Number of choices that each expert gets."""

from __future__ import annotations

import torch
from torch import Tensor


def expert_load(ids_TK: Tensor, experts: int, mask_T: Tensor | None = None,
                per_choice: bool = False) -> Tensor:
    """Load of each expert, int64 [E]; with `per_choice` int64 [K, E], one row for each choice.

    ids_TK: int64 [T, K], expert of each choice in 0..E-1; -1 (no expert) is not counted.
    mask_T: bool [T], False for padding tokens, which are not counted; None: all tokens are real.
    The host does not wait for the device.
    """
    choices, bins = ids_TK.shape[1] if per_choice else 1, experts + 1
    if mask_T is not None:
        ids_TK = torch.where(mask_T[:, None], ids_TK, -1)
    bin_TK = ids_TK % bins  # -1 falls in the last bin
    if per_choice:
        bin_TK = bin_TK + torch.arange(choices, device=ids_TK.device) * bins
    bin_N = bin_TK.reshape(-1)
    load_B = torch.zeros(choices * bins, dtype=torch.int64, device=ids_TK.device)
    load_KE = load_B.index_add_(0, bin_N, torch.ones_like(bin_N)).view(choices, bins)[:, :experts]
    return load_KE if per_choice else load_KE[0]
