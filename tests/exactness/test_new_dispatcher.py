"""A dispatcher registered from outside runs in every layout that its traits declare: the registry
and the traits give its cells of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_plugin.comm.functional import all_gather, with_backward
from moe_plugin.dispatch import Dispatcher, DispatchTraits, ExchangeDispatcher, Sent, dispatchers
from moe_plugin.dispatch.base import expand
from moe_plugin.dispatch.pieces import ExchangePlan, ragged_plan
from moe_plugin.dispatch.rows import TokenPlan, positions
from moe_plugin.records import ExpertRows, KeptRouting, RowCounts, RowPlan
from tests.combinations import every_value
from tests.exactness import cells
from tests.exactness.test_matrix import run_cell


@dataclass(frozen=True)
class AllRowsPlan(TokenPlan):
    tokens: int
    longest: int


class AllRowsDispatcher(Dispatcher):
    """Every rank gets all tokens, in any layout, and looks for its rows in a loop."""

    traits = DispatchTraits()

    def plan(self, kept: KeptRouting) -> AllRowsPlan:
        place, comm = self.placement, self.placement.comm
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        longest = int(comm.all_reduce(torch.tensor([len(ids_TK)]), "max"))
        missing = (0, 0, 0, longest - len(ids_TK))
        ids_AK = comm.all_gather(pad(ids_TK, missing, value=-1))
        rows = [[n for n, expert in enumerate(ids_AK.flatten().tolist()) if expert == mine]
                for mine in range(comm.rank * place.local, (comm.rank + 1) * place.local)]
        source_R = torch.tensor(sum(rows, []), dtype=torch.int64)
        row_plan = RowPlan(source_R, positions(source_R, ids_AK),
                           all_gather(pad(weights_TK, missing), comm),
                           RowCounts([len(one) for one in rows]))
        return AllRowsPlan(len(source_R), row_plan, len(ids_TK), longest)

    def dispatch(self, x_TD: Tensor, plan: AllRowsPlan, anchor: Tensor | None) -> Sent:
        padded_TD = pad(x_TD, (0, 0, 0, plan.longest - plan.tokens))
        x_AD = all_gather(padded_TD, self.placement.comm)
        return Sent([ExpertRows(x_AD, plan.row_plan)], anchor)

    def combine(self, sent: Sent, plan: AllRowsPlan) -> Tensor:
        [part_AD] = sent.results
        whole_AD = with_backward(part_AD, self.placement.comm, "reduce_scatter", "all_gather")
        return whole_AD[:plan.tokens]


class LoopDispatcher(ExchangeDispatcher):
    """Ragged dispatch that sorts in a loop."""

    traits = DispatchTraits(supports_pieces=True)

    def plan(self, kept: KeptRouting) -> ExchangePlan:
        place = self.placement
        ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
        experts = ids_TK.flatten().tolist()
        order = [n for shard in [*range(place.virtual), -1]
                 for n, expert in enumerate(experts) if expert == shard]
        send_V = torch.tensor([experts.count(shard) for shard in range(place.virtual)])
        both = torch.stack([send_V, place.comm.all_to_all(send_V)])
        send_WL, recv_WL = both.view(2, place.comm.size, place.local).tolist()
        return ragged_plan(torch.tensor(order, dtype=torch.int64), send_WL, recv_WL, ids_TK,
                           weights_TK, place, self.overlap)


@pytest.mark.parametrize("dispatcher", [AllRowsDispatcher, LoopDispatcher])
def test_it_runs_in_every_layout_that_it_declares(dispatcher: type[Dispatcher],
                                                  own_entries: None) -> None:
    dispatchers.register("from_a_test")(dispatcher)
    sizes = [(1, 8, None), (2, 1, None), (4, 2, None), (4, 8, 4)]
    fewer = {"tokens": ["uneven", "padding", "one"], "activation": ["gelu"]}
    joined = (cells.cells_of("from_a_test", sizes, **fewer)
              + cells.parm_cells("from_a_test", sizes[2:3], **fewer))
    assert {cell["size"].r for cell in joined} == {0, 1, 2, 4}
    pieces = dispatcher.traits.supports_pieces
    assert {cell["pieces"] for cell in joined} == set(cells.PIECES if pieces else cells.PIECES[:1])
    for place in every_value(joined, along="size"):
        run_cell(joined[place])
