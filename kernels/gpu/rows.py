"""The operations `take_rows`, `sum_rows`, `dot_rows`, `take_values`, `transpose_chunks`,
`write_pages`, `read_pages`, `running_count`, `sorted_choices` and `choice_load` in Triton.

Each kernel reads every needed row once and writes each output once. Sums are computed in the order
of choices. Only pages of values that have a slot are copied. The pages in host memory are pinned,
and the kernels access them over the PCIe bus or a similar link. The device decides which runs of
values are stored in host memory. The host does not wait for this decision. When choices are
counted, each choice is compared only with the earlier choices in its block, so that no tensor of
size [N, E] is needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.gpu.tilings import INTERPRETED, row_tile

BLOCK = 2048


@triton.jit
def chunk_kernel(x, out, OUTER, INNER, length, BLOCK: tl.constexpr):
    """Copy chunk (o, i) of x to chunk (i, o) of out. A chunk consists of `length` values."""
    chunk = tl.program_id(1)  # chunk of the output
    o = chunk % OUTER
    i = chunk // OUTER
    # Positions use the first axis of the grid, the only long one: chunks may be long, but are few.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + (o * INNER + i).to(tl.int64) * length + at, mask=at < length, other=0.0)
    tl.store(out + chunk.to(tl.int64) * length + at, value, mask=at < length)


def transpose_chunks(x: Tensor, outer: int, inner: int) -> Tensor:
    """Transpose chunks in Triton; see `moe_plugin.kernels.groups.transpose_chunks`."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    length = x.numel() // (outer * inner)
    if length:
        chunk_kernel[triton.cdiv(length, BLOCK), outer * inner](x, out, outer, inner, length, BLOCK)
    return out


@triton.jit
def take_kernel(x, source, weights, out, rows, width, K: tl.constexpr, WEIGHTED: tl.constexpr,
                BR: tl.constexpr, BD: tl.constexpr):
    """Compute `out[r] = weights[source r] * x[source r // K]`, or 0 if the source is -1."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    # Offsets of rows use 64 bits in all kernels below, because rows * width may exceed 32 bits.
    choice = tl.load(source + r, mask=r < rows, other=-1)
    inside = ((choice >= 0)[:, None] & (d < width)[None, :]) != 0
    value = tl.load(x + (choice // K).to(tl.int64)[:, None] * width + d[None, :], mask=inside,
                    other=0.0)
    if WEIGHTED:
        scale = tl.load(weights + choice, mask=choice >= 0, other=0.0).to(tl.float32)
        value = value.to(tl.float32) * scale[:, None]
    written = ((r < rows)[:, None] & (d < width)[None, :]) != 0
    tl.store(out + r.to(tl.int64)[:, None] * width + d[None, :], value.to(out.dtype.element_ty),
             mask=written)


@triton.jit
def sum_kernel(rows_ptr, position, weights, out, tokens, width, K: tl.constexpr,
               WEIGHTED: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Compute `out[t] = sum_j weights[t, j] * rows[position[t, j]]`. The sum is computed in
    float32, in the order of j.

    Choices that have no row are skipped.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BT, BD], tl.float32)
    for j in tl.static_range(K):
        row = tl.load(position + t * K + j, mask=t < tokens, other=-1)
        inside = ((row >= 0)[:, None] & (d < width)[None, :]) != 0
        value = tl.load(rows_ptr + row.to(tl.int64)[:, None] * width + d[None, :], mask=inside,
                        other=0.0).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + t * K + j, mask=t < tokens, other=0.0).to(
                tl.float32)[:, None]
        total += value
    written = ((t < tokens)[:, None] & (d < width)[None, :]) != 0
    tl.store(out + t.to(tl.int64)[:, None] * width + d[None, :], total.to(out.dtype.element_ty),
             mask=written)


@triton.jit
def dot_kernel(grad, rows_ptr, position, out, tokens, WIDTH: tl.constexpr, K: tl.constexpr,
               BT: tl.constexpr, BD: tl.constexpr):
    """Compute `out[t, j] = <grad[t], rows[position[t, j]]>`, or 0 if there is no row."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    for j in tl.static_range(K):
        row = tl.load(position + t * K + j, mask=t < tokens, other=-1)
        total = tl.zeros([BT], tl.float32)
        for start in range(0, WIDTH, BD):
            d = start + tl.arange(0, BD)
            inside = ((row >= 0)[:, None] & (d < WIDTH)[None, :]) != 0
            a = tl.load(rows_ptr + row.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=inside,
                        other=0.0).to(tl.float32)
            b = tl.load(grad + t.to(tl.int64)[:, None] * WIDTH + d[None, :], mask=inside,
                        other=0.0).to(tl.float32)
            total += tl.sum(a * b, 1)
        tl.store(out + t * K + j, total, mask=t < tokens)


