"""Which choice lies in which row (expert-major order, fixed slots, and their inverses), and
dispatch in which tokens stay where they are.

Index-slice dispatch (PPMoE): experts inside a group of ranks that all hold the same tokens. Instead
of an all-to-all, every rank makes the same routing and computes the rows of its own experts; one
all-reduce sums the parts, the one that a dense feed-forward layer under tensor parallelism needs,
too. Backward is one all-reduce of the input's gradient, which carries the gradients of the gate
weights too: so the router's gradients, those of the balance losses included, are complete and equal
on all ranks. Source: Chen et al. 2023 (PPMoE). Elements per rank and direction: a ring all-reduce
of T D forward, T (D + K) backward.

Legend: N choices that become rows, V slots; see `records` for the rest.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.functional import enter, sum_parts
from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import (
    DispatchContext,
    Dispatcher,
    DispatchTraits,
    Sent,
    dispatchers,
    fixed_slots,
)
from moe_plugin.kernels.choices import expert_load, slot_sources, sorted_choices, stable_order
from moe_plugin.records import (
    DeviceCounts,
    DispatchPlan,
    ExpertRows,
    KeptRouting,
    Routing,
    RowCounts,
    RowPlan,
)
from moe_plugin.utils.machine import exporting


def known_load(routing: Routing) -> tuple[Tensor | None, bool]:
    """(load_KE int64 [K, E], None: not counted; whether ids_TK is known to hold no -1)."""
    counted = routing.counted
    # a routing that was made of another one has other choices
    if counted is None or counted.ids_TK is not routing.ids_TK:
        return None, False
    return counted.load_KE, counted.complete


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
    counts = count_E.tolist()
    total = sum(counts)
    complete = total == order_N.numel()
    source_R = order_N if complete else order_N[:total]
    position_TK = positions(source_R, ids_TK, complete)
    return RowPlan(source_R, position_TK, weights_TK, RowCounts(counts), complete)


def device_rows(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> RowPlan:
    """As `exact_rows`, in a buffer for all T*K choices, whose counts stay on the device.

    Args:
        ids_TK: int64 [T, K], -1: no row.
        weights_TK: [T, K] gate weights.
    """
    source_R, position_TK, count_E = sorted_choices(ids_TK, experts)
    return RowPlan(source_R, position_TK, weights_TK, DeviceCounts(count_E, ids_TK.numel()))


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


@dataclass(frozen=True)
class TokenPlan(DispatchPlan):
    """Tokens stay as they are; experts gather their rows from them and add the results up.

    Attributes:
        row_plan: which rows of these tokens this rank computes.
    """

    row_plan: RowPlan


class LocalDispatcher(Dispatcher):
    """For a rank that has all experts, stored or gathered: its tokens stay. Its rows are those of
    the configured dispatcher: exact, in fixed slots, or of a bounded number.
    """

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        self.traits = DispatchTraits(fixed_slots=context.configured.fixed_slots,
                                     bounded=context.configured.bounded)

    def plan(self, kept: KeptRouting) -> TokenPlan:
        """See `Dispatcher`. The host does not wait for a device, except for the counts of exact
        rows where experts need them on the host.
        """
        routing, compiling = kept.routing, torch.compiler.is_compiling()
        choices = routing.ids_TK, routing.weights_TK
        slots = fixed_slots(kept) if self.traits.fixed_slots else None
        # on a CPU counts are on the host already: empty slots are left out
        on_host = routing.ids_TK.device.type == "cpu" and not compiling
        if kept.any_load:
            slots = None  # T for every expert: more than the rows
        on_device = slots is None and self.context.counts_on_device and not (on_host or compiling)
        if self.traits.bounded or on_device or (compiling and exporting()):
            rows = device_rows(*choices, self.placement.experts)
        elif slots is None or on_host:
            rows = exact_rows(*choices, self.placement.experts, *known_load(routing))
        else:
            rows = slot_rows(*choices, *slots, self.placement.experts)
        return TokenPlan(rows.counts.real, rows)

    def dispatch(self, x_TD: Tensor, plan: TokenPlan, anchor: Tensor | None) -> Sent:
        return Sent([ExpertRows(x_TD, plan.row_plan)], anchor)

    def combine(self, sent: Sent, plan: TokenPlan) -> Tensor:
        [y_TD] = sent.results
        return y_TD


def with_weights(plan: RowPlan, weights_TK: Tensor) -> RowPlan:
    """The same rows with the gate weights [T, K] that came with the tokens."""
    return dataclasses.replace(plan, weights_TK=weights_TK)


@dispatchers.register("index_slice")
class IndexSliceDispatcher(Dispatcher):
    """For tensor-parallel ranks with the same tokens: own rows, then one all-reduce of the sums."""

    traits = DispatchTraits(shares_tokens=True, single_layout=True)

    def plan(self, kept: KeptRouting) -> TokenPlan:
        """See `Dispatcher`. One copy of counts from device to host."""
        rows = rows_of_this_rank(kept.routing, self.placement)
        return TokenPlan(rows.counts.total, rows)

    def dispatch(self, x_TD: Tensor, plan: TokenPlan, anchor: Tensor | None) -> Sent:
        x_TD, weights_TK = enter(x_TD, plan.row_plan.weights_TK, anchor, self.placement.comm)
        return Sent([ExpertRows(x_TD, with_weights(plan.row_plan, weights_TK))], anchor)

    def combine(self, sent: Sent, plan: TokenPlan) -> Tensor:
        """See `Dispatcher`. y_TD is equal on all ranks."""
        [part_TD] = sent.results
        return sum_parts(part_TD, self.placement.comm)
