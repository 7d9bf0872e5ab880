"""Functions that order rows by expert or in fixed slots, and dispatchers that do not send tokens.

The `index_slice` dispatcher (PPMoE) can be used if all ranks of a group have the same tokens. Every
rank computes the same routing and then the rows of its own experts, so no tokens are exchanged. A
single all-reduce sums the outputs, as in a dense feed-forward layer under tensor parallelism. The
backward pass uses one all-reduce for the gradients of the input and the gate weights. As a result,
the gradients of the router are complete and equal on all ranks, including the gradients of the
balance losses. The ring all-reduces transfer T D elements in the forward pass and T (D + K)
elements in the backward pass.
Source: Chen et al. 2023 (PPMoE).

In tensor names, N is the number of routing choices that have a row, and V is the number of slots.
See `moe_plugin.records` for the other letters.
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
    """Return the load of a routing, if the load is known, and whether every choice has an expert.

    Returns: The load, int64 [K, E], or None, and True if it is known that `ids_TK` contains no -1.
    """
    counted = routing.counted
    # a routing that was derived from another one has different choices
    if counted is None or counted.ids_TK is not routing.ids_TK:
        return None, False
    return counted.load_KE, counted.complete


def sort_by_expert(ids_TK: Tensor, experts: int, load_KE: Tensor | None = None,
                   complete: bool = False) -> tuple[Tensor, Tensor]:
    """Sort routing choices by expert. The choices of each expert remain in token order.

    Args:
        ids_TK: int64 [T, K], the expert of each choice, or -1 for a choice without an expert.
        experts: number of experts, E.
        load_KE: int64 [K, E], the load, if it is known (`known_load`). If None, the function counts
            the load.
        complete: True if it is known that every choice has an expert.
    Returns: The indices of the routing choices, sorted by expert, int64 [T*K], and the number of
        choices of each expert, int64 [E]. Choices without an expert are at the end.
    """
    key_N = ids_TK.reshape(-1)
    if not complete:
        # -1 would be sorted first
        key_N = torch.where(key_N < 0, experts, key_N)
    count_E = expert_load(ids_TK, experts) if load_KE is None else load_KE.sum(0)
    return stable_order(key_N, experts + 1), count_E


def positions(source_N: Tensor, ids_TK: Tensor, complete: bool = False) -> Tensor:
    """Return the row of each routing choice, int64 [T, K], or -1 for choices without a row.

    Args:
        source_N: int64 [N], the routing choice of each row.
        ids_TK: tensor of shape [T, K]. Only the shape and device of `ids_TK` are used.
        complete: True if every choice has a row.
    """
    if complete:
        return inverse_permutation(source_N).view(ids_TK.shape)
    position_N = torch.full((ids_TK.numel(),), -1, dtype=torch.int64, device=ids_TK.device)
    position_N.index_copy_(0, source_N, torch.arange(source_N.numel(), device=ids_TK.device))
    return position_N.view(ids_TK.shape)


def inverse_permutation(order_R: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 [R], with `inverse[order[i]] = i`."""
    return torch.empty_like(order_R).index_copy_(
        0, order_R, torch.arange(order_R.numel(), device=order_R.device))


def exact_rows(ids_TK: Tensor, weights_TK: Tensor, experts: int, load_KE: Tensor | None = None,
               complete: bool = False) -> RowPlan:
    """Return one row for each (token, expert) pair. The rows are sorted by expert. The host reads
    the row counts from the device.

    Args:
        ids_TK: int64 [T, K], the expert of each choice. -1 means that the choice has no row.
        weights_TK: [T, K], the gate weights.
        experts: number of experts.
        load_KE: int64 [K, E], the load, if it is known. If `load_KE` is None, the function counts
            the load.
        complete: True if it is known that every choice has an expert.
    """
    order_N, count_E = sort_by_expert(ids_TK, experts, load_KE, complete)
    counts = count_E.tolist()  # the host waits for the device here
    total = sum(counts)
    complete = total == order_N.numel()
    source_R = order_N if complete else order_N[:total]
    position_TK = positions(source_R, ids_TK, complete)
    return RowPlan(source_R, position_TK, weights_TK, RowCounts(counts), complete)


