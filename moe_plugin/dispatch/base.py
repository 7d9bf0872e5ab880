"""What a dispatcher is: tokens to expert rows and back, with a frozen handle in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moe_plugin.config import DispatchConfig
from moe_plugin.kernels import slot_index
from moe_plugin.records import Placement, Routing, RowCounts, RowPlan
from moe_plugin.registry import Registry


class Dispatcher(Protocol):
    """Moves tokens to their experts' ranks and results back. No state between calls: all of it is
    in the handle.
    """

    def dispatch(self, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None,
                 capacity: int | None, anchor: Tensor) -> tuple[Tensor, RowCounts, object]:
        """Rows for this rank's experts, expert after expert: (rows_RD, rows by expert, handle)."""

    def combine(self, rows_RD: Tensor, handle: object, anchor: Tensor) -> Tensor:
        """y_TD: each token's rows weighed and summed."""

    def plan(self, routing: Routing, slots_TK: Tensor | None,
             capacity: int | None) -> RowPlan | None:
        """Where all experts are this rank's: what to compute, for experts that gather and combine
        by themselves. Else None.
        """


dispatchers: Registry[Callable[[Placement], Dispatcher]] = Registry("dispatcher")


def check_capacity(config: DispatchConfig) -> None:
    """`ValueError` where the configured dispatcher has fixed slots and nothing says how many."""
    anywhere = config.capacity_factor is not None or config.eval_capacity_factor is not None or config.eval_token_fraction > 0
    if not anywhere and getattr(dispatchers.get(config.name), "needs_capacity", False):
        raise ValueError(
            f"dispatch.capacity_factor=None does not fit dispatch.name={config.name!r}: it needs a "
            "capacity; set it (0 never drops), "
            "or use dispatch.name='ragged'")


def expand(place: Placement, routing: Routing, slots_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids, weights) over virtual experts, [T, K*r]: each of the r slices of a chosen expert gets
    the token.

    Slot s of an expert goes to member s % (S/r) of the run of ranks that share a slice. slots_TK:
    slot of each choice inside its expert; None: counted here, where it is needed.
    """
    if place.shards == 1:
        return routing.ids_TK, routing.weights_TK
    local = place.local
    slice_r = torch.arange(0, place.shards, place.spread, device=routing.ids_TK.device) * local
    first_TK = torch.div(routing.ids_TK, local,
                         rounding_mode="floor") * (place.shards * local) + routing.ids_TK % local
    if place.spread > 1:
        first_TK = first_TK + (slot_index(routing.ids_TK, place.experts)
                               if slots_TK is None else slots_TK) % place.spread * local
    ids_TKr = torch.where(routing.ids_TK[..., None] < 0, -1, first_TK[..., None] + slice_r)
    weights_TKr = routing.weights_TK[..., None].expand(ids_TKr.shape)
    return ids_TKr.flatten(1), weights_TKr.flatten(1)


def expand_slots(place: Placement, slots_TK: Tensor, capacity: int) -> tuple[Tensor, int]:
    """(slots [T, K*r], capacity) of virtual experts: the slots of an expert dealt out to the S/r
    ranks that share it.
    """
    slots_TK = torch.div(slots_TK, place.spread,
                         rounding_mode="floor") if place.spread > 1 else slots_TK
    return slots_TK.repeat_interleave(place.copies or place.shards,
                                      dim=1), -(-capacity // place.spread)


def inverse_permutation(order_R: Tensor) -> Tensor:
    """inverse[order[i]] = i."""
    return torch.empty_like(order_R).index_copy_(
        0, order_R, torch.arange(order_R.numel(), device=order_R.device))
