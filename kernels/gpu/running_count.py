"""`running_count`, `sorted_choices` and `choice_load` in Triton, which process blocks of choices.

Each choice is compared only with the earlier choices in its block, so that no tensor of size [N, E]
is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
STEP = 32  # number of choices with which a block is compared at once


@triton.jit
def expert_of(ids, n, number, experts):
    """Return `ids[n]`, or -1 if n is beyond the last choice.

    Ids that are not valid experts are treated as -1, so that the kernels never write outside the
    output tensors. The caller must check that the ids are valid.
    """
    mine = tl.load(ids + n, mask=n < number, other=-1)
    return tl.where(mine < experts, mine, -1).to(tl.int32)


@triton.jit
def histogram_kernel(ids, counts, number, experts, BLOCK: tl.constexpr):
    """For each expert e, count the choices in this block and store the count in `counts[e, block]`.

    Atomic additions of integers give the same result in any order, so the counts are deterministic.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = expert_of(ids, n, number, experts)
    tl.atomic_add(counts + mine * tl.num_programs(0) + tl.program_id(0), 1, mask=mine >= 0)


@triton.jit
def rank_kernel(ids, counts, through, ranks, source, count_out, number, EXPERTS: tl.constexpr,
                SORTED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Compute `ranks[n]`, the number of earlier choices with the id of choice n, or -1 for id -1.

    If SORTED is true, `ranks[n]` is the row of choice n, and `source[row] = n`, or -1 beyond the
    last row.
    through: tensor [E, blocks] with cumulative counts up to and including each block.
    """
    block = tl.program_id(0)
    first = block * BLOCK
    n = first + tl.arange(0, BLOCK)
    mine = expert_of(ids, n, number, EXPERTS)
    blocks = tl.num_programs(0)
    # Occurrences in the blocks before: the running total minus the count of this block.
    at = mine * blocks + block
    rank = tl.load(through + at, mask=mine >= 0, other=0) - tl.load(counts + at, mask=mine >= 0,
                                                                    other=0)
    # In steps, because a tile of BLOCK x BLOCK comparisons would not fit into registers.
    for start in range(0, BLOCK, STEP):
        m = first + start + tl.arange(0, STEP)
        other = tl.load(ids + m, mask=m < number, other=-1).to(tl.int32)
        same = ((other[None, :] == mine[:, None]) & (m[None, :] < n[:, None])) != 0
        rank += tl.sum(same.to(tl.int32), 1)
    total = tl.sum(tl.zeros([STEP], tl.int32), 0)  # number of rows of the experts before
    for start in range(0, EXPERTS, STEP):
        e = start + tl.arange(0, STEP)
        count = tl.load(through + e * blocks + blocks - 1, mask=e < EXPERTS, other=0)
        # Only the first program stores the counts, which are the same in all programs.
        tl.store(count_out + e, count.to(tl.int64), mask=e + block * EXPERTS < EXPERTS)
        if SORTED:
            before = total + tl.cumsum(count, 0) - count
            rank += tl.sum(tl.where(mine[:, None] == e[None, :], before[None, :], 0), 1)
            total += tl.sum(count, 0)
    if SORTED:
        tl.store(source + n, (n * 0 - 1).to(tl.int64), mask=((n >= total) & (n < number)) != 0)
        tl.store(source + rank, n.to(tl.int64), mask=mine >= 0)
    rank = tl.where(mine >= 0, rank, -1)
    tl.store(ranks + n, rank.to(tl.int64), mask=n < number)


@triton.jit
def load_kernel(ids, load, number, experts, K: tl.constexpr, BLOCK: tl.constexpr):
    """For each choice n, add 1 to `load[n % K, ids[n]]`, in any order."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = expert_of(ids, n, number, experts)
    tl.atomic_add(load + (n % K) * experts + mine, 1, mask=mine >= 0)


def running_count(ids_N: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Count in Triton; see `moe_plugin.kernels.choices.running_count`."""
    _, ranks_N, count_E = _ranks(ids_N, experts, False)
    return ranks_N, count_E


def sorted_choices(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices in Triton; see `moe_plugin.kernels.choices.sorted_choices`."""
    source_N, position_N, count_E = _ranks(ids_TK.reshape(-1), experts, True)
    return source_N, position_N.view(ids_TK.shape), count_E


def _ranks(ids_N: Tensor, experts: int, is_sorted: bool) -> tuple[Tensor, Tensor, Tensor]:
    number, device = ids_N.numel(), ids_N.device
    ranks_N = torch.empty(number, dtype=torch.int64, device=device)
    source_N = torch.empty_like(ranks_N) if is_sorted else ranks_N
    if number == 0:
        return source_N, ranks_N, torch.zeros(experts, dtype=torch.int64, device=device)
    count_E = torch.empty(experts, dtype=torch.int64, device=device)
    blocks, ids_N = triton.cdiv(number, BLOCK), ids_N.contiguous()
    # Blocks are the last axis, because torch's cumsum is 30 times as fast there as along the first.
    counts_EB = torch.zeros(experts, blocks, dtype=torch.int32, device=device)
    histogram_kernel[(blocks,)](ids_N, counts_EB, number, experts, BLOCK)
    through_EB = counts_EB.cumsum(1, dtype=torch.int32)
    rank_kernel[(blocks,)](ids_N, counts_EB, through_EB, ranks_N, source_N, count_E, number,
                           experts, is_sorted, BLOCK, STEP)
    return source_N, ranks_N, count_E


def choice_load(ids_TK: Tensor, experts: int) -> Tensor:
    """Count the load in Triton; see `moe_plugin.kernels.choices.choice_load`."""
    choices, number = ids_TK.shape[1], ids_TK.numel()
    load_KE = torch.zeros(choices, experts, dtype=torch.int64, device=ids_TK.device)
    if number:
        load_kernel[(triton.cdiv(number, BLOCK),)](ids_TK.contiguous(), load_KE, number, experts,
                                                   choices, BLOCK)
    return load_KE
