"""Which choice lies in which row: expert-major order, fixed slots, and their inverses.

Legend: N choices that become rows, V slots; see `records` for the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels import expert_load
from moe_plugin.kernels.running_count import running_count
from moe_plugin.kernels.stable_order import stable_order
from moe_plugin.records import Placement, Routing, RowPlan
from moe_plugin.row_counts import DeviceCounts, RowCounts


def sort_by_expert(ids_TK: Tensor, experts: int, load_KE: Tensor | None = None,
                   complete: bool = False) -> tuple[Tensor, Tensor]:
    """(choices by expert, those without one last, int64 [T*K]; choices of each expert, int64 [E]).

    Args:
        ids_TK: int64 [T, K], -1: no expert. Within an expert choices stay in token order.
        load_KE, complete: see `known_load`; None: counted here.
    """
    key_N = ids_TK.reshape(-1)
    if not complete:
        key_N = torch.where(key_N < 0, experts, key_N)
    count_E = expert_load(ids_TK, experts) if load_KE is None else load_KE.sum(0)
    return stable_order(key_N, experts + 1), count_E


def positions(source_N: Tensor, ids_TK: Tensor, complete: bool = False) -> Tensor:
    """The row of each choice, int64 [T, K]; -1: none. The inverse of source_N, int64 [N].

    complete: every choice has a row.
    """
    if complete:
        return inverse_permutation(source_N).view(ids_TK.shape)
    position_N = torch.full((ids_TK.numel(),), -1, dtype=torch.int64, device=ids_TK.device)
    position_N.index_copy_(0, source_N, torch.arange(source_N.numel(), device=ids_TK.device))
    return position_N.view(ids_TK.shape)


def slot_sources(position_TK: Tensor, slots: int) -> Tensor:
    """The choice in each slot, int64 [slots]; -1: empty. position_TK: int64 [T, K]."""
    # choices without a slot write into one extra slot, which is removed: no data-dependent shape
    index_N = torch.where(position_TK < 0, slots, position_TK).reshape(-1)
    source_V = torch.full((slots + 1,), -1, dtype=torch.int64, device=position_TK.device)
    choice_N = torch.arange(index_N.numel(), device=position_TK.device)
    return source_V.scatter_(0, index_N, choice_N)[:slots]


def inverse_permutation(order_R: Tensor) -> Tensor:
    """inverse[order[i]] = i, int64 [R]."""
    return torch.empty_like(order_R).index_copy_(
        0, order_R, torch.arange(order_R.numel(), device=order_R.device))


def exact_rows(ids_TK: Tensor, weights_TK: Tensor, experts: int, load_KE: Tensor | None = None,
               complete: bool = False) -> RowPlan:
    """Every chosen (token, expert) pair is one row, sorted by expert. Reads the counts on the host.

    Args:
        ids_TK: int64 [T, K], -1: no row.
        weights_TK: [T, K] gate weights.
        load_KE, complete: see `sort_by_expert`.
    """
    order_N, count_E = sort_by_expert(ids_TK, experts, load_KE, complete)
    counts = RowCounts(count_E.tolist())
    complete = counts.total == order_N.numel()
    source_R = order_N if complete else order_N[:counts.total]
    position_TK = positions(source_R, ids_TK, complete)
    return RowPlan(source_R, position_TK, weights_TK, counts, complete)


def device_rows(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> RowPlan:
    """As `exact_rows`, in a buffer for all T*K choices, whose counts stay on the device.

    Args:
        ids_TK: int64 [T, K], -1: no row.
        weights_TK: [T, K] gate weights.
    """
    number_N, count_E = running_count(ids_TK.reshape(-1), experts)
    start_E = count_E.cumsum(0) - count_E
    row_TK = start_E[ids_TK.clamp(min=0)] + number_N.view(ids_TK.shape)
    position_TK = torch.where(ids_TK >= 0, row_TK, -1)
    rows = ids_TK.numel()
    return RowPlan(slot_sources(position_TK, rows), position_TK, weights_TK,
                   DeviceCounts(count_E, rows))


def slot_rows(ids_TK: Tensor, weights_TK: Tensor, slots_TK: Tensor, capacity: int,
              experts: int) -> RowPlan:
    """C rows per expert, slot c of expert e in row e*C + c; empty ones too. No host read.

    Args:
        ids_TK, slots_TK: int64 [T, K].
        weights_TK: [T, K] gate weights.
    """
    position_TK = torch.where(ids_TK >= 0, ids_TK * capacity + slots_TK, -1)
    source_R = slot_sources(position_TK, experts * capacity)
    return RowPlan(source_R, position_TK, weights_TK, RowCounts([capacity] * experts))


def rows_of_this_rank(routing: Routing, place: Placement) -> RowPlan:
    """The rows of this rank's experts (or of its shards of them) out of all tokens of a routing."""
    ids_TK = routing.ids_TK - place.first_expert
    mine_TK = (ids_TK >= 0) & (ids_TK < place.local) & (routing.ids_TK >= 0)
    return exact_rows(torch.where(mine_TK, ids_TK, -1), routing.weights_TK, place.local)
