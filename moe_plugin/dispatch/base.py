"""What a dispatcher is: tokens to expert rows and back, with a frozen handle in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.functional import AllToAll
from moe_plugin.config import DispatchConfig
from moe_plugin.kernels import Groups, slot_index
from moe_plugin.records import Routing
from moe_plugin.registry import Registry


@dataclass(frozen=True)
class Placement:
    """Where experts live: rank i of `comm` holds `local` (virtual) experts; a virtual expert is a shard of an expert.

    experts: E. shards: S, ranks over which an expert is cut: `cut`, or, where that is None, W / E where there are fewer experts
    than ranks, else 1. Runs of S consecutive ranks hold the same L = E S / W experts: rank g*S + j holds shard j of experts
    [g*L, (g+1)*L), as its virtual experts [i*L, (i+1)*L) of E*S. (Where L = 1, virtual expert e*S + j is shard j of expert e.)

    copies: r, the ranks to which each token goes; a divisor of S, or None for S. Below S, runs of S/r consecutive ranks gather
    each other's parameters, so that each holds 1/r of the expert, and share its tokens between them.
    replicas: ranks that hold the same tokens as this one, where a dispatcher makes use of that.
    """

    comm: Comm
    experts: int
    algorithm: AllToAll
    copies: int | None = None
    replicas: Comm | None = None
    cut: int | None = None

    @property
    def shards(self) -> int:
        return self.cut or max(1, self.comm.size // self.experts)

    @property
    def virtual(self) -> int:
        return self.experts * self.shards

    @property
    def local(self) -> int:
        return self.virtual // self.comm.size

    @property
    def first_expert(self) -> int:
        """The first of the `local` experts of which this rank holds a shard."""
        return self.comm.rank // self.shards * self.local

    @property
    def shard(self) -> int:
        """Which shard of its experts this rank holds."""
        return self.comm.rank % self.shards

    def home(self, expert: int, shard: int) -> tuple[int, int]:
        """(rank, place among its experts) of a shard."""
        run, slot = divmod(expert, self.local)
        return run * self.shards + shard, slot

    @property
    def spread(self) -> int:
        """S/r: ranks that share the tokens of one slice of an expert."""
        return self.shards // (self.copies or self.shards)

    def check(self) -> None:
        """`ValueError` unless experts divide over ranks or ranks over experts, or over runs of as many ranks as they are cut over."""
        size = self.comm.size
        if self.cut is not None:
            fits = [s for s in range(1, size + 1) if size % s == 0 and self.experts % (size // s) == 0]
            if self.cut not in fits:
                raise ValueError(f"parallel.shards={self.cut} does not fit {self.experts} experts on {size} expert-parallel ranks: must be one of {fits}; "
                                 f"the nearest is {min(fits, key=lambda s: abs(s - self.cut))}")
        elif self.experts % size and size % self.experts:
            raise ValueError(f"num_experts={self.experts} does not fit {size} expert-parallel ranks: must be a multiple or a divisor "
                             f"of {size}; use {max(1, self.experts // size) * size} experts or another expert-parallel size")

    def expand(self, routing: Routing, slots_TK: Tensor | None) -> tuple[Tensor, Tensor]:
        """(ids, weights) over virtual experts, [T, K*r]: each of the r slices of a chosen expert gets the token.

        Slot s of an expert goes to member s % (S/r) of the run of ranks that share a slice. slots_TK: slot of each choice inside
        its expert; None: counted here, where it is needed.
        """
        if self.shards == 1:
            return routing.ids_TK, routing.weights_TK
        local = self.local
        slice_r = torch.arange(0, self.shards, self.spread, device=routing.ids_TK.device) * local
        first_TK = torch.div(routing.ids_TK, local, rounding_mode="floor") * (self.shards * local) + routing.ids_TK % local
        if self.spread > 1:
            first_TK = first_TK + (slot_index(routing.ids_TK, self.experts) if slots_TK is None else slots_TK) % self.spread * local
        ids_TKr = torch.where(routing.ids_TK[..., None] < 0, -1, first_TK[..., None] + slice_r)
        weights_TKr = routing.weights_TK[..., None].expand(ids_TKr.shape)
        return ids_TKr.flatten(1), weights_TKr.flatten(1)

    def expand_slots(self, slots_TK: Tensor, capacity: int) -> tuple[Tensor, int]:
        """(slots [T, K*r], capacity) of virtual experts: the slots of an expert dealt out to the S/r ranks that share it."""
        slots_TK = torch.div(slots_TK, self.spread, rounding_mode="floor") if self.spread > 1 else slots_TK
        return slots_TK.repeat_interleave(self.copies or self.shards, dim=1), -(-capacity // self.spread)


@dataclass(frozen=True)
class RowCounts:
    """Rows by local expert: on the host (for splits) and, made when asked for, on a device."""

    host: list[int]

    @property
    def total(self) -> int:
        return sum(self.host)

    def device(self, device: torch.device) -> Tensor:
        """int64 [L]; the host does not wait for a GPU."""
        if device.type == "cuda" and not torch.compiler.is_compiling():
            return Groups(self.host, device).lengths_L
        return torch.tensor(self.host, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class RowPlan:
    """Rows that one rank takes out of its own tokens, computes and puts back: no exchange in between.

    source_R, position_TK: see kernels.rows; rows lie expert after expert. weights_TK: gate weights, differentiable.
    counts: rows by expert; with fixed slots also the empty ones.
    """

    source_R: Tensor
    position_TK: Tensor
    weights_TK: Tensor
    counts: RowCounts

    @property
    def token_R(self) -> Tensor:
        """Token of each row, int64 [R]; 0 for an empty slot."""
        return torch.div(self.source_R.clamp(min=0), max(1, self.position_TK.shape[1]), rounding_mode="floor")


class Dispatcher(Protocol):
    """Moves tokens to their experts' ranks and results back. No state between calls: all of it is in the handle."""

    def dispatch(self, x_TD: Tensor, routing: Routing, slots_TK: Tensor | None, capacity: int | None, anchor: Tensor) -> tuple[Tensor, RowCounts, object]:
        """Rows for this rank's experts, expert after expert: (rows_RD, rows by expert, handle)."""

    def combine(self, rows_RD: Tensor, handle: object, anchor: Tensor) -> Tensor:
        """y_TD: each token's rows weighed and summed."""

    def plan(self, routing: Routing, slots_TK: Tensor | None, capacity: int | None) -> RowPlan | None:
        """Where all experts are this rank's: what to compute, for experts that gather and combine by themselves. Else None."""


dispatchers: Registry[Callable[[Placement], Dispatcher]] = Registry("dispatcher")


def check_capacity(config: DispatchConfig) -> None:
    """`ValueError` where the configured dispatcher has fixed slots and nothing says how many."""
    anywhere = config.capacity_factor is not None or config.eval_capacity_factor is not None or config.eval_token_fraction > 0
    if not anywhere and getattr(dispatchers.get(config.name), "needs_capacity", False):
        raise ValueError(f"dispatch.capacity_factor=None does not fit dispatch.name={config.name!r}: it needs a capacity; set it (0 never drops), "
                         "or use dispatch.name='ragged'")


def inverse_permutation(order_R: Tensor) -> Tensor:
    """inverse[order[i]] = i."""
    return torch.empty_like(order_R).index_copy_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))
