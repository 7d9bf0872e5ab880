"""Spilling: if an expert has a high load, other ranks compute some of its rows.

The ranks exchange the number of rows that each rank has for each expert. All ranks then compute the
same plan for the call from the exchanged loads (`planner.spill`). A recomputation uses the same
routing and therefore computes the same plan. All rows are sent in a single exchange, as without
spilling, because a rank treats a borrowed expert as an additional local expert, which comes after
the stored experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from moe_plugin.comm.placement import Placement
from moe_plugin.dispatch.base import Overlap, SpillPlanner, expand
from moe_plugin.dispatch.pieces import ExchangePlan, count_rows, ragged_plan
from moe_plugin.dispatch.rows import sort_by_expert
from moe_plugin.planner.spill import SpillPlan
from moe_plugin.records import KeptRouting
from moe_plugin.utils.machine import to_device


@dataclass(frozen=True)
class SpillingPlan(ExchangePlan):
    """The plan of an exchange in which ranks may compute rows of borrowed experts.

    The local experts of a rank are its stored experts followed by up to `spill.most_guests`
    borrowed experts.

    Attributes:
        spill: plan that determines which rank computes each row, or None if every rank computes
            only the rows of its stored experts.
    """

    spill: SpillPlan | None = None


def spilling_plan(kept: KeptRouting, place: Placement, overlap: Overlap,
                  planner: SpillPlanner) -> SpillingPlan:
    """Return the plan of one call with spilling. The function requires one exchange of counts and
    one copy from device to host.

    Args:
        kept: routing of the call.
        place: the ranks that store each expert.
        overlap: number of pieces of the exchange.
        planner: object that decides which rank computes which rows.
    """
    ids_TK, weights_TK = expand(place, kept.routing, kept.slots_TK)
    order_N, counts_WV, spill = _who_computes(ids_TK, place, planner)
    rank, local = place.comm.rank, place.local
    if spill is None:
        counts_V = counts_WV[rank]
        send_WL = [counts_V[i:i + local] for i in range(0, place.virtual, local)]
        recv_WL = [row[rank * local:(rank + 1) * local] for row in counts_WV]
    else:
        tables = _Tables(spill)
        send_WL = [tables.row(rank, target) for target in range(spill.ranks)]
        recv_WL = [tables.row(source, rank) for source in range(spill.ranks)]
        order_N = tables.regroup(order_N, rank)
    # from here on borrowed experts are ordinary local experts with numbers from `local` on
    plan = ragged_plan(order_N, send_WL, recv_WL, ids_TK, weights_TK, place, overlap)
    count_rows(plan, place)
    parts = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return SpillingPlan(**parts, spill=spill)


def _who_computes(ids_TK: Tensor, place: Placement, planner: SpillPlanner) -> tuple[
        Tensor, list[list[int]], SpillPlan | None]:
    """Return the routing choices sorted by expert, the row counts by source and expert, and the
    plan.

    The plan is None if every rank computes only the rows of its own experts.
    """
    order_N, send_V = sort_by_expert(ids_TK, place.virtual)
    # an all-to-all of repeated counts replaces an all-gather, whose ring needs several steps
    every_V = place.comm.all_to_all(send_V.repeat(place.comm.size))
    counts_WV = every_V.view(place.comm.size, -1).tolist()
    spill = planner(counts_WV)
    # a plan without loans would cost the exchange of weights for nothing
    return order_N, counts_WV, spill if spill is not None and spill.loans else None


def spilled(ids_TK: Tensor, place: Placement,
            planner: SpillPlanner) -> tuple[Tensor, int, SpillPlan | None]:
    """For a dispatcher that sends each token's row only once per rank or node, return the rank and
    the local expert that compute each choice.

    Collective. The function requires one exchange of counts and one copy from device to host.

    Args:
        ids_TK: int64 [T, K], the expert shard of each choice, or -1 for choices without an expert.
        place: the ranks that store each expert.
        planner: object that decides which rank computes which rows.
    Returns: For each choice, rank * G + local expert, int64 [T, K], or -1; the number G of stored
        and borrowed experts per rank; and the plan, or None if every rank computes only the rows of
        its own experts.
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
    """The row counts of a plan, indexed by source rank, target rank and the target's local expert.
    """

    def __init__(self, spill: SpillPlan) -> None:
        self.spill, self.width = spill, spill.most_guests
        self.flows = {loan.expert: spill.flows(loan.expert) for loan in spill.loans}
        self.guests = [spill.guests(rank) for rank in range(spill.ranks)]

    def row(self, source: int, target: int) -> list[int]:
        """Return the row counts from `source` to `target` for stored, then borrowed experts."""
        local, counts = self.spill.local, self.spill.counts_WV[source]
        stored = [self.flows[e][source][target] if e in self.flows else counts[e]
                  for e in range(target * local, (target + 1) * local)]
        guests = [self.flows[e][source][target] for e in self.guests[target]]
        # all ranks must have the same number of columns, also ranks that borrow fewer experts
        return stored + guests + [0] * (self.width - len(guests))

    def regroup(self, order_N: Tensor, source: int) -> Tensor:
        """Reorder the routing choices of `source`, int64 [N], which are sorted by expert, so that
        they are sorted by (target, local expert).

        The rows of an expert are divided into consecutive runs, one for each rank that computes
        rows of the expert, in ascending order of ranks.
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
        pieces = [order_N.narrow(0, *run) for run in _merged(runs)]
        return torch.cat([*pieces, order_N[starts[-1]:]])


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent runs, which are given as (start, length)."""
    merged: list[tuple[int, int]] = []
    for start, rows in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + rows)
        else:
            merged.append((start, rows))
    return merged
