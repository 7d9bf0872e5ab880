"""Rows that spill: other ranks than the owner compute some of an expert's rows.

With a planner (`planner.spill`), other ranks than the owner may compute an expert's rows. Every
rank learns how many rows every rank has for every expert, so all make the same plan from the loads
of this very call; a recomputation that repeats the routing repeats the plan. Rows travel in one
exchange, as without a plan: a borrowed expert is one more local expert, after the stored ones.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import SpillPlanner, expand
from moe_plugin.dispatch.pieces import ExchangePlan, count_rows, ragged_plan
from moe_plugin.dispatch.rows import sort_by_expert
from moe_plugin.planner.spill import SpillPlan
from moe_plugin.records import KeptRouting, Overlap
from moe_plugin.utils.machine import to_device


@dataclass(frozen=True)
class SpillingPlan(ExchangePlan):
    """An exchange whose rows by local expert are those of the stored experts and, after them, those
    of up to `spill.most_guests` borrowed ones.

    spill: who computes what; None: every rank its own experts' rows, and no others.
    """

    spill: SpillPlan | None = None


def spilling_plan(kept: KeptRouting, place: Placement, overlap: Overlap,
                  planner: SpillPlanner) -> SpillingPlan:
    """The plan of one call, the same on all ranks. One exchange of counts, and one copy of them
    from device to host.
    """
    ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
    order_N, counts_WV, spill = _who_computes(ids_TK, place, planner)
    me, local = place.comm.rank, place.local
    if spill is None:
        mine = counts_WV[me]
        send_WL = [mine[i:i + local] for i in range(0, place.virtual, local)]
        recv_WL = [row[me * local:(me + 1) * local] for row in counts_WV]
    else:
        tables = _Tables(spill)
        send_WL = [tables.row(me, target) for target in range(spill.ranks)]
        recv_WL = [tables.row(source, me) for source in range(spill.ranks)]
        order_N = tables.regroup(order_N, me)
    plan = ragged_plan(order_N, send_WL, recv_WL, ids_TK, weights_TK, place, overlap)
    count_rows(plan, place)
    parts = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return SpillingPlan(**parts, spill=spill)


def _who_computes(ids_TK: Tensor, place: Placement, planner: SpillPlanner) -> tuple[
        Tensor, list[list[int]], SpillPlan | None]:
    """(choices by expert, see `sort_by_expert`; rows by source rank and expert; the plan of all
    ranks, None: every rank computes its own experts' rows).
    """
    order_N, send_V = sort_by_expert(ids_TK, place.virtual)
    # an all-gather in one step instead of a ring's
    every_V = place.comm.all_to_all(send_V.repeat(place.comm.size))
    counts_WV = every_V.view(place.comm.size, -1).tolist()
    spill = planner(counts_WV)
    return order_N, counts_WV, spill if spill is not None and spill.loans else None


def spilled(ids_TK: Tensor, place: Placement,
            planner: SpillPlanner) -> tuple[Tensor, int, SpillPlan | None]:
    """(rank * G + its local expert of each choice, int64 [T, K]; G; the plan, None: nothing spills)
    of ranks that have G experts each, those that they borrow behind the stored ones.

    Collective: one exchange of counts, and one copy of them from device to host.

    ids_TK: int64 expert shards; -1: none, there and here.
    """
    order_N, counts_WV, spill = _who_computes(ids_TK, place, planner)
    if spill is None:
        return ids_TK, place.local, None
    tables, me = _Tables(spill), place.comm.rank
    rows_WG = [tables.row(me, target) for target in range(spill.ranks)]
    total = sum(map(sum, rows_WG))
    rows_M = to_device(rows_WG, ids_TK.device).view(-1)
    label_M = torch.arange(rows_M.numel(), device=ids_TK.device)
    label_N = label_M.repeat_interleave(rows_M, output_size=total)
    spilled_N = torch.full_like(order_N, -1).index_copy_(
        0, tables.regroup(order_N, me)[:total], label_N)
    return spilled_N.view(ids_TK.shape), place.local + spill.most_guests, spill


class _Tables:
    """Rows of a plan by source rank, target rank and the target's local expert, on the host."""

    def __init__(self, spill: SpillPlan) -> None:
        self.spill, self.width = spill, spill.most_guests
        self.flows = {loan.expert: spill.flows(loan.expert) for loan in spill.loans}
        self.guests = [spill.guests(rank) for rank in range(spill.ranks)]

    def row(self, source: int, target: int) -> list[int]:
        """Rows from one rank to another by its stored experts, then by those that it borrows."""
        local, counts = self.spill.local, self.spill.counts_WV[source]
        stored = [self.flows[e][source][target] if e in self.flows else counts[e]
                  for e in range(target * local, (target + 1) * local)]
        guests = [self.flows[e][source][target] for e in self.guests[target]]
        return stored + guests + [0] * (self.width - len(guests))

    def regroup(self, order_N: Tensor, source: int) -> Tensor:
        """Choices of `source` by expert to choices by (target, its local expert); int64 [N].

        An expert's rows are cut into runs for the ranks that compute them, in the order of ranks.
        """
        starts = [0, *accumulate(self.spill.counts_WV[source])]
        runs: list[tuple[int, int]] = []
        local = self.spill.local
        for target in range(self.spill.ranks):
            for expert in [*range(target * local, (target + 1) * local), *self.guests[target]]:
                start, rows = starts[expert], self.spill.counts_WV[source][expert]
                if expert in self.flows:
                    flow = self.flows[expert][source]
                    start, rows = start + sum(flow[:target]), flow[target]
                if rows:
                    runs.append((start, rows))
        return _take_runs(order_N, _merged(runs), starts[-1])


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs (start, length) of which each follows on the one before are put together."""
    merged: list[tuple[int, int]] = []
    for start, rows in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + rows)
        else:
            merged.append((start, rows))
    return merged


def _take_runs(order_N: Tensor, runs: list[tuple[int, int]], total: int) -> Tensor:
    """The runs (start, length) of order_N one after another, then what is behind `total`."""
    return torch.cat([*(order_N.narrow(0, *run) for run in runs), order_N[total:]])
