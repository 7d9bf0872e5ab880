"""Grouped matmuls over rows in Triton, fused with the gathering of rows and the activation.

Rows are gathered while they are loaded, and the activation is applied before the output is stored.
A tile consists of BM rows of one group, and BN columns. `tile_table` creates a table on the device
with the group and the first row of each tile. As many programs are launched as can run at once.
Together they process the tiles of all groups. On GPUs with TMA, weights and rows that are not
gathered are copied tile by tile. Sums are computed in float32 in a fixed order, so repeated runs
give the same output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.gpu.tilings import activate, activation_grad

# TMA descriptors let the GPU copy tiles of a tensor, if Triton and the tensor allow it.
try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.4
    TensorDescriptor = None


def row_tiles(x_RI: Tensor, tile: Sequence[int]) -> Any:
    """Return a TMA descriptor for rows [R, I] and tiles of shape `tile`, or None if unsupported."""
    return _made(x_RI, tile)


def weight_tiles(w_LIO: Tensor, depth: int, columns: int) -> tuple[Any, bool]:
    """Return (TMA descriptor or None, whether the memory is transposed) for weights [L, I, O].

    The tiles are [1, depth, columns]. If the weights are a transposed view of memory [L, O, I], the
    tiles are [1, columns, depth].
    """
    if w_LIO.stride(2) == 1:
        return _made(w_LIO, (1, depth, columns)), False
    return _made(w_LIO.transpose(1, 2), (1, columns, depth)), True


def _made(x: Tensor, tile: Sequence[int]) -> Any:
    """Create a TMA descriptor, or return None if TMA cannot be used. TMA requires 16-byte alignment
    of addresses and strides, and a contiguous last axis.
    """
    step = 16 // x.element_size()
    if TensorDescriptor is None or x.numel() == 0 or x.stride(-1) != 1 or x.data_ptr() % 16:
        return None
    if any(stride % step or stride == 0 for stride in x.stride()[:-1]):
        return None
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(tile))


def copies_tiles(tensor: Tensor, chip_copies: bool) -> bool:
    """Return true if TMA descriptors can be used: the GPU has TMA, and values have 2 or 4 bytes."""
    return chip_copies and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def tile_at(t, columns, rows_of_tiles, GROUP: tl.constexpr):
    """Return the indices (row tile, column tile) of tile t.

    Consecutive tiles use the same columns for up to GROUP row tiles, so that the weights stay in
    the L2 cache.
    """
    # Without groups, each row tile would read all weights from memory again.
    width = GROUP * columns
    first = (t // width) * GROUP
    size = tl.minimum(rows_of_tiles - first, GROUP)
    return first + (t % width) % size, (t % width) // size


@triton.jit
def rows_at(pm, token, tile_group, tile_row, ends, GATHER: tl.constexpr, BM: tl.constexpr):
    """Return (group, first row, rows r, inside, at, live) for the row tile pm.

    inside: mask of those rows r that belong to the group.
    at, live: for each row r, index of the row of x that is read, and whether this row exists.
    """
    group = tl.load(tile_group + pm)
    first = tl.load(tile_row + pm)
    r = first + tl.arange(0, BM)
    inside = r < tl.load(ends + group)
    at = r.to(tl.int64)
    live = inside
    if GATHER:
        at = tl.load(token + r, mask=inside, other=-1).to(tl.int64)
        live = at >= 0
    return group, first, r, inside, at, live


@triton.jit
def load_rows(x, x_tiles, first, at, live, start, K: tl.constexpr, BK: tl.constexpr):
    """Load a tile [BM, BK] of x [., K], starting at column `start`.

    Tiles that are copied with TMA may contain rows of the next group. The rows of the next group
    affect only output rows that are not stored.
    """
    if x_tiles is None:
        k = start + tl.arange(0, BK)
        a = tl.load(x + at[:, None] * K + k[None, :], mask=(live[:, None] & (k < K)[None, :]) != 0,
                    other=0.0)
    else:
        a = x_tiles.load([first, start])
    return a


@triton.jit
def load_weights(w, w_tiles, group, start, column, wide, stride_group, stride_k, stride_n,
                 K: tl.constexpr, TRANSPOSED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Load a tile [BK, BN] of one group's weights w [L, K, wide], with zeros outside of w."""
    if w_tiles is None:
        k = start + tl.arange(0, BK)
        n = column + tl.arange(0, BN)
        # The start of the tile needs 64 bits. Offsets inside the tile use 32 bits, because 64-bit
        # offsets would spill registers.
        corner = w + group.to(tl.int64) * stride_group + tl.cast(
            start, tl.int64) * stride_k + column.to(tl.int64) * stride_n
        b = tl.load(corner + tl.arange(0, BK)[:, None] * stride_k +
                    tl.arange(0, BN)[None, :] * stride_n,
                    mask=((k < K)[:, None] & (n < wide)[None, :]) != 0, other=0.0)
    elif TRANSPOSED:
        b = tl.trans(tl.reshape(w_tiles.load([group, column, start]), (BN, BK)))
    else:
        b = tl.reshape(w_tiles.load([group, start, column]), (BK, BN))
    return b


