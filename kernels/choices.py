"""Sort and count the experts chosen by the router, and assign rows or slots to the choices."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.activations import transformed
from moe_plugin.kernels.registry import op


def stable_order(key_N: Tensor, below: int) -> Tensor:
    """Return the stable permutation, int64 [N], that sorts `key_N` (int64 in 0..below-1).

    On a CPU, numpy's radix sort of 16-bit keys is used. numpy sorts 8,192 choices in 20 us. torch
    uses a radix sort only for 32,768 or more elements, and needs 260 us for 8,192 choices.
    """
    if (key_N.device.type != "cpu" or below > 1 << 15 or torch.compiler.is_compiling()
            or transformed()):
        return torch.argsort(key_N, stable=True)
    # numpy's stable sort is a radix sort only for integers of at most 16 bits.
    try:
        import numpy as np
    except ModuleNotFoundError:  # torch does not require numpy
        return torch.argsort(key_N, stable=True)
    return torch.from_numpy(np.argsort(key_N.to(torch.int16).numpy(), kind="stable"))


def expert_load(ids_TK: Tensor, experts: int, mask_T: Tensor | None = None,
                per_choice: bool = False, complete: bool = False) -> Tensor:
    """Return the number of choices of each expert, int64 [E].

    With `per_choice`, return int64 [K, E], with one row for each of the K choices.

    Args:
        ids_TK: int64 [T, K], the expert of each choice, in 0..E-1. Choices of -1 (no expert) are
            not counted.
        experts: number of experts, E.
        mask_T: bool [T], False for padding. Padding is not counted. By default, no token is
            padding.
        per_choice: whether to count first choices, second choices and so on separately.
        complete: True if `ids_TK` contains no -1, so that the special handling of -1 can be
            skipped. The CPU does not wait for the device.
    """
    if mask_T is not None:
        ids_TK, complete = torch.where(mask_T[:, None], ids_TK, -1), False
    if ids_TK.device.type == "cpu" and not torch.compiler.is_compiling():
        bins = experts if complete else experts + 1
        if not complete:
            ids_TK = ids_TK % bins  # moves -1 to the last bin
        load_KB = ids_TK.new_zeros(ids_TK.shape[1], bins)
        load_KB.scatter_(1, ids_TK.t(), 1, reduce="add")
        load_KE = load_KB if complete else load_KB[:, :experts]
    else:  # a 2-D scatter_ with reduce has no deterministic implementation on a GPU
        load_KE = choice_load(ids_TK, experts)
    return load_KE if per_choice else load_KE.sum(0)


@op
def choice_load(ids_TK: Tensor, experts: int) -> Tensor:
    """Return the number of choices of each expert separately for first choices, second choices and
    so on, int64 [K, E]. ids_TK: int64 [T, K], the expert of each choice, in -1..E-1.
    """
    bins = experts + 1
    load_KB = ids_TK.new_zeros(ids_TK.shape[1], bins)
    # The modulo moves -1 to the last bin of each choice, which is removed at the end.
    bin_TK = ids_TK % bins + torch.arange(0, load_KB.numel(), bins, device=ids_TK.device)
    bin_N = bin_TK.reshape(-1)
    load_KB = load_KB.view(-1).index_add_(0, bin_N, torch.ones_like(bin_N)).view_as(load_KB)
    return load_KB[:, :experts]


@op
def running_count(ids_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """For each element, count the earlier elements with the same id. Return two int64 tensors,
    `rank_N` and `count_E`.

    ids_N: int64 [N], the ids in -1..E-1. For the id -1, the element of `rank_N` is -1. `rank_N`
        contains, for each element, the number of earlier elements with the same id. `count_E`
        contains the number of elements with each id. The operation needs a single stable sort and
        does not allocate a tensor of size [N, E].
    """
    key_N = torch.where(ids_N < 0, experts, ids_N)
    order_N = stable_order(key_N, experts + 1)
    sorted_N = key_N[order_N]
    start_E = torch.searchsorted(sorted_N, torch.arange(experts + 1, device=ids_N.device))
    rank_in_order_N = torch.arange(ids_N.numel(), device=ids_N.device) - start_E[sorted_N]
    rank_N = torch.empty_like(ids_N).index_copy_(0, order_N, rank_in_order_N)
    return rank_N.masked_fill_(ids_N < 0, -1), start_E.diff()


def slot_sources(position_TK: Tensor, slots: int) -> Tensor:
    """For each slot, return the index of the choice in this slot, int64 [slots]. Empty slots
    contain -1.
    position_TK: int64 [T, K], the slot to which each choice is assigned.
    """
    # Choices without a slot write into an extra slot, which is removed. Filtering them would give a
    # data-dependent shape.
    index_N = torch.where(position_TK < 0, slots, position_TK).reshape(-1)
    source_V = torch.full((slots + 1,), -1, dtype=torch.int64, device=position_TK.device)
    choice_N = torch.arange(index_N.numel(), device=position_TK.device)
    return source_V.scatter_(0, index_N, choice_N)[:slots]


@op
def sorted_choices(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert and return (source_N, position_TK, count_E), all int64.

    The tensor `source_N` contains, for each row, the index of its choice. Rows are ordered by
    expert. The rows of one expert are in the order of the choices. The tensor `position_TK`
    contains the row of each choice, and `count_E` the number of rows of each expert.

    ids_TK: int64 [T, K], the expert of each choice, in -1..E-1. A choice of -1 has the position -1.
    Rows after the rows of the last expert have the source -1.
    """
    number_N, count_E = running_count.implementation("torch")(ids_TK.reshape(-1), experts)
    start_E = count_E.cumsum(0) - count_E
    row_TK = start_E[ids_TK.clamp(min=0)] + number_N.view(ids_TK.shape)
    position_TK = torch.where(ids_TK >= 0, row_TK, -1)
    return slot_sources(position_TK, ids_TK.numel()), position_TK, count_E


def slot_index(ids_TK: Tensor, experts: int) -> Tensor:
    """For each choice, return the index of its slot among the slots of its expert, int64 [T, K].
    Choices of -1 have the slot -1.

    The slots of an expert are assigned first to first choices, then to second choices, and so on.
    The slot of choice j of token t is the number of choices i < j, of any token, that selected the
    same expert, plus the number of tokens before t whose choice j selected the same expert. Tutel
    calls this number the "location".
    """
    tokens, k = ids_TK.shape
    ids_N = ids_TK.t().reshape(-1)  # choice-major, so that first choices get slots before second
    return running_count(ids_N, experts)[0].view(k, tokens).t().contiguous()


def tokens_of_rows(source_R: Tensor | None, position_TK: Tensor | None) -> Tensor | None:
    """For each row, return the index of its token, or -1 for an empty slot."""
    if source_R is None:
        return None
    assert position_TK is not None
    choices = position_TK.shape[1]
    if choices == 1:
        return source_R
    return torch.div(source_R, max(1, choices), rounding_mode="floor")
