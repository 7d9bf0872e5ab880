"""Weight and bias gradients of grouped rows in Triton: rows^T (scale * gradient rows) by group.

One list of tiles of all groups' matrices, worked through by as many programs as run at once. Where
one group has most of the rows, its sum is cut into parts, each by another program; a second kernel
adds the parts in their order, so the result is the same every time.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def operand(x, x_tiles, token, r, end, first, start, c, WIDTH: tl.constexpr, GATHER: tl.constexpr,
            MASKED: tl.constexpr):
    """[BR, BC] of rows r and columns c of x, zeros outside."""
    if x_tiles is None or MASKED:
        inside = r < end
        at = r.to(tl.int64)
        if GATHER:
            at = tl.load(token + r, mask=inside, other=-1).to(tl.int64)
            inside = at >= 0
        a = tl.load(x + at[:, None] * WIDTH + c[None, :],
                    mask=(inside[:, None] & (c < WIDTH)[None, :]) != 0, other=0.0)
    else:
        a = x_tiles.load([first, start])
    return a


@triton.jit
def add_rows(total, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, first, end, column_i,
             column_o, I: tl.constexpr, O: tl.constexpr, X_GATHER: tl.constexpr,
             G_GATHER: tl.constexpr, SCALED: tl.constexpr, UPCAST: tl.constexpr,
             PRECISION: tl.constexpr, MASKED: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
             BR: tl.constexpr):
    """total + x[rows]^T (scale * grad[rows]) for BR rows from `first`."""
    r = first + tl.arange(0, BR)
    a = operand(x, x_tiles, x_token, r, end, first, column_i, column_i + tl.arange(0, BI), I,
                X_GATHER, MASKED)
    g = operand(grad, grad_tiles, grad_token, r, end, first, column_o, column_o + tl.arange(0, BO),
                O, G_GATHER, MASKED)
    if SCALED:
        # the left operand may come from registers, the right one has to be in shared memory
        a = (a.to(tl.float32) * tl.load(scale + r, mask=r < end, other=0.0).to(
            tl.float32)[:, None]).to(grad.dtype.element_ty)
    if UPCAST:
        a, g = a.to(tl.float32), g.to(tl.float32)
    return tl.dot(tl.trans(a), g, total, input_precision=PRECISION)


@triton.jit
def weight_tile(t, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, out, parts, part_group,
                part_row, ends, lengths, height, I: tl.constexpr, O: tl.constexpr,
                X_GATHER: tl.constexpr, G_GATHER: tl.constexpr, SCALED: tl.constexpr,
                UPCAST: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
                CUT: tl.constexpr, WHILE: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
                BR: tl.constexpr):
    """Tile number t of `weight_kernel`."""
    tiles_o: tl.constexpr = (O + BO - 1) // BO
    tiles: tl.constexpr = ((I + BI - 1) // BI) * tiles_o
    part = t // tiles
    column_i = ((t % tiles) // tiles_o) * BI
    column_o = ((t % tiles) % tiles_o) * BO
    i = column_i + tl.arange(0, BI)
    o = column_o + tl.arange(0, BO)
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
    whole = start + (end - start) // BR * BR
    if WHILE:
        first = start
        while first < whole:
            total = add_rows(total, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, first,
                             end, column_i, column_o, I, O, X_GATHER, G_GATHER, SCALED, UPCAST,
                             PRECISION, False, BI, BO, BR)
            first += BR
    else:
        for first in tl.range(start, whole, BR):
            total = add_rows(total, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, first,
                             end, column_i, column_o, I, O, X_GATHER, G_GATHER, SCALED, UPCAST,
                             PRECISION, False, BI, BO, BR)
    if whole < end:
        # a copied tile would hold rows of the next group
        total = add_rows(total, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, whole,
                         end, column_i, column_o, I, O, X_GATHER, G_GATHER, SCALED, UPCAST,
                         PRECISION, True, BI, BO, BR)
    where = i.to(tl.int64)[:, None] * O + o[None, :]
    written = ((i < I)[:, None] & (o < O)[None, :]) != 0
    direct = True
    if CUT:
        direct = length <= height
        slot = 2 * (start // height) + (end == group_end).to(tl.int32)
        if not direct:
            tl.store(parts + slot.to(tl.int64) * I * O + where, total, mask=written)
    if direct:
        mine = out + group.to(tl.int64) * I * O + where
        if ADD:
            total += tl.load(mine, mask=written, other=0.0).to(tl.float32)
        tl.store(mine, total.to(out.dtype.element_ty), mask=written)


@triton.jit
def weight_kernel(x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, out, parts, part_group,
                  part_row, used, ends, lengths, height, groups, I: tl.constexpr, O: tl.constexpr,
                  X_GATHER: tl.constexpr, G_GATHER: tl.constexpr, SCALED: tl.constexpr,
                  UPCAST: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
                  CUT: tl.constexpr, WHILE: tl.constexpr, BI: tl.constexpr, BO: tl.constexpr,
                  BR: tl.constexpr):
    """out[group] = rows^T (scale * grad rows), or with ADD out[group] += it.

    CUT: a group of more than `height` rows is cut into parts by the table part_group, part_row,
    whose sums go to parts[slot], float32 [slots, I, O]: slot 2 * (first row // height), plus 1 for
    the last part of a group. No two parts share one: all but the last have `height` rows, and last
    parts are further apart.
    """
    tiles: tl.constexpr = ((I + BI - 1) // BI) * ((O + BO - 1) // BO)
    number = groups * tiles
    if CUT:
        number = tl.load(used) * tiles
    if WHILE:
        t = tl.program_id(0)
        while t < number:
            weight_tile(t, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, out, parts,
                        part_group, part_row, ends, lengths, height, I, O, X_GATHER, G_GATHER,
                        SCALED, UPCAST, PRECISION, ADD, CUT, WHILE, BI, BO, BR)
            t += tl.num_programs(0)
    else:
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0)):
            weight_tile(t, x, x_tiles, grad, grad_tiles, x_token, grad_token, scale, out, parts,
                        part_group, part_row, ends, lengths, height, I, O, X_GATHER, G_GATHER,
                        SCALED, UPCAST, PRECISION, ADD, CUT, WHILE, BI, BO, BR)


@triton.jit
def join_kernel(parts, out, ends, lengths, height, size, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """out[group] = the sum of its parts in their order, or with ADD += it; see `weight_kernel`.

    size: I * O, values of one matrix.
    """
    group = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + group)
    length = tl.load(lengths + group).to(tl.int32)
    if length > height:
        first = end - length
        total = tl.zeros([BLOCK], tl.float32)
        while first < end:
            slot = 2 * (first // height) + (first + height >= end).to(tl.int32)
            total += tl.load(parts + slot.to(tl.int64) * size + at, mask=at < size, other=0.0)
            first += height
        mine = out + group.to(tl.int64) * size + at
        if ADD:
            total += tl.load(mine, mask=at < size, other=0.0).to(tl.float32)
        tl.store(mine, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def bias_grad_kernel(grad, token, scale, out, ends, lengths, wide, GATHER: tl.constexpr,
                     SCALED: tl.constexpr, BR: tl.constexpr, BO: tl.constexpr):
    """out[group] = sum of the group's (scaled) gradient rows."""
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
