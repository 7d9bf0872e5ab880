"""The interface of dispatchers, which send rows to the experts and combine their outputs.

A dispatcher declares its capabilities in `traits`. The layer, the layouts and the exactness tests
read the traits of a dispatcher and never check whether a method exists. A dispatcher stores no
state between calls. The plan of a call contains all data that the call needs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.config import DispatchConfig
from moe_plugin.dispatch.rows_limit import RowsLimit
from moe_plugin.kernels import slot_index
from moe_plugin.planner.spill import Counts, SpillPlan
from moe_plugin.records import DispatchPlan, KeptRouting, Routing, Sent
from moe_plugin.utils.registry import Registry

SpillPlanner = Callable[[Counts], SpillPlan | None]  # maps rows by (source rank, expert) to a plan

PlanT = TypeVar("PlanT", bound=DispatchPlan)  # the plans of a dispatcher


@dataclass(frozen=True)
class Overlap:
    """The number of pieces of rows in each direction, so that exchanges overlap with matmuls.

    Attributes:
        forward: number of pieces in the forward pass, `parallel.d`.
        backward: number of pieces in the backward pass, `parallel.d_backward`. If `backward` is 0,
            the backward pass uses the same number of pieces as the forward pass.
        background: if True, rows are sent in the background even if there is only one piece, so
            that the exchange overlaps with other work.
        piece_axis: axis along which rows are split into pieces; see `dispatch.pieces`.
    """

    forward: int = 1
    backward: int = 0
    background: bool = False
    piece_axis: str = "rows"

    @property
    def pieces(self) -> int:
        """Number of pieces per call. Both the forward and the backward pass can combine the pieces
        into groups of equal size.
        """
        return math.lcm(self.forward, self.backward or self.forward)


@dataclass(frozen=True)
class DispatchTraits:
    """The capabilities that a dispatcher declares.

    Attributes:
        fixed_slots: True if the dispatcher sends C slots per expert and source rank, including
            empty slots. A dispatcher with fixed slots requires a capacity. Other dispatchers send
            only the rows to which tokens were routed.
        supports_pieces: True if rows can be split into pieces (`Overlap`), so that exchanges
            overlap with matmuls.
        piece_axes: axes along which rows can be split into pieces (`dispatch.pieces`).
        shares_tokens: True if all ranks of the group have the same tokens.
        splits_slots: True if ranks that have the same tokens (`Placement.replicas`) divide the
            slots among themselves.
        single_layout: True if the dispatcher supports only the layout that computes each expert on
            the rank that stores it. Other dispatchers support every value of `r`.
        bounded: True if rows are sent in buffers of a fixed length (`DispatchContext.limit`), so
            that the row counts can stay on the device.
        spills: True if ranks that do not store an expert may compute some of the expert's rows
            (`parallel.spill`). If `DispatchContext.spill_planner` is set, a dispatcher that spills
            returns a `SpillingPlan`. A dispatcher that spills must send only real rows and support
            every layout.
        sends_once: True if `dispatch.once` (or `dispatch.bounded_once` for bounded rows) may
            replace the dispatcher. The replacement sends a token's row only once to each rank or
            node that has at least one of the token's experts. A dispatcher that declares
            `sends_once` must send only real rows and support every layout.
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
    """The arguments with which a dispatcher is created.

    Attributes:
        placement: the ranks that store each expert, and the all-to-all algorithm.
        overlap: number of pieces in the forward pass and in the backward pass. More than one piece
            requires `traits.supports_pieces`.
        limit: limit on the number of rows of the layer. All calls of the layer use the same limit
            object. None unless `traits.bounded`.
        spill_planner: object that decides which rank computes which rows. All ranks make the same
            decision. `spill_planner` is None if every rank computes only its own experts.
        configured: traits of the dispatcher that the user configured, if this one replaces it.
        counts_on_device: True if the experts can read their row counts on the device.
        weights_first: True if the experts' inputs are multiplied by the gate weights, instead of
            their outputs. Only dispatchers that send a token's row once per rank or node read
            `weights_first`.
    """

    placement: Placement
    overlap: Overlap = Overlap()
    limit: RowsLimit | None = None
    spill_planner: SpillPlanner | None = None
    configured: DispatchTraits = DispatchTraits()
    counts_on_device: bool = False
    weights_first: bool = False


