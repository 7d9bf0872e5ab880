"""Rows of experts in parts, in another order, or with other counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moe_plugin.records import RowCounts, RowPlan
from moe_plugin.utils.machine import to_device


def counts_of(rows: RowCounts | RowPlan) -> list[int]:
    """Rows of each expert."""
    return (rows.counts if isinstance(rows, RowPlan) else rows).host


def parts(rows_RD: Tensor, counts: RowCounts,
           room: int) -> Iterator[tuple[Tensor, RowCounts, list[int]]]:
    """Rows of at most `room` experts at a time, with counts of all, and which experts they are."""
    active = [expert for expert, n in enumerate(counts.host) if n]
    groups = [active[at:at + room] for at in range(0, len(active), room)]
    lengths = [sum(counts.host[e] for e in group) for group in groups]
    for part_RD, group in zip(rows_RD.split(lengths), groups, strict=True):
        yield part_RD, RowCounts([n if e in group else 0 for e, n in enumerate(counts.host)]), group


def with_counts(rows: RowCounts | RowPlan, lengths: list[int]) -> RowCounts | RowPlan:
    """The same rows, of experts that are counted otherwise."""
    counts = RowCounts(lengths)
    return dataclasses.replace(rows, counts=counts) if isinstance(rows, RowPlan) else counts


def order_of(lengths: Sequence[int], slots: Sequence[int], device: torch.device) -> Tensor:
    """int64 [R]: where the rows of the experts lie, in the order of their slots."""
    ends = torch.tensor(list(lengths)).cumsum(0).tolist()
    runs = [torch.arange(ends[i] - lengths[i], ends[i])
            for i in sorted(range(len(slots)), key=slots.__getitem__)]
    return to_device(torch.cat(runs), device)


def reordered(plan: RowPlan, order_R: Tensor, lengths: list[int]) -> RowPlan:
    """The same rows in another order."""
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(order_R.shape[0], device=order_R.device)
    position_TK = plan.position_TK
    moved_TK = place_R[position_TK.clamp(min=0)]
    return dataclasses.replace(
        plan, source_R=plan.source_R.index_select(0, order_R), counts=RowCounts(lengths),
        position_TK=torch.where(position_TK < 0, position_TK, moved_TK))
