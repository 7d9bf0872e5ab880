"""Number of choices that each expert gets."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.records import Routing


def expert_load(ids_TK: Tensor, experts: int, mask_T: Tensor | None = None,
                per_choice: bool = False, complete: bool = False) -> Tensor:
    """Load of each expert, int64 [E]; with `per_choice` int64 [K, E], one row for each choice.

    Args:
        ids_TK: int64 [T, K], expert of each choice in 0..E-1; -1 (no expert) is not counted.
        mask_T: bool [T], False for padding tokens, which are not counted; None: all tokens are
            real.
        complete: ids_TK holds no -1, and nothing is done for it. The host does not wait for the
            device.
    """
    if mask_T is not None:
        ids_TK, complete = torch.where(mask_T[:, None], ids_TK, -1), False
    bins = experts if complete else experts + 1
    if not complete:
        ids_TK = ids_TK % bins  # -1 falls in the last bin
    load_KB = ids_TK.new_zeros(ids_TK.shape[1], bins)
    if ids_TK.device.type == "cpu" and not torch.compiler.is_compiling():
        load_KB.scatter_(1, ids_TK.t(), 1, reduce="add")
    else:  # the other form has no deterministic implementation on a GPU
        bin_TK = ids_TK + torch.arange(0, load_KB.numel(), bins, device=ids_TK.device)
        bin_N = bin_TK.reshape(-1)
        load_KB = load_KB.view(-1).index_add_(0, bin_N, torch.ones_like(bin_N)).view_as(load_KB)
    load_KE = load_KB if complete else load_KB[:, :experts]
    return load_KE if per_choice else load_KE.sum(0)


def known_load(routing: Routing) -> tuple[Tensor | None, bool]:
    """(load_KE int64 [K, E], None: not counted; whether ids_TK is known to hold no -1)."""
    counted = routing.counted
    # a routing that was made of another one has other choices
    if counted is None or counted.ids_TK is not routing.ids_TK:
        return None, False
    return counted.load_KE, counted.complete