class Dispatcher(ABC, Generic[PlanT]):
    """Base class of dispatchers. A dispatcher sends tokens to the ranks of their experts and
    returns the outputs.

    Attributes:
        reads_anchor: True if `dispatch` uses its `anchor` argument. The anchor is needed if there
            is more than one rank.
    """

    traits: ClassVar[DispatchTraits]

    def __init__(self, context: DispatchContext) -> None:
        self.context = context
        self.placement, self.overlap = context.placement, context.overlap
        self.reads_anchor = self.placement.comm.size > 1

    @abstractmethod
    def plan(self, kept: KeptRouting) -> PlanT:
        """Determine all sizes of a call. All ranks agree on the sizes.

        `plan` is the only method in which the host may wait for the device.
        """

    def start_sizes(self, routing: Routing, tokens: bool = False) -> Any:
        """Start exchanging the sizes of a call before `plan` is called.

        Starting early saves time if the router's choices are known early and no choice will be
        dropped. All ranks must start their exchanges in the same order.

        Args:
            routing: routing of the call. The caller must assign the result to `routing.sizes`.
            tokens: if True, the largest number of tokens on any rank is determined as well.
        Returns: The exchange in progress (`dispatch.ragged.SentSizes`), or None if the dispatcher
            cannot exchange sizes early.
        """
        return None

    @abstractmethod
    def dispatch(self, x_TD: Tensor, plan: PlanT, anchor: Tensor | None) -> Sent:
        """Send the rows to their experts.

        When the method returns, all background exchanges (`Overlap`) have been started.

        Args:
            x_TD: [T, D], the tokens of this rank.
            plan: the plan of this call.
            anchor: parameter that connects the exchanges to the autograd graph, either on all ranks
                or on no rank (`comm.functional`). Optional.
        """

    @abstractmethod
    def combine(self, sent: Sent, plan: PlanT) -> Tensor:
        """Return the outputs [T, D]. The output of a token is the weighted sum of its rows.

        Args:
            sent: object returned by `dispatch`. The experts' outputs for all pieces must have been
                passed to the object `sent`.
            plan: the plan of this call.
        """


class WrappedDispatcher(Dispatcher[Any]):
    """Base class of dispatchers that wrap another dispatcher and add work to its methods.

    Args:
        inner: dispatcher to wrap.
    """

    def __init__(self, inner: Dispatcher) -> None:
        super().__init__(inner.context)
        self.inner, self.traits = inner, inner.traits  # type: ignore[misc]

    def plan(self, kept: KeptRouting) -> DispatchPlan:
        return self.inner.plan(kept)

    def start_sizes(self, routing: Routing, tokens: bool = False) -> Any:
        return self.inner.start_sizes(routing, tokens)

    def dispatch(self, x_TD: Tensor, plan: Any, anchor: Tensor | None) -> Sent:
        return self.inner.dispatch(x_TD, plan, anchor)

    def combine(self, sent: Sent, plan: Any) -> Tensor:
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


dispatchers: Registry[type[Dispatcher[Any]]] = Registry("dispatcher", base=Dispatcher,
                                                   check=_check_traits)


def check_settings(config: DispatchConfig, training: bool = True) -> None:
    """Check the capacity settings and the settings of bounded rows.

    Args:
        config: the dispatch settings.
        training: True if the layer may be trained. If `training` is True, it is not enough to set a
            capacity for evaluation only.
    Raises:
        ValueError: If the dispatcher has fixed slots but no capacity is set, or if a setting of
            bounded rows is used with a dispatcher whose rows are not bounded.
    """
    default = DispatchConfig()
    traits = dispatchers.get(config.name).traits
    for name in ("max_rows_factor", "max_tokens", "on_overflow", "stash_mib"):
        value = getattr(config, name)
        if value != getattr(default, name) and not traits.bounded:
            raise ValueError(f"dispatch.{name}={value!r} cannot be used with dispatch.name="
                             f"{config.name!r}, which does not limit the number of rows. Use "
                             "dispatch.name='bounded', or remove the setting")
    outside = config.eval_capacity_factor is not None or config.eval_token_fraction > 0
    if traits.fixed_slots and config.capacity_factor is None and (training or not outside):
        raise ValueError(
            f"dispatch.capacity_factor=none cannot be used with dispatch.name={config.name!r}: "
            f"{_CAPACITY}")


def fixed_slots(kept: KeptRouting) -> tuple[Tensor, int]:
    """Return the slot of each routing choice, int64 [T, K], and the capacity per expert.

    Raises:
        ValueError: If this call has no capacity.
    """
    if kept.slots_TK is None or kept.capacity is None:
        raise ValueError(f"dispatch.capacity_factor=none gives this call no capacity: {_CAPACITY}")
    return kept.slots_TK, kept.capacity


def expand(place: Placement, routing: Routing, slots_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convert choices of experts to choices of expert shards. The function returns the shard ids,
    int64 [T, K*r], and the weights [T, K*r].

    A token is sent to each of the r slices of a chosen expert. The S/r ranks that share a slice
    divide the slots of the expert among themselves: rank s % (S/r) among them processes slot s.

    Args:
        place: the ranks that store each expert, and the number of copies r.
        routing: choices of whole experts.
        slots_TK: int64 [T, K], the slot of each choice within its expert. If `slots_TK` is None,
            the function computes the slots when they are needed.
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
    """Convert the slots of experts to slots of expert shards. The function returns the slots, int64
    [T, K*r], and the capacity per shard.

    The slots of an expert are assigned round-robin to the S/r ranks that share the expert.
    """
    if place.token_shards > 1:
        slots_TK = torch.div(slots_TK, place.token_shards, rounding_mode="floor")
    slots_TKr = slots_TK.repeat_interleave(place.copies or place.shards, dim=1)
    return slots_TKr, -(-capacity // place.token_shards)
