"""What the stand-ins share: tokens once to every rank with one of their experts, and back, over
torch.distributed on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def everyone(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


@dataclass
class Way:
    """The way of one call's tokens: which of mine go to which rank, how many came from each."""

    group: dist.ProcessGroup
    in_rank_TW: Tensor
    sources: list[int]


def ranks_of(ids_TK: Tensor, experts: int, ranks: int) -> Tensor:
    """bool [T, W]: whether a rank has an expert of a token. ids: -1, none."""
    chosen_TE = torch.zeros(len(ids_TK), experts + 1, dtype=torch.bool)
    chosen_TE.scatter_(1, ids_TK.masked_fill(ids_TK < 0, experts), True)
    return chosen_TE[:, :experts].view(len(ids_TK), ranks, experts // ranks).any(-1)


def send(group: dist.ProcessGroup, x: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: int
         ) -> tuple[Tensor, Tensor, Tensor, list[int], Way]:
    """(tokens, local experts or -1, weights, rows of each local expert, way)"""
    rank, local = group.rank(), experts // group.size()
    in_rank_TW = ranks_of(ids_TK, experts, group.size())
    xs, ids, weights, sources = [], [], [], []
    for their_x, their_ids, their_weights, theirs_TW in everyone(
            group, (x, ids_TK, weights_TK, in_rank_TW)):
        mine_T = theirs_TW[:, rank]
        mine_TK = their_ids - rank * local
        mine_TK = mine_TK.masked_fill((mine_TK < 0) | (mine_TK >= local) | (their_ids < 0), -1)
        xs.append(their_x[mine_T])
        ids.append(mine_TK[mine_T])
        weights.append(their_weights.masked_fill(mine_TK < 0, 0)[mine_T])
        sources.append(int(mine_T.sum()))
    ids_RK = torch.cat(ids)
    counts = torch.bincount(ids_RK[ids_RK >= 0], minlength=local).tolist()
    return torch.cat(xs), ids_RK, torch.cat(weights), counts, Way(group, in_rank_TW, sources)


def send_again(x: Tensor, way: Way) -> Tensor:
    return torch.cat([their_x[theirs_TW[:, way.group.rank()]] for their_x, theirs_TW in
                      everyone(way.group, (x, way.in_rank_TW))])


def send_back(x: Tensor, weights: Tensor | None, way: Way) -> tuple[Tensor, Tensor | None]:
    assert len(x) == sum(way.sources)
    each = everyone(way.group, (x, weights, way.sources))
    return (_sum([one[0] for one in each], each, way),
            None if weights is None else _sum([one[1] for one in each], each, way))


def _sum(rows: list[Tensor], each: list[Any], way: Way) -> Tensor:
    """Each token's rows from the ranks that had it, added up in float32 or better."""
    dtype = torch.promote_types(rows[0].dtype, torch.float32)
    total = torch.zeros(len(way.in_rank_TW), rows[0].shape[1], dtype=dtype)
    for rank, (theirs, (_, _, sources)) in enumerate(zip(rows, each, strict=True)):
        total[way.in_rank_TW[:, rank]] += theirs.split(sources)[way.group.rank()].to(dtype)
    return total.to(rows[0].dtype)


class Event:
    """What an operation that ends later gives: until it is waited for, its results are not there.

    They are NaN until then, so that what is read too early shows.
    """

    def __init__(self, *results: Tensor | None) -> None:
        self.kept = [(x.detach(), x.clone()) for x in results if x is not None]
        for x, _ in self.kept:
            x.fill_(torch.nan)

    def current_stream_wait(self) -> None:
        for x, value in self.kept:
            x.copy_(value)
        self.kept = []
