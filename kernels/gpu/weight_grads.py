"""Weight and bias gradients of grouped rows in Triton, computed as `rows^T @ grad_rows` for each
group.

The tiles of all matrices form one list. As many programs are launched as can run at once. Together
they process all tiles in the list. If most of the rows belong to one group, the sum over this
group's rows is split into parts, which several programs compute. A second kernel adds the parts in
a fixed order, so repeated runs give the same gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_plugin.kernels.gpu.grouped_gemm import halves, tile_at


@triton.jit
def operand(x, x_tiles, token, r, end, first, start, c, WIDTH: tl.constexpr, GATHER: tl.constexpr,
            MASKED: tl.constexpr):
    """Load [BR, BC] values of x at the rows r and columns c. Elements outside of x are zero."""
    if x_tiles is None or MASKED:
        inside = r < end
        at = r.to(tl.int64)
        if GATHER:
            if MASKED:
                at = tl.load(token + r, mask=inside, other=-1).to(tl.int64)
            else:  # all rows are inside; Triton 3.2 cannot pipeline a load with mask and default
                at = tl.load(token + r).to(tl.int64)
            inside = at >= 0
        a = tl.load(x + at[:, None] * WIDTH + c[None, :],
                    mask=(inside[:, None] & (c < WIDTH)[None, :]) != 0, other=0.0)
    else:
        a = x_tiles.load([first, start])
    return a


@triton.jit
def add_rows(total, second, x, x_tiles, grad, grad_tiles, also, also_tiles, x_token, grad_token,
             first, end, column_i, column_o, I: tl.constexpr, O: tl.constexpr,
             X_GATHER: tl.constexpr, G_GATHER: tl.constexpr, PAIR: tl.constexpr,
             UPCAST: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, BI: tl.constexpr,
             BO: tl.constexpr, BR: tl.constexpr):
    """Add `x[rows]^T @ grad[rows]` to `total` for the BR rows that start at row `first`. With PAIR,
    also add the product for the second gradient of the same rows to `second`.
    """
    r = first + tl.arange(0, BR)
    a = operand(x, x_tiles, x_token, r, end, first, column_i, column_i + tl.arange(0, BI), I,
                X_GATHER, MASKED)
    o = column_o + tl.arange(0, BO)
    g = operand(grad, grad_tiles, grad_token, r, end, first, column_o, o, O, G_GATHER, MASKED)
    if UPCAST:
        a, g = a.to(tl.float32), g.to(tl.float32)
    total = tl.dot(tl.trans(a), g, total, input_precision=PRECISION)
    if PAIR:
        h = operand(also, also_tiles, grad_token, r, end, first, column_o, o, O, G_GATHER, MASKED)
        if UPCAST:
            h = h.to(tl.float32)
        second = tl.dot(tl.trans(a), h, second, input_precision=PRECISION)
    return total, second


@triton.jit
def store_sum(total, out, parts, i, column_o, group, slot, direct, I: tl.constexpr,
              O: tl.constexpr, ADD: tl.constexpr, CUT: tl.constexpr, BI: tl.constexpr,
              BC: tl.constexpr):
    """Store BC columns (at most 256) of an output tile, or of a tile of a partial sum."""
    # Stored in halves, because the values that a whole tile is added to would spill registers. Two
    # functions, because recursion is not supported before Triton 3.3.
    if ADD and BC > 128:
        left, right = halves(total, BI, BC)
        store_half(left, out, parts, i, column_o, group, slot, direct, I, O, ADD, CUT, BI, BC // 2)
        store_half(right, out, parts, i, column_o + BC // 2, group, slot, direct, I, O, ADD, CUT,
                   BI, BC // 2)
    else:
        store_half(total, out, parts, i, column_o, group, slot, direct, I, O, ADD, CUT, BI, BC)


@triton.jit
def store_half(total, out, parts, i, column_o, group, slot, direct, I: tl.constexpr,
               O: tl.constexpr, ADD: tl.constexpr, CUT: tl.constexpr, BI: tl.constexpr,
               BC: tl.constexpr):
    """Store half of a tile; see `store_sum`."""
    if ADD and BC > 64:
        left, right = halves(total, BI, BC)
        store_columns(left, out, parts, i, column_o + tl.arange(0, BC // 2), group, slot, direct, I,
                      O, ADD, CUT)
        store_columns(right, out, parts, i, column_o + BC // 2 + tl.arange(0, BC // 2), group, slot,
                      direct, I, O, ADD, CUT)
    else:
        store_columns(total, out, parts, i, column_o + tl.arange(0, BC), group, slot, direct, I, O,
                      ADD, CUT)


@triton.jit
def store_columns(total, out, parts, i, o, group, slot, direct, I: tl.constexpr, O: tl.constexpr,
                  ADD: tl.constexpr, CUT: tl.constexpr):
    """Store some columns of a tile; see `store_sum`."""
    size: tl.constexpr = I * O
    where = i.to(tl.int64)[:, None] * O + o[None, :]
    written = ((i < I)[:, None] & (o < O)[None, :]) != 0
    if CUT:
        if not direct:
            tl.store(parts + slot.to(tl.int64) * size + where, total, mask=written)
    if direct:
        mine = out + group.to(tl.int64) * size + where
        if ADD:
            total += tl.load(mine, mask=written, other=0.0).to(tl.float32)
        tl.store(mine, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def weight_tile(t, x, x_tiles, grad, grad_tiles, also, also_tiles, x_token, grad_token, out,
                also_out, parts, also_parts, part_group, part_row, ends, lengths, height,
                I: tl.constexpr, O: tl.constexpr, X_GATHER: tl.constexpr, G_GATHER: tl.constexpr,
                PAIR: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
                ADD: tl.constexpr, CUT: tl.constexpr, WHILE: tl.constexpr, BI: tl.constexpr,
                BO: tl.constexpr, BR: tl.constexpr):
    """Compute tile t of `weight_kernel`."""
    tiles_o: tl.constexpr = (O + BO - 1) // BO
    tiles: tl.constexpr = ((I + BI - 1) // BI) * tiles_o
    part = t // tiles
    # Neighbouring tiles run at the same time, so that they share columns of both operands in L2.
    row, column = tile_at(t % tiles, tiles_o, tiles // tiles_o, 8)
    column_i, column_o = row * BI, column * BO
    i = column_i + tl.arange(0, BI)
    group = part
    if CUT:
        group = tl.load(part_group + part)
    group_end = tl.load(ends + group)
    length = tl.load(lengths + group).to(tl.int32)
    start = group_end - length
    end = group_end
    if CUT:
        start = tl.load(part_row + part)
        end = tl.minimum(start + height, group_end)
    total = tl.zeros([BI, BO], tl.float32)
    second = total
    # The loop covers full blocks without a mask; the last, partial block follows with a mask.
    whole = start + (end - start) // BR * BR
    if WHILE:
        first = start
        while first < whole:
            total, second = add_rows(total, second, x, x_tiles, grad, grad_tiles, also, also_tiles,
                                     x_token, grad_token, first, end, column_i, column_o, I, O,
                                     X_GATHER, G_GATHER, PAIR, UPCAST, PRECISION, False, BI, BO, BR)
            first += BR
    else:
        for first in tl.range(start, whole, BR):
            total, second = add_rows(total, second, x, x_tiles, grad, grad_tiles, also, also_tiles,
                                     x_token, grad_token, first, end, column_i, column_o, I, O,
                                     X_GATHER, G_GATHER, PAIR, UPCAST, PRECISION, False, BI, BO, BR)
    if whole < end:
        # Masked loads and not a copied tile, which would contain rows of the next group.
        total, second = add_rows(total, second, x, x_tiles, grad, grad_tiles, also, also_tiles,
                                 x_token, grad_token, whole, end, column_i, column_o, I, O,
                                 X_GATHER, G_GATHER, PAIR, UPCAST, PRECISION, True, BI, BO, BR)
    direct = True
    slot = part
    if CUT:
        direct = length <= height
        slot = 2 * (start // height) + (end == group_end).to(tl.int32)
    store_sum(total, out, parts, i, column_o, group, slot, direct, I, O, ADD, CUT, BI, BO)
    if PAIR:
        store_sum(second, also_out, also_parts, i, column_o, group, slot, direct, I, O, ADD, CUT,
                  BI, BO)


@triton.jit
def weight_kernel(x, x_tiles, grad, grad_tiles, also, also_tiles, x_token, grad_token, out,
                  also_out, parts, also_parts, part_group, part_row, used, ends, lengths, height,
                  groups, I: tl.constexpr, O: tl.constexpr, X_GATHER: tl.constexpr,
                  G_GATHER: tl.constexpr, PAIR: tl.constexpr, UPCAST: tl.constexpr,
                  PRECISION: tl.constexpr, ADD: tl.constexpr, CUT: tl.constexpr,
                  WHILE: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr):
    """Compute `out[group] = rows^T @ grad_rows` or, with ADD, `out[group] += rows^T @ grad_rows`.

    With PAIR, also compute `also_out` from `also`. The rows are loaded only once.

    With CUT, a group of more than `height` rows is split into the parts that the table (part_group,
    part_row) lists. The sums of the parts are stored in `parts[slot]`, float32 [slots, I, O]. The
    slot is `2 * (first row // height)`, plus 1 for the last part of a group. No two parts share a
    slot: all parts except the last part of a group have `height` rows, and the first rows of any
    two last parts are at least `height` rows apart.
    """
    tiles: tl.constexpr = ((I + BI - 1) // BI) * ((O + BO - 1) // BO)
    number = groups * tiles
    if CUT:
        number = tl.load(used) * tiles
    if WHILE:
        t = tl.program_id(0)
        while t < number:
            weight_tile(t, x, x_tiles, grad, grad_tiles, also, also_tiles, x_token, grad_token, out,
                        also_out, parts, also_parts, part_group, part_row, ends, lengths, height, I,
                        O, X_GATHER, G_GATHER, PAIR, UPCAST, PRECISION, ADD, CUT, WHILE, BI, BO, BR)
            t += tl.num_programs(0)
    else:
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0)):
            weight_tile(t, x, x_tiles, grad, grad_tiles, also, also_tiles, x_token, grad_token, out,
                        also_out, parts, also_parts, part_group, part_row, ends, lengths, height, I,
                        O, X_GATHER, G_GATHER, PAIR, UPCAST, PRECISION, ADD, CUT, WHILE, BI, BO, BR)


@triton.jit
def join_block(parts, out, at, group, end, length, height, size, ADD: tl.constexpr):
    """Add the partial sums of the elements `at` of one group's matrix, in a fixed order."""
    first = end - length
    total = (at * 0).to(tl.float32)
    while first < end:
        # The same slots as in `weight_tile`.
        slot = 2 * (first // height) + (first + height >= end).to(tl.int32)
        total += tl.load(parts + slot.to(tl.int64) * size + at, mask=at < size, other=0.0)
        first += height
    mine = out + group.to(tl.int64) * size + at
    if ADD:
        total += tl.load(mine, mask=at < size, other=0.0).to(tl.float32)
    tl.store(mine, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def join_kernel(parts, also_parts, out, also_out, ends, lengths, height, size, groups,
                PAIR: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, BL: tl.constexpr):
    """Compute `out[group]` as the sum of its parts in a fixed order. With ADD, add the sum of the
    parts to `out[group]`; see `weight_kernel`.

    Only a few groups are split, so the blocks of these groups are divided among all programs.
    size: number of values in one matrix, I * O.
    """
    # Every program reads the lengths of all groups to find those that are cut, because only the
    # device knows the lengths.
    l = tl.arange(0, BL)
    cut = tl.load(lengths + l, mask=l < groups, other=0).to(tl.int32) > height
    place = tl.cumsum(cut.to(tl.int32), 0)
    blocks = tl.cdiv(size, BLOCK)
    number = tl.sum(cut.to(tl.int32), 0) * blocks
    t = tl.program_id(0)
    while t < number:
        group = tl.sum(tl.where((cut & (place == t // blocks + 1)) != 0, l, 0), 0)
        at = (t % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        end = tl.load(ends + group)
        length = tl.load(lengths + group).to(tl.int32)
        join_block(parts, out, at, group, end, length, height, size, ADD)
        if PAIR:
            join_block(also_parts, also_out, at, group, end, length, height, size, ADD)
        t += tl.num_programs(0)


@triton.jit
def bias_grad_kernel(grad, token, scale, out, ends, lengths, wide, GATHER: tl.constexpr,
                     SCALED: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr):
    """Compute `out[group]`, the sum of the gradient rows of the group.

    If there are scales, each row is first multiplied by its scale.
    """
    group = tl.program_id(1)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    end = tl.load(ends + group)
    first = end - tl.load(lengths + group).to(tl.int32)
    total = tl.zeros([BO], tl.float32)
    while first < end:
        r = first + tl.arange(0, BR)
        inside = r < end
        at = r.to(tl.int64)
        if GATHER:
            at = tl.load(token + r, mask=inside, other=-1).to(tl.int64)
        g = tl.load(grad + at[:, None] * wide + o[None, :],
                    mask=((inside & (at >= 0))[:, None] & (o < wide)[None, :]) != 0, other=0.0)
        g = g.to(tl.float32)
        if SCALED:
            g = g * tl.load(scale + r, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(g, 0)
        first += BR
    tl.store(out + group * wide + o, total.to(out.dtype.element_ty), mask=o < wide)
