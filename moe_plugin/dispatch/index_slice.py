"""Index-slice dispatch (PPMoE): experts inside a group of ranks that all hold the same tokens.

Instead of an all-to-all, every rank makes the same routing and computes the rows of its own
experts; one all-reduce sums the parts, the one that a dense feed-forward layer under tensor
parallelism needs, too. Backward is one all-reduce of the input's gradient, which carries the
gradients of the gate weights too: so the router's gradients, those of the balance losses included,
are complete and equal on all ranks.

Source: Chen et al. 2023 (PPMoE). Elements per rank and direction: a ring all-reduce of T D forward,
T (D + K) backward.
"""

from __future__ import annotations

from torch import Tensor

from moe_plugin.comm.tensor_parallel import enter, sum_parts
from moe_plugin.dispatch.base import Dispatcher, DispatchTraits, Sent, dispatchers
from moe_plugin.dispatch.local import TokenPlan, with_weights
from moe_plugin.dispatch.rows import rows_of_this_rank
from moe_plugin.records import ExpertRows, KeptRouting


@dispatchers.register("index_slice")
class IndexSliceDispatcher(Dispatcher):
    """For tensor-parallel ranks with the same tokens: own rows, then one all-reduce of the sums."""

    traits = DispatchTraits(shares_tokens=True, single_layout=True)

    def plan(self, kept: KeptRouting) -> TokenPlan:
        """See `Dispatcher`. One copy of counts from device to host."""
        rows = rows_of_this_rank(kept.routing, self.placement)
        return TokenPlan(rows.counts.total, rows)

    def dispatch(self, x_TD: Tensor, plan: TokenPlan, anchor: Tensor | None) -> Sent:
        """See `Dispatcher`."""
        x_TD, weights_TK = enter(x_TD, plan.row_plan.weights_TK, anchor, self.placement.comm)
        return Sent([ExpertRows(x_TD, with_weights(plan.row_plan, weights_TK))], anchor)

    def combine(self, sent: Sent, plan: TokenPlan) -> Tensor:
        """See `Dispatcher`. y_TD is equal on all ranks."""
        [part_TD] = sent.results
        return sum_parts(part_TD, self.placement.comm)
