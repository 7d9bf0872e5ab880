"""The dispatch contract: sizes are planned, rows go to their experts' ranks, results come back.

A dispatcher declares what it can do in `traits`; the layer, the layouts and the exactness tests
read them there and never look for methods. It holds no state between calls: what a call needs is
in its plan.
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

SpillPlanner = Callable[[Counts], SpillPlan | None]  # rows by source rank and expert to a plan


@dataclass(frozen=True)
class DispatchTraits:
    """What a dispatcher declares.

    Attributes:
        fixed_slots: makes C slots per expert and source rank, empty ones too; needs a capacity.
            False: exactly the rows that were routed.
        supports_pieces: can split its rows into pieces (`Overlap`), so that exchanges overlap
            with matmuls.
        piece_axes: then, along what, see `dispatch.pieces`.
        shares_tokens: all ranks of the group hold the same tokens.
        splits_slots: ranks that hold the same tokens (`Placement.replicas`) share out the slots.
        single_layout: runs where parameters are stored, in one layout; False: in any `r`.
        bounded: exact rows in buffers of a fixed length, whose counts stay on the device; it has
            the layer's `DispatchContext.limit`.
        spills: other ranks than its owner may compute an expert's rows (`parallel.spill`): with a
            `DispatchContext.spill_planner` it makes `SpillingPlan`s. Exact rows alone, in any
            layout.
        sends_once: `dispatch.once` (of bounded rows `dispatch.bounded_once`) may take its place: a
            token's row goes once to every rank, or every node, that has some of its experts. Exact
            rows alone, in any layout.
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
    """What a dispatcher is made with.

    Attributes:
        placement: where experts are, and which exchange carries rows.
        overlap: pieces; more than one only where `traits.supports_pieces`.
        limit: of the layer's rows, kept between calls; None unless `traits.bounded`.
        spill_planner: says who computes what, the same on all ranks; None: owners do.
        configured: of the dispatcher that the settings name, where another takes its place.
        counts_on_device: whether experts take the numbers of their rows from a device.
        weights_first: whether a dispatcher that `sends_once` puts gate weights on experts' inputs.
    """

    placement: Placement
    overlap: Overlap = Overlap()
    limit: RowsLimit | None = None
    spill_planner: SpillPlanner | None = None
    configured: DispatchTraits = DispatchTraits()
    counts_on_device: bool = False
    weights_first: bool = False


class Dispatcher(ABC):
    """Moves tokens to their experts' ranks and results back, in one layout.

    Attributes:
        reads_anchor: whether `dispatch` makes use of an anchor: where ranks exchange anything.
    """

    traits: ClassVar[DispatchTraits]

    def __init__(self, context: DispatchContext) -> None:
        self.context = context
        self.placement, self.overlap = context.placement, context.overlap
        self.reads_anchor = self.placement.comm.size > 1

    @abstractmethod
    def plan(self, kept: KeptRouting) -> DispatchPlan:
        """Agree on all sizes. The only step in which the host may wait for the device."""

    def start_sizes(self, routing: Routing, tokens: bool = False) -> Any:
        """Begin what `plan` agrees on, for a call whose choices are known early and all kept;
        None: nothing. It goes into the routing's `sizes`. All ranks begin theirs in the same order.

        tokens: the largest number of tokens of a rank, too (`dispatch.ragged.SentSizes`).
        """
        return None

    @abstractmethod
    def dispatch(self, x_TD: Tensor, plan: DispatchPlan, anchor: Tensor | None) -> Sent:
        """Rows on their way to their experts.

        What travels in the background (`Overlap`) has started when this returns.

        Args:
            x_TD: [T, D] tokens of this rank.
            plan: of this call.
            anchor: a parameter; it keeps exchanges in the graph on every rank or on none, see
                `comm.functional`.
        """

    @abstractmethod
    def combine(self, sent: Sent, plan: DispatchPlan) -> Tensor:
        """y_TD [T, D]: each token's rows weighted and summed.

        Args:
            sent: of `dispatch`; the results of all its pieces were put back.
            plan: of this call.
        """


class WrappedDispatcher(Dispatcher):
    """Another dispatcher, with something done around its steps. inner: that dispatcher."""

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


_CAPACITY = ("a dispatcher with fixed slots needs a capacity; set it (0 never drops), or use "
             "dispatch.name='ragged'")


def _check_traits(name: str, dispatcher: type[Dispatcher]) -> None:
    traits = dispatcher.traits
    for one, why in (("spills", "that spill"), ("sends_once", "that are sent once")):
        for other in ("fixed_slots", "shares_tokens", "single_layout", "bounded"):
            if getattr(traits, one) and getattr(traits, other) and (one, other) != (
                    "sends_once", "bounded"):
                raise ValueError(f"dispatcher {name!r} declares {one} and {other}: must be one of "
                                 f"them; rows {why} are exact")


dispatchers: Registry[type[Dispatcher]] = Registry("dispatcher", base=Dispatcher,
                                                   check=_check_traits)


def check_settings(config: DispatchConfig, training: bool = True) -> None:
    """`ValueError` where the configured dispatcher has fixed slots and nothing says how many, or
    where rows are bounded that it does not bound.

    training: whether the layer may train: what holds in evaluation alone is then not enough.
    """
    default = DispatchConfig()
    traits = dispatchers.get(config.name).traits
    for name in ("max_rows_factor", "max_tokens", "on_overflow", "stash_mib"):
        value = getattr(config, name)
        if value != getattr(default, name) and not traits.bounded:
            raise ValueError(f"dispatch.{name}={value!r} does not fit dispatch.name="
                             f"{config.name!r}, which bounds no rows; use 'bounded', or leave it "
                             "out")
    outside = config.eval_capacity_factor is not None or config.eval_token_fraction > 0
    if traits.fixed_slots and config.capacity_factor is None and (training or not outside):
        raise ValueError(
            f"dispatch.capacity_factor=none does not fit dispatch.name={config.name!r}:"
            f" {_CAPACITY}")


def fixed_slots(kept: KeptRouting) -> tuple[Tensor, int]:
    """(slots_TK int64 [T, K], capacity); `ValueError` where this call has none."""
    if kept.slots_TK is None or kept.capacity is None:
        raise ValueError(f"dispatch.capacity_factor=none does not fit this call: {_CAPACITY}")
    return kept.slots_TK, kept.capacity


def expand(place: Placement, routing: Routing, slots_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """(ids int64, weights) over shards of experts, [T, K*r]: each of the r slices of a chosen
    expert gets the token.

    Slot s of an expert goes to member s % (S/r) of the ranks that share a slice. slots_TK: int64
    [T, K], slot of each choice inside its expert; None: counted here, where it is needed.
    """
    if place.shards == 1:
        return routing.ids_TK, routing.weights_TK
    local = place.local
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
    """(slots int64 [T, K*r], capacity) of shards: an expert's slots dealt to the S/r ranks that
    share it.
    """
    if place.token_shards > 1:
        slots_TK = torch.div(slots_TK, place.token_shards, rounding_mode="floor")
    slots_TKr = slots_TK.repeat_interleave(place.copies or place.shards, dim=1)
    return slots_TKr, -(-capacity // place.token_shards)
