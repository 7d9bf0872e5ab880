"""The interface of dispatchers, which send rows to the experts and combine the results.

A dispatcher declares its abilities in `traits`. The layer, the layouts and the exactness tests read
the traits and never probe for methods. A dispatcher does not store state between calls. The plan
contains all data that a call needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.config import DispatchConfig
from moe_plugin.dispatch.rows_limit import RowsLimit
from moe_plugin.kernels import slot_index
from moe_plugin.planner.spill import Counts, SpillPlan
from moe_plugin.records import DispatchPlan, KeptRouting, Overlap, Routing, Sent
from moe_plugin.utils.registry import Registry

SpillPlanner = Callable[[Counts], SpillPlan | None]  # maps rows by (source rank, expert) to a plan


@dataclass(frozen=True)
class DispatchTraits:
    """The abilities that a dispatcher declares.

    Attributes:
        fixed_slots: whether the dispatcher sends C slots per expert and source rank, including
            empty slots. Such a dispatcher needs a capacity. Other dispatchers send exactly the
            rows that were routed.
        supports_pieces: whether rows can be split into pieces (`Overlap`), so that exchanges
            overlap with matmuls.
        piece_axes: the axes along which rows can be split into pieces (`dispatch.pieces`).
        shares_tokens: whether all ranks of the group have the same tokens.
        splits_slots: whether ranks with the same tokens (`Placement.replicas`) divide the slots
            among them.
        single_layout: whether the dispatcher runs in one layout only, in which every expert is
            computed where it is stored. Other dispatchers support every `r`.
        bounded: whether rows are sent in buffers of a fixed length (`DispatchContext.limit`), while
            their numbers stay on the device.
        spills: whether ranks other than the owner may compute rows of an expert (`parallel.spill`).
            Such a dispatcher returns a `SpillingPlan` if it has a `DispatchContext.spill_planner`.
            Such a dispatcher must send exact rows and support every layout.
        sends_once: whether `dispatch.once` (or `dispatch.bounded_once` for bounded rows) may
            replace the dispatcher. A token's row is then sent once to each rank or node that has
            some of the token's experts. Such a dispatcher must send exact rows and support every
            layout.
    """

    fixed_slots: bool = False
    supports_pieces: bool = False
    piece_axes: tuple[str, ...] = ("rows",)
    shares_tokens: bool = False
    splits_slots: bool = False
    single_layout: bool = False
    bounded: bool = False
    spills: bool = False
    sends_once: bool = False


@dataclass(frozen=True)
class DispatchContext:
    """The arguments of a dispatcher.

    Attributes:
        placement: the ranks that store each expert, and the exchange algorithm.
        overlap: the number of pieces. More than one piece is allowed only with
            `traits.supports_pieces`.
        limit: the limit on the rows of the layer. The same limit is used for all calls. None unless
            `traits.bounded`.
        spill_planner: object that decides which rank computes which rows, with the same result on
            all ranks, or None if every rank computes only its own experts.
        configured: the traits of the configured dispatcher, if this dispatcher replaces it.
        counts_on_device: whether the experts can read the numbers of their rows on the device.
        weights_first: True if gate weights multiply the experts' inputs instead of their results.
            Only dispatchers that send rows once read this field.
    """

    placement: Placement
    overlap: Overlap = Overlap()
    limit: RowsLimit | None = None
    spill_planner: SpillPlanner | None = None
    configured: DispatchTraits = DispatchTraits()
    counts_on_device: bool = False
    weights_first: bool = False


class Dispatcher(ABC):
    """Base class of dispatchers, which send tokens to the ranks of their experts and return the
    results.

    Attributes:
        reads_anchor: whether `dispatch` uses its argument `anchor`. This is the case if ranks
            exchange data.
    """

    traits: ClassVar[DispatchTraits]

    def __init__(self, context: DispatchContext) -> None:
        self.context = context
        self.placement, self.overlap = context.placement, context.overlap
        self.reads_anchor = self.placement.comm.size > 1

    @abstractmethod
    def plan(self, kept: KeptRouting) -> DispatchPlan:
        """Agree on all sizes of a call.

        This is the only step in which the host may wait for the device.
        """

    def start_sizes(self, routing: Routing, tokens: bool = False) -> Any:
        """Start to exchange the sizes of a call before its `plan`.

        This is useful if the router's choices are known early and none of them will be dropped. All
        ranks must start their exchanges in the same order.

        Args:
            routing: the routing of the call. The caller must set `routing.sizes` to the result.
            tokens: whether the largest number of tokens of any rank is exchanged, too.
        Returns: the exchange in progress (`dispatch.ragged.SentSizes`), or None if the dispatcher
            has nothing to exchange early.
        """
        return None

    @abstractmethod
    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, anchor: Tensor | None) -> Sent:
        """Send the rows to their experts.

        Exchanges that run in the background (`Overlap`) have been started on return.

        Args:
            x_TD: [T, D] tokens of this rank.
            plan: the plan of this call.
            anchor: a parameter that connects the exchanges to the autograd graph on all ranks or
                on none (`comm.functional`). Optional.
        """

    @abstractmethod
    def combine(self, sent: Sent, plan: DispatchPlan) -> Tensor:
        """Return the outputs [T, D], each of which is the weighted sum of a token's rows.

        Args:
            sent: the object returned by `dispatch`, after the results of all its pieces have been
                returned to it.
            plan: the plan of this call.
        """


class WrappedDispatcher(Dispatcher):
    """Base class of dispatchers that wrap a different dispatcher and add work to its steps.

    Args:
        inner: the wrapped dispatcher.
    """

    def __init__(self, inner: Dispatcher) -> None:
        super().__init__(inner.context)
        self.inner, self.traits = inner, inner.traits  # type: ignore[misc]

    def plan(self, kept: KeptRouting) -> DispatchPlan:
        return self.inner.plan(kept)

    def start_sizes(self, routing: Routing, tokens: bool = False) -> Any:
        return self.inner.start_sizes(routing, tokens)

    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, anchor: Tensor | None) -> Sent:
        return self.inner.dispatch(x_TD, plan, anchor)

    def combine(self, sent: Sent, plan: DispatchPlan) -> Tensor:
        return self.inner.combine(sent, plan)


_CAPACITY = ("a dispatcher with fixed slots needs a capacity. Set dispatch.capacity_factor (0 "
             "never drops a token), or use dispatch.name='ragged'")


def _check_traits(name: str, dispatcher: type[Dispatcher]) -> None:
    traits = dispatcher.traits
    # `dispatch.bounded_once` sends bounded rows once, so this combination is allowed
    for trait, rows in (("spills", "that spill"), ("sends_once", "that are sent once")):
        for excluded in ("fixed_slots", "shares_tokens", "single_layout", "bounded"):
            if getattr(traits, trait) and getattr(traits, excluded) and (trait, excluded) != (
                    "sends_once", "bounded"):
                raise ValueError(
                    f"dispatcher {name!r} declares both {trait} and {excluded}, but rows {rows} "
                    "must be exact. Declare only one of the two traits")


dispatchers: Registry[type[Dispatcher]] = Registry("dispatcher", base=Dispatcher,
                                                   check=_check_traits)


def check_settings(config: DispatchConfig, training: bool = True) -> None:
    """Check the capacity and the settings of bounded rows.

    Args:
        config: the dispatch settings.
        training: whether the layer may be trained. If it is True, a capacity for evaluation alone
            is not enough.
    Raises:
        ValueError: If the dispatcher has fixed slots but no capacity, or a setting of bounded rows
            is set for a dispatcher without a bound.
    """
    default = DispatchConfig()
    traits = dispatchers.get(config.name).traits
    for name in ("max_rows_factor", "max_tokens", "on_overflow", "stash_mib"):
        value = getattr(config, name)
        if value != getattr(default, name) and not traits.bounded:
            raise ValueError(f"dispatch.{name}={value!r} does not fit dispatch.name="
                             f"{config.name!r}, which has no bound on rows. Use "
                             "dispatch.name='bounded', or leave the setting out")
    outside = config.eval_capacity_factor is not None or config.eval_token_fraction > 0
    if traits.fixed_slots and config.capacity_factor is None and (training or not outside):
        raise ValueError(
            f"dispatch.capacity_factor=none does not fit dispatch.name={config.name!r}: "
            f"{_CAPACITY}")


def fixed_slots(kept: KeptRouting) -> tuple[Tensor, int]:
    """Return the slot of each choice, int64 [T, K], and the capacity.

    Raises:
        ValueError: If this call has no capacity.
    """
    if kept.slots_TK is None or kept.capacity is None:
        raise ValueError(f"dispatch.capacity_factor=none does not fit this call: {_CAPACITY}")
    return kept.slots_TK, kept.capacity


def expand(place: Placement, routing: Routing, slots_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the choices over shards of experts: ids int64 [T, K*r] and weights [T, K*r].

    Each of the r slices of a chosen expert receives the token. The slots of an expert are divided
    among the S/r ranks that share a slice: slot s is assigned to rank s % (S/r) of these ranks.

    Args:
        place: the ranks that store each expert, and r.
        routing: the choices over whole experts.
        slots_TK: int64 [T, K], the slot of each choice within its expert. If `slots_TK` is None,
            the slots are computed when they are needed.
    """
    if place.shards == 1:
        return routing.ids_TK, routing.weights_TK
    local = place.local
    # Shards are numbered by the rank that stores them. The S shards of an expert are on S
    # consecutive ranks, so their numbers are `local` apart.
    slice_r = torch.arange(0, place.shards, place.token_shards,
                           device=routing.ids_TK.device) * local
    first_TK = (torch.div(routing.ids_TK, local, rounding_mode="floor") * (place.shards * local)
                + routing.ids_TK % local)
    if place.token_shards > 1:
        if slots_TK is None:
            slots_TK = slot_index(routing.ids_TK, place.experts)
        first_TK = first_TK + slots_TK % place.token_shards * local
    ids_TKr = torch.where(routing.ids_TK[..., None] < 0, -1, first_TK[..., None] + slice_r)
    weights_TKr = routing.weights_TK[..., None].expand(ids_TKr.shape)
    return ids_TKr.flatten(1), weights_TKr.flatten(1)


def expand_slots(place: Placement, slots_TK: Tensor, capacity: int) -> tuple[Tensor, int]:
    """Return the slots int64 [T, K*r] and the capacity over shards of experts.

    The slots of an expert are assigned in turns to the S/r ranks that share it.
    """
    if place.token_shards > 1:
        slots_TK = torch.div(slots_TK, place.token_shards, rounding_mode="floor")
    slots_TKr = slots_TK.repeat_interleave(place.copies or place.shards, dim=1)
    return slots_TKr, -(-capacity // place.token_shards)
