"""running_count in Triton: two passes over blocks of choices.

No tensor is [N, E], and no kernel loops over experts: within a block every choice is compared with
the earlier ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
STEP = 32  # choices that a block is compared with at once


@triton.jit
def histogram_kernel(ids, counts, number, experts, BLOCK: tl.constexpr):
    """counts[block, e] += how often e occurs in the block; whole numbers add up in any order."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(ids + n, mask=n < number, other=-1).to(tl.int32)
    tl.atomic_add(counts + tl.program_id(0) * experts + mine, 1, mask=mine >= 0)


@triton.jit
def rank_kernel(ids, before, ranks, number, experts, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """ranks[n] = before[block, id] + occurrences of id earlier in the block; -1 for id -1."""
    first = tl.program_id(0) * BLOCK
    n = first + tl.arange(0, BLOCK)
    mine = tl.load(ids + n, mask=n < number, other=-1).to(tl.int32)
    rank = tl.load(before + tl.program_id(0) * experts + mine, mask=mine >= 0, other=0)
    for start in range(0, BLOCK, STEP):
        m = first + start + tl.arange(0, STEP)
        other = tl.load(ids + m, mask=m < number, other=-1).to(tl.int32)
        same = ((other[None, :] == mine[:, None]) & (m[None, :] < n[:, None])) != 0
        rank += tl.sum(same.to(tl.int32), 1)
    rank = tl.where(mine >= 0, rank, -1)
    tl.store(ranks + n, rank.to(tl.int64), mask=n < number)


def running_count(ids_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """See `moe_plugin.kernels.choices.running_count`."""
    number = ids_N.numel()
    ranks_N = torch.empty(number, dtype=torch.int64, device=ids_N.device)
    if number == 0:
        return ranks_N, torch.zeros(experts, dtype=torch.int64, device=ids_N.device)
    blocks = triton.cdiv(number, BLOCK)
    ids_N = ids_N.contiguous()
    counts_BE = torch.zeros(blocks, experts, dtype=torch.int32, device=ids_N.device)
    histogram_kernel[(blocks,)](ids_N, counts_BE, number, experts, BLOCK)
    through_BE = counts_BE.cumsum(0, dtype=torch.int32)
    rank_kernel[(blocks,)](ids_N, through_BE - counts_BE, ranks_N, number, experts, BLOCK, STEP)
    return ranks_N, through_BE[-1].to(torch.int64)
