"""running_count in Triton: two passes over blocks of choices, one expert at a time.

No tensor is [N, E].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def histogram_kernel(ids, counts, number, experts, BLOCK: tl.constexpr):
    """counts[block, e]: how often e occurs in the block."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(ids + n, mask=n < number, other=-1).to(tl.int32)
    e = 0
    while e < experts:
        tl.store(counts + tl.program_id(0) * experts + e, tl.sum((mine == e).to(tl.int32), 0))
        e += 1


@triton.jit
def rank_kernel(ids, before, ranks, number, experts, BLOCK: tl.constexpr):
    """ranks[n] = before[block, id] + occurrences of id earlier in the block; -1 for id -1."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(ids + n, mask=n < number, other=-1).to(tl.int32)
    rank = tl.full([BLOCK], -1, tl.int32)
    e = 0
    while e < experts:
        here = (mine == e).to(tl.int32)
        earlier = tl.cumsum(here, 0) - here + tl.load(before + tl.program_id(0) * experts + e)
        rank = tl.where(here != 0, earlier, rank)
        e += 1
    tl.store(ranks + n, rank.to(tl.int64), mask=n < number)


def running_count(ids_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """See `moe_plugin.kernels.slot_index.running_count`."""
    number = ids_N.numel()
    ranks_N = torch.empty(number, dtype=torch.int64, device=ids_N.device)
    if number == 0:
        return ranks_N, torch.zeros(experts, dtype=torch.int64, device=ids_N.device)
    blocks = triton.cdiv(number, BLOCK)
    ids_N = ids_N.contiguous()
    counts_BE = torch.empty(blocks, experts, dtype=torch.int32, device=ids_N.device)
    histogram_kernel[(blocks,)](ids_N, counts_BE, number, experts, BLOCK)
    through_BE = counts_BE.cumsum(0, dtype=torch.int32)
    rank_kernel[(blocks,)](ids_N, through_BE - counts_BE, ranks_N, number, experts, BLOCK)
    return ranks_N, through_BE[-1].to(torch.int64)