def device_rows(ids_TK: Tensor, weights_TK: Tensor, experts: int) -> RowPlan:
    """Return the rows of `exact_rows` in a buffer for T*K rows, with counts that stay on the
    device.

    Args:
        ids_TK: int64 [T, K], the expert of each choice. A value of -1 means that the choice has no
            row.
        weights_TK: [T, K], the gate weights.
        experts: number of experts.
    """
    source_R, position_TK, count_E = sorted_choices(ids_TK, experts)
    return RowPlan(source_R, position_TK, weights_TK, DeviceCounts(count_E, ids_TK.numel()))


def slot_rows(ids_TK: Tensor, weights_TK: Tensor, slots_TK: Tensor, capacity: int,
              experts: int) -> RowPlan:
    """Return C rows for each expert, including empty rows. Row e*C + c contains slot c of expert e.

    The host does not read any value from the device.

    Args:
        ids_TK: int64 [T, K], the expert of each choice. -1 means that the choice has no row.
        weights_TK: [T, K], the gate weights.
        slots_TK: int64 [T, K], the slot of each choice within its expert.
        capacity: number of slots per expert, C.
        experts: the number of experts.
    """
    position_TK = torch.where(ids_TK >= 0, ids_TK * capacity + slots_TK, -1)
    source_R = slot_sources(position_TK, experts * capacity)
    return RowPlan(source_R, position_TK, weights_TK, RowCounts([capacity] * experts))


def rows_of_this_rank(routing: Routing, place: Placement) -> RowPlan:
    """Return the rows that this rank's experts or shards compute for all tokens of a routing."""
    ids_TK = routing.ids_TK - place.first_expert
    mine_TK = (ids_TK >= 0) & (ids_TK < place.local)
    return exact_rows(torch.where(mine_TK, ids_TK, -1), routing.weights_TK, place.local)


@dataclass(frozen=True)
class TokenPlan(DispatchPlan):
    """The plan of a call that does not send tokens. The experts read their rows from the tokens.

    Attributes:
        row_plan: rows that this rank computes.
    """

    row_plan: RowPlan


class LocalDispatcher(Dispatcher[TokenPlan]):
    """A dispatcher for a rank that has the parameters of all experts, either stored or gathered.

    Tokens stay on their rank.

    Rows are arranged as by the configured dispatcher: exact rows, fixed slots or bounded rows.
    """

    def __init__(self, context: DispatchContext) -> None:
        super().__init__(context)
        traits = DispatchTraits(fixed_slots=context.configured.fixed_slots,
                                bounded=context.configured.bounded)
        self.traits = traits  # type: ignore[misc]  # follow the configured dispatcher

    def plan(self, kept: KeptRouting) -> TokenPlan:
        """See `Dispatcher`.

        The host waits only if the rows are exact and the experts need the row counts on the host.
        """
        routing, compiling = kept.routing, torch.compiler.is_compiling()
        choices = routing.ids_TK, routing.weights_TK
        slots = fixed_slots(kept) if self.traits.fixed_slots else None
        # on a CPU the host can read the counts without waiting, so empty slots are not computed
        on_host = routing.ids_TK.device.type == "cpu" and not compiling
        if kept.any_load:
            slots = None  # T slots for every expert would be more rows than there are choices
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
    """Return the same rows with different gate weights [T, K]."""
    return dataclasses.replace(plan, weights_TK=weights_TK)


@dispatchers.register("index_slice")
class IndexSliceDispatcher(Dispatcher[TokenPlan]):
    """A dispatcher for ranks that have the same tokens: each rank computes the rows of its own
    experts, and an all-reduce sums the outputs (PPMoE).
    """

    traits = DispatchTraits(shares_tokens=True, single_layout=True)

    def plan(self, kept: KeptRouting) -> TokenPlan:
        """See `Dispatcher`. The plan requires one copy of counts from device to host."""
        rows = rows_of_this_rank(kept.routing, self.placement)
        return TokenPlan(rows.counts.total, rows)

    def dispatch(self, x_TD: Tensor, plan: TokenPlan, anchor: Tensor | None) -> Sent:
        # backward sums the gradients of tokens and gate weights over the ranks, in one all-reduce
        assert plan.row_plan.weights_TK is not None
        x_TD, weights_TK = enter(x_TD, plan.row_plan.weights_TK, anchor, self.placement.comm)
        return Sent([ExpertRows(x_TD, with_weights(plan.row_plan, weights_TK))], anchor)

    def combine(self, sent: Sent, plan: TokenPlan) -> Tensor:
        """See `Dispatcher`. The outputs are equal on all ranks."""
        [part_TD] = sent.results
        return sum_parts(part_TD, self.placement.comm)