@triton.jit
def multiply(a, b, total, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Return `total + a @ b`."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def accumulate(total, x, x_tiles, first, at, live, w, w_tiles, group, column, wide, stride_group,
               stride_k, stride_n, K: tl.constexpr, TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr,
               PRECISION: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Return `total + rows @ w`, float32 [BM, BN]. Rows outside the mask `live` count as zero."""
    for start in range(0, K, BK):
        a = load_rows(x, x_tiles, first, at, live, start, K, BK)
        b = load_weights(w, w_tiles, group, start, column, wide, stride_group, stride_k, stride_n,
                         K, TRANSPOSED, BN, BK)
        total = multiply(a, b, total, UPCAST, PRECISION)
    return total


@triton.jit
def accumulate_two(total, second, x, x_tiles, first, at, live, w, w_tiles, v, v_tiles, group,
                   column, wide, stride_group, stride_k, stride_n, K: tl.constexpr,
                   TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr):
    """Return `(total + x @ w, second + x @ v)`. The rows of x are loaded only once."""
    for start in range(0, K, BK):
        a = load_rows(x, x_tiles, first, at, live, start, K, BK)
        b = load_weights(w, w_tiles, group, start, column, wide, stride_group, stride_k, stride_n,
                         K, TRANSPOSED, BN, BK)
        total = multiply(a, b, total, UPCAST, PRECISION)
        c = load_weights(v, v_tiles, group, start, column, wide, stride_group, stride_k, stride_n,
                         K, TRANSPOSED, BN, BK)
        second = multiply(a, c, second, UPCAST, PRECISION)
    return total, second


@triton.jit
def with_bias(total, bias, group, n, wide, BIAS: tl.constexpr):
    """Add the bias of the group to `total`."""
    if BIAS:
        total += tl.load(bias + group * wide + n, mask=n < wide, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Return the left columns and the right columns of x [BM, BN]."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def finish(total, second, column, bias, v_bias, out, gate, after, group, tile, inside, wide,
           BIAS: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr,
           BC: tl.constexpr):
    """Store BC columns of a matmul's output and of the outputs that are computed from it."""
    n = column + tl.arange(0, BC)
    # Offsets inside the tile use 32 bits; 64-bit offsets would spill registers.
    where = tl.arange(0, BM)[:, None] * wide + n[None, :]
    written = (inside[:, None] & (n < wide)[None, :]) != 0
    # Backward reads the rounded values, so the activation uses them too.
    rounded = with_bias(total, bias, group, n, wide, BIAS).to(out.dtype.element_ty)
    tl.store(out + tile + where, rounded, mask=written)
    if PAIR == "gate":
        opening = with_bias(second, v_bias, group, n, wide, BIAS).to(gate.dtype.element_ty)
        tl.store(gate + tile + where, opening, mask=written)
        value = activate(opening.to(tl.float32), ACT) * rounded.to(tl.float32)
        tl.store(after + tile + where, value.to(after.dtype.element_ty), mask=written)
    elif ACT != "none":
        value = activate(rounded.to(tl.float32), ACT)
        tl.store(after + tile + where, value.to(after.dtype.element_ty), mask=written)


@triton.jit
def finish_parts(total, second, column, bias, v_bias, out, gate, after, group, tile, inside, wide,
                 BIAS: tl.constexpr, PAIR: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr,
                 BC: tl.constexpr, SPLIT: tl.constexpr):
    """Call `finish` for the BC columns, either once or once for each half."""
    if SPLIT == 2:
        total, right = halves(total, BM, BC)
        second, second_right = halves(second, BM, BC)
        finish(total, second, column, bias, v_bias, out, gate, after, group, tile, inside, wide,
               BIAS, PAIR, ACT, BM, BC // 2)
        finish(right, second_right, column + BC // 2, bias, v_bias, out, gate, after, group, tile,
               inside, wide, BIAS, PAIR, ACT, BM, BC // 2)
    else:
        finish(total, second, column, bias, v_bias, out, gate, after, group, tile, inside, wide,
               BIAS, PAIR, ACT, BM, BC)


@triton.jit
def product_tile(t, x, x_tiles, y, y_tiles, token, w, w_tiles, v, v_tiles, bias, v_bias, out, gate,
                 after, tile_group, tile_row, tiles, ends, wide, stride_group, stride_k, stride_n,
                 K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, PAIR: tl.constexpr,
                 ACT: tl.constexpr, TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr,
                 PRECISION: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                 BK: tl.constexpr):
    """Compute tile t of `product_kernel`."""
    pm, pn = tile_at(t, tl.cdiv(wide, BN), tiles, 8)
    group, first, r, inside, at, live = rows_at(pm, token, tile_group, tile_row, ends, GATHER, BM)
    column = pn * BN
    tile = first.to(tl.int64) * wide
    total = tl.zeros([BM, BN], tl.float32)
    if PAIR == "gate":
        second = tl.zeros([BM, BN], tl.float32)
        total, second = accumulate_two(total, second, x, x_tiles, first, at, live, w, w_tiles, v,
                                       v_tiles, group, column, wide, stride_group, stride_k,
                                       stride_n, K, TRANSPOSED, UPCAST, PRECISION, BN, BK)
    else:
        total = accumulate(total, x, x_tiles, first, at, live, w, w_tiles, group, column, wide,
                           stride_group, stride_k, stride_n, K, TRANSPOSED, UPCAST, PRECISION, BN,
                           BK)
        if PAIR == "sum":
            total = accumulate(total, y, y_tiles, first, at, live, v, v_tiles, group, column, wide,
                               stride_group, stride_k, stride_n, K, TRANSPOSED, UPCAST, PRECISION,
                               BN, BK)
        second = total
    if BN >= 128:
        # Stored in halves, because the values computed from a whole tile would spill registers.
        total, total_right = halves(total, BM, BN)
        second, second_right = halves(second, BM, BN)
        finish_parts(total, second, column, bias, v_bias, out, gate, after, group, tile, inside,
                     wide, BIAS, PAIR, ACT, BM, BN // 2, SPLIT)
        finish_parts(total_right, second_right, column + BN // 2, bias, v_bias, out, gate, after,
                     group, tile, inside, wide, BIAS, PAIR, ACT, BM, BN // 2, SPLIT)
    else:
        finish_parts(total, second, column, bias, v_bias, out, gate, after, group, tile, inside,
                     wide, BIAS, PAIR, ACT, BM, BN, SPLIT)


@triton.jit
def product_kernel(x, x_tiles, y, y_tiles, token, w, w_tiles, v, v_tiles, bias, v_bias, out, gate,
                   after, tile_group, tile_row, used, ends, wide, stride_group, stride_k, stride_n,
                   K: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, PAIR: tl.constexpr,
                   ACT: tl.constexpr, TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr,
                   PRECISION: tl.constexpr, SPLIT: tl.constexpr, WHILE: tl.constexpr,
                   FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr):
    """Compute `out = x[token] @ w + bias`. PAIR and ACT select further outputs.

    "none": if ACT is set, also compute `after = act(out)`. "gate": compute
    `gate = x[token] @ v + v_bias` and `after = act(gate) * out`. "sum": compute `out += y @ v`. The
    tensors w and v are [L, K, wide] and have equal strides. The arguments with `tiles` in their
    names are TMA descriptors of these tensors, or None. For FLATTEN, see `tilings.Tiling`; for
    SPLIT and SPECIALIZE, see `kernels.groups`.
    """
    tiles = tl.load(used)
    number = tiles * tl.cdiv(wide, BN)
    # Some versions of the interpreter reject a range with bounds known only at run time.
    if WHILE:
        t = tl.program_id(0)
        while t < number:
            product_tile(t, x, x_tiles, y, y_tiles, token, w, w_tiles, v, v_tiles, bias, v_bias,
                         out, gate, after, tile_group, tile_row, tiles, ends, wide, stride_group,
                         stride_k, stride_n, K, GATHER, BIAS, PAIR, ACT, TRANSPOSED, UPCAST,
                         PRECISION, SPLIT, BM, BN, BK)
            t += tl.num_programs(0)
    elif FLATTEN:  # Triton 3.2 does not support these keywords
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0), flatten=True,
                          warp_specialize=SPECIALIZE):
            product_tile(t, x, x_tiles, y, y_tiles, token, w, w_tiles, v, v_tiles, bias, v_bias,
                         out, gate, after, tile_group, tile_row, tiles, ends, wide, stride_group,
                         stride_k, stride_n, K, GATHER, BIAS, PAIR, ACT, TRANSPOSED, UPCAST,
                         PRECISION, SPLIT, BM, BN, BK)
    else:
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0)):
            product_tile(t, x, x_tiles, y, y_tiles, token, w, w_tiles, v, v_tiles, bias, v_bias,
                         out, gate, after, tile_group, tile_row, tiles, ends, wide, stride_group,
                         stride_k, stride_n, K, GATHER, BIAS, PAIR, ACT, TRANSPOSED, UPCAST,
                         PRECISION, SPLIT, BM, BN, BK)


@triton.jit
def finish_backward(u, column, scale_r, h, gate, grad_h, grad_gate, after, tile, inside, wide,
                    ACT: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Store BC columns of the gradients and of the scaled activation, and return row-wise products.

    The gradient of the output weight needs only the scaled activation. The row-wise dot products
    are computed from u and the unscaled activation.
    """
    n = column + tl.arange(0, BC)
    # Offsets inside the tile use 32 bits; 64-bit offsets would spill registers.
    where = tl.arange(0, BM)[:, None] * wide + n[None, :]
    written = (inside[:, None] & (n < wide)[None, :]) != 0
    s = u * scale_r[:, None]
    if GATED:
        before = tl.load(gate + tile + where, mask=written, other=0.0).to(tl.float32)
        open_ = activate(before, ACT)
        tl.store(grad_h + tile + where, (s * open_).to(grad_h.dtype.element_ty), mask=written)
        # Loaded late, because one more live tile would spill registers.
        mine = tl.load(h + tile + where, mask=written, other=0.0).to(tl.float32)
        grad_inner = s * mine * activation_grad(before, ACT)
        tl.store(grad_gate + tile + where, grad_inner.to(grad_gate.dtype.element_ty), mask=written)
        value = open_ * mine
    else:
        mine = tl.load(h + tile + where, mask=written, other=0.0).to(tl.float32)
        value = activate(mine, ACT)
        grad_inner = s * activation_grad(mine, ACT)
        tl.store(grad_h + tile + where, grad_inner.to(grad_h.dtype.element_ty), mask=written)
    # Rounded, because the forward pass multiplied the rounded value by the last weight.
    value = value.to(after.dtype.element_ty).to(tl.float32)
    scaled = value * scale_r[:, None]
    tl.store(after + tile + where, scaled.to(after.dtype.element_ty), mask=written)
    return tl.sum(tl.where(written, u * value, 0.0), 1)


@triton.jit
def act_backward_tile(t, grad, grad_tiles, token, scale, w, w_tiles, h, gate, grad_h, grad_gate,
                      after, dots, tile_group, tile_row, tiles, ends, wide, rows, stride_group,
                      stride_k, stride_n, K: tl.constexpr, GATHER: tl.constexpr,
                      SCALED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
                      TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Compute tile t of `act_backward_kernel`."""
    pm, pn = tile_at(t, tl.cdiv(wide, BN), tiles, 8)
    group, first, r, inside, at, live = rows_at(pm, token, tile_group, tile_row, ends, GATHER, BM)
    column = pn * BN
    u = accumulate(tl.zeros([BM, BN], tl.float32), grad, grad_tiles, first, at, live, w, w_tiles,
                   group, column, wide, stride_group, stride_k, stride_n, K, TRANSPOSED, UPCAST,
                   PRECISION, BN, BK)
    tile = first.to(tl.int64) * wide
    scale_r = tl.full([BM], 1.0, tl.float32)
    if SCALED:
        scale_r = tl.load(scale + r, mask=inside, other=0.0).to(tl.float32)
    if BN >= 64:
        # Halves already from 64 columns, because this epilogue has more live values than `finish`.
        u, right = halves(u, BM, BN)
        dot = finish_backward(u, column, scale_r, h, gate, grad_h, grad_gate, after, tile, inside,
                              wide, ACT, GATED, BM, BN // 2)
        dot += finish_backward(right, column + BN // 2, scale_r, h, gate, grad_h, grad_gate, after,
                               tile, inside, wide, ACT, GATED, BM, BN // 2)
    else:
        dot = finish_backward(u, column, scale_r, h, gate, grad_h, grad_gate, after, tile, inside,
                              wide, ACT, GATED, BM, BN)
    # A partial sum per column tile, because atomic additions would have no fixed order.
    tl.store(dots + pn.to(tl.int64) * rows + r, dot, mask=inside)


@triton.jit
def act_backward_kernel(grad, grad_tiles, token, scale, w, w_tiles, h, gate, grad_h, grad_gate,
                        after, dots, tile_group, tile_row, used, ends, wide, rows, stride_group,
                        stride_k, stride_n, K: tl.constexpr, GATHER: tl.constexpr,
                        SCALED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
                        TRANSPOSED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
                        WHILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                        BK: tl.constexpr):
    """Compute `expert_matmul_act_backward`.

    dots: tensor [column tiles, R] with one partial sum per column tile.
    """
    tiles = tl.load(used)
    number = tiles * tl.cdiv(wide, BN)
    if WHILE:
        t = tl.program_id(0)
        while t < number:
            act_backward_tile(t, grad, grad_tiles, token, scale, w, w_tiles, h, gate, grad_h,
                              grad_gate, after, dots, tile_group, tile_row, tiles, ends, wide,
                              rows, stride_group, stride_k, stride_n, K, GATHER, SCALED, ACT, GATED,
                              TRANSPOSED, UPCAST, PRECISION, BM, BN, BK)
            t += tl.num_programs(0)
    else:
        for t in tl.range(tl.program_id(0), number, tl.num_programs(0)):
            act_backward_tile(t, grad, grad_tiles, token, scale, w, w_tiles, h, gate, grad_h,
                              grad_gate, after, dots, tile_group, tile_row, tiles, ends, wide,
                              rows, stride_group, stride_k, stride_n, K, GATHER, SCALED, ACT, GATED,
                              TRANSPOSED, UPCAST, PRECISION, BM, BN, BK)