@triton.jit
def value_kernel(values, index, out, number, length, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute `out[m] = sum_c values[c, index[m]]`, or 0 if the index is -1. number: number of
    elements in each row `values[c]`.
    """
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + m, mask=m < length, other=-1)
    total = tl.load(values + at, mask=at >= 0, other=0.0)
    for _ in range(1, PARTS):
        values += number  # advancing the pointer avoids part * number, which may exceed 32 bits
        total += tl.load(values + at, mask=at >= 0, other=0.0)
    tl.store(out + m, total, mask=m < length)


def take_rows(x_TD: Tensor, source_R: Tensor, top_k: int, weights_TK: Tensor | None,
              complete: bool = False) -> Tensor:
    """Gather rows in Triton; see `moe_plugin.kernels.rows.take_rows`."""
    rows, width = source_R.numel(), x_TD.shape[1]
    out_RD = x_TD.new_empty(rows, width)
    if x_TD.shape[0] == 0 or rows == 0:
        return out_RD.zero_()
    br, bd = row_tile(width)
    weights = x_TD if weights_TK is None else weights_TK.contiguous()
    take_kernel[triton.cdiv(rows, br),
                triton.cdiv(width, bd)](x_TD.contiguous(), source_R.contiguous(), weights, out_RD,
                                        rows, width, top_k, weights_TK is not None, br, bd)
    return out_RD


def sum_rows(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None,
             complete: bool = False) -> Tensor:
    """Sum rows in Triton; see `moe_plugin.kernels.rows.sum_rows`."""
    (tokens, k), width = position_TK.shape, rows_RD.shape[1]
    out_TD = rows_RD.new_empty(tokens, width)
    if rows_RD.shape[0] == 0 or tokens == 0:
        return out_TD.zero_()
    bt, bd = row_tile(width)
    weights = rows_RD if weights_TK is None else weights_TK.contiguous()
    sum_kernel[triton.cdiv(tokens, bt),
               triton.cdiv(width, bd)](rows_RD.contiguous(), position_TK.contiguous(), weights,
                                       out_TD, tokens, width, k, weights_TK is not None, bt, bd)
    return out_TD


def take_values(values_CN: Tensor, index: Tensor) -> Tensor:
    """Gather values in Triton; see `moe_plugin.kernels.rows.take_values`."""
    out, (parts, number) = values_CN.new_empty(index.shape), values_CN.shape
    if index.numel():
        block = 1 << 12 if INTERPRETED else 256
        value_kernel[(triton.cdiv(index.numel(), block),)](
            values_CN.contiguous(), index.contiguous(), out, number, index.numel(), parts, block)
    return out


def dot_rows(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor,
             complete: bool = False) -> Tensor:
    """Compute row-wise dot products in Triton; see `moe_plugin.kernels.rows.dot_rows`."""
    (tokens, k), width = position_TK.shape, rows_RD.shape[1]
    out_TK = torch.empty(tokens, k, dtype=torch.float32, device=rows_RD.device)
    if rows_RD.shape[0] == 0 or tokens == 0:
        return out_TK.zero_()
    bt, bd = row_tile(width)
    dot_kernel[(triton.cdiv(tokens, bt),)](grad_TD.contiguous(), rows_RD.contiguous(),
                                           position_TK.contiguous(), out_TK, tokens, width, k, bt,
                                           bd)
    return out_TK


@triton.jit
def write_kernel(x, record, pages, host, length, size, slots, BLOCK: tl.constexpr):
    """Copy block j of run i of x to the slot of the run."""
    # Runs and blocks share one grid axis, because the other axes are limited to 65,535.
    blocks = tl.cdiv(size, BLOCK)
    run = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A vector, because some versions cannot combine a scalar condition with a vector.
    slot = tl.load(record + run) + at * 0
    source = run.to(tl.int64) * size + at
    inside = at < size
    value = tl.load(x + source, mask=(inside & (source < length) & (slot >= 0)) != 0, other=0.0)
    here = (inside & (slot >= 0) & (slot < slots)) != 0
    tl.store(pages + slot * size + at, value, mask=here)
    tl.store(host + (slot - slots) * size + at, value, mask=(inside & (slot >= slots)) != 0)


@triton.jit
def read_kernel(out, record, pages, host, enough, length, size, slots, BLOCK: tl.constexpr):
    """Copy block j of run i from its slot to `out`. If the run has no slot, `out` is not changed.
    If `enough` is false, the kernel writes NaN.
    """
    # Runs and blocks share one grid axis, because the other axes are limited to 65,535.
    blocks = tl.cdiv(size, BLOCK)
    run = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # A vector, because some versions cannot combine a scalar condition with a vector.
    slot = tl.load(record + run) + at * 0
    target = run.to(tl.int64) * size + at
    inside = ((at < size) & (target < length)) != 0
    here = (inside & (slot >= 0) & (slot < slots)) != 0
    there = (inside & (slot >= slots)) != 0
    value = tl.load(pages + slot * size + at, mask=here, other=0.0)
    on_host = tl.load(host + (slot - slots) * size + at, mask=there, other=0.0)
    value = tl.where(there, on_host, value)
    lost = tl.load(enough) == 0
    # A tensor, because Triton 3.8's interpreter cannot create scalars in bfloat16.
    value = tl.where(lost, tl.full(value.shape, float("nan"), tl.float32).to(value.dtype), value)
    tl.store(out + target, value, mask=(inside & ((slot >= 0) | lost)) != 0)


def write_pages(x_N: Tensor, record_M: Tensor, pages_SP: Tensor, host_SP: Tensor) -> Tensor:
    """Copy runs to their slots in Triton; see `moe_plugin.kernels.groups.write_pages`."""
    size = pages_SP.shape[1]
    if x_N.shape[0]:
        write_kernel[(record_M.shape[0] * triton.cdiv(size, BLOCK),)](
            x_N.contiguous(), record_M, pages_SP, host_SP, x_N.shape[0], size,
            pages_SP.shape[0] - 1, BLOCK)
    return pages_SP[:-1]


def read_pages(record_M: Tensor, pages_SP: Tensor, host_SP: Tensor, length: int,
               enough: Tensor) -> Tensor:
    """Copy runs from their slots in Triton; see `moe_plugin.kernels.groups.read_pages`."""
    size, x_N = pages_SP.shape[1], pages_SP.new_empty(length)
    if length:
        read_kernel[(record_M.shape[0] * triton.cdiv(size, BLOCK),)](
            x_N, record_M, pages_SP, host_SP, enough, length, size, pages_SP.shape[0] - 1, BLOCK)
    return x_N


IDS = 256  # of a block
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
    """Compute `ranks[n]`, the number of choices before choice n that have the same id, or -1 if the
    id is -1.

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
    """For each choice n, add 1 to `load[n % K, ids[n]]`. Atomic additions of integers give the same
    result in any order.
    """
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
    blocks, ids_N = triton.cdiv(number, IDS), ids_N.contiguous()
    # Blocks are the last axis, because torch's cumsum is 30 times as fast there as along the first.
    counts_EB = torch.zeros(experts, blocks, dtype=torch.int32, device=device)
    histogram_kernel[(blocks,)](ids_N, counts_EB, number, experts, IDS)
    through_EB = counts_EB.cumsum(1, dtype=torch.int32)
    rank_kernel[(blocks,)](ids_N, counts_EB, through_EB, ranks_N, source_N, count_E, number,
                           experts, is_sorted, IDS, STEP)
    return source_N, ranks_N, count_E


def choice_load(ids_TK: Tensor, experts: int) -> Tensor:
    """Count the load in Triton; see `moe_plugin.kernels.choices.choice_load`."""
    choices, number = ids_TK.shape[1], ids_TK.numel()
    load_KE = torch.zeros(choices, experts, dtype=torch.int64, device=ids_TK.device)
    if number:
        load_kernel[(triton.cdiv(number, IDS),)](ids_TK.contiguous(), load_KE, number, experts,
                                                   choices, IDS)
    return load_KE
