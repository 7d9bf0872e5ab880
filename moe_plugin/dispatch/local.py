"""Dispatch where no row leaves its rank, and dispatch in which tokens are gathered, not sent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.dispatch.base import DispatchContext, Dispatcher, DispatchTraits, Sent, fixed_slots
from moe_plugin.dispatch.rows import device_rows, exact_rows, slot_rows
from moe_plugin.kernels.expert_load import known_load
from moe_plugin.machine import exporting
from moe_plugin.records import DispatchPlan, ExpertRows, KeptRouting, RowPlan


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
        """See `Dispatcher`."""
        return Sent([ExpertRows(x_TD, plan.row_plan)], anchor)

    def combine(self, sent: Sent, plan: TokenPlan) -> Tensor:
        """See `Dispatcher`."""
        [y_TD] = sent.results
        return y_TD


def with_weights(plan: RowPlan, weights_TK: Tensor) -> RowPlan:
    """The same rows with the gate weights [T, K] that came with the tokens."""
    return dataclasses.replace(plan, weights_TK=weights_TK)
