"""Grouped matmuls in Triton: gather while loading, activation and its gradient before storing.

A tile is BM rows of one group times BN columns; a table says which group and which rows, so that no
tile spans two groups and one launch computes all groups. Sums are float32 in one order: the result
is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from moe_plugin.kernels.gpu.common import INTERPRETED, activate, activation_grad

BM = 64 if INTERPRETED else 128  # rows of a tile; the table of tiles is made for it
# search spaces, without configurations that spill by the compiler's report (bench kernels)
SPACE = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4), (64, 64, 4, 4)]  # BN, BK, warps, stages
BACKWARD_SPACE = [(64, 64, 8, 3), (64, 64, 8, 4), (64, 32, 8, 4)]
# BI, BO, BR, warps, stages
WEIGHT_SPACE = [(128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 128, 32, 4, 4),
                (64, 128, 64, 4, 4)]
# the tile added to is a second one in registers: larger configurations spill
WEIGHT_ADD_SPACE = [(128, 128, 64, 8, 3), (64, 128, 64, 4, 4)]


def _tuned(space: list[tuple[int, ...]], names: tuple[str, ...], key: list[str],
           zeroed: tuple[str, ...] = (), restored: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    if INTERPRETED:
        # timing several configurations needs a driver; launches pass one
        return lambda kernel: kernel
    configs = [
        triton.Config(dict(zip(names, values[:-2], strict=True)), num_warps=values[-2],
                      num_stages=values[-1]) for values in space
    ]
    return triton.autotune(configs, key=key, reset_to_zero=list(zeroed),
                           restore_value=list(restored),
                           prune_configs_by={"early_config_prune": first_if_deterministic})


def first_if_deterministic(configs: list, *_: object, **__: object) -> list:
    """Only the first configuration where torch is to be deterministic.

    Other tiles add in another order, and the measured times would choose among them.
    """
    return configs[:1] if torch.are_deterministic_algorithms_enabled() else configs


@triton.jit
def tile_at(columns, rows_of_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of this program.

    GROUP row tiles go through the columns together, so that weights stay in L2.
    """
    pid = tl.program_id(0)
    width = GROUP * columns
    first = (pid // width) * GROUP
    size = tl.minimum(rows_of_tiles - first, GROUP)
    return first + (pid % width) % size, (pid % width) // size


@triton.jit
def rows_at(pm, token, tile_group, tile_row, ends, GATHER: tl.constexpr, BM: tl.constexpr):
    """Of row tile pm: (group, first row, rows r, inside, at, live).

    inside: which r are in the group. at: the rows of x that they take. live: which of these exist.
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
def accumulate(x, at, live, w, n, wide, K: tl.constexpr, stride_k, stride_n, UPCAST: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """float32 [BM, BN]: rows `at` of x [., K] times w [K, N]; rows that are not live are zero."""
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + at[:, None] * K + k[None, :], mask=(live[:, None] & (k < K)[None, :]) != 0,
                    other=0.0)
        b = tl.load(w + k[:, None] * stride_k + n[None, :] * stride_n,
                    mask=((k < K)[:, None] & (n < wide)[None, :]) != 0, other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@_tuned(SPACE, ("BN", "BK"), ["wide", "K", "GATHER", "ACT"])
@triton.jit
def matmul_kernel(x, token, w, bias, base, gate, out, after, tile_group, tile_row, ends, tiles,
                   wide, stride_group, stride_k, stride_n, K: tl.constexpr, GATHER: tl.constexpr,
                   BIAS: tl.constexpr, BASE: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
                   UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out = base + x[token] w + bias; with ACT also after = act(out), or act(gate) * out."""
    pm, pn = tile_at(tl.cdiv(wide, BN), tiles, 8)
    group, first, r, inside, at, live = rows_at(pm, token, tile_group, tile_row, ends, GATHER, BM)
    n = pn * BN + tl.arange(0, BN)
    total = accumulate(x, at, live, w + group.to(tl.int64) * stride_group, n, wide, K, stride_k,
                       stride_n, UPCAST, BM, BN, BK)
    if BIAS:
        total += tl.load(bias + group * wide + n, mask=n < wide, other=0.0).to(tl.float32)[None, :]
    tile = first.to(tl.int64) * wide
    # offsets inside the tile take 32 bits; 64 would spill
    where = tl.arange(0, BM)[:, None] * wide + n[None, :]
    written = (inside[:, None] & (n < wide)[None, :]) != 0
    if BASE:
        total += tl.load(base + tile + where, mask=written, other=0.0).to(tl.float32)
    tl.store(out + tile + where, total.to(out.dtype.element_ty), mask=written)
    if ACT != "none":
        # backward will see the rounded value: activate that
        total = total.to(out.dtype.element_ty).to(tl.float32)
        if GATED:
            total = total * activate(
                tl.load(gate + tile + where, mask=written, other=0.0).to(tl.float32), ACT)
        else:
            total = activate(total, ACT)
        tl.store(after + tile + where, total.to(after.dtype.element_ty), mask=written)


@_tuned(BACKWARD_SPACE, ("BN", "BK"), ["wide", "K", "GATED"], ("dots",))
@triton.jit
def matmul_act_backward_kernel(
        grad, token, scale, w, h, gate, grad_h, grad_gate, after, dots, tile_group, tile_row, ends,
        tiles, wide, stride_group, stride_k, stride_n, rows, K: tl.constexpr, GATHER: tl.constexpr,
        SCALED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, UPCAST: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """See expert_matmul_act_backward.

    dots: [column tiles, R], one partial sum per tile; the caller adds them in a fixed order.
    """
    pm, pn = tile_at(tl.cdiv(wide, BN), tiles, 8)
    group, first, r, inside, at, live = rows_at(pm, token, tile_group, tile_row, ends, GATHER, BM)
    n = pn * BN + tl.arange(0, BN)
    u = accumulate(grad, at, live, w + group.to(tl.int64) * stride_group, n, wide, K, stride_k,
                   stride_n, UPCAST, BM, BN, BK)
    tile = first.to(tl.int64) * wide
    # offsets inside the tile take 32 bits; 64 would spill
    where = tl.arange(0, BM)[:, None] * wide + n[None, :]
    written = (inside[:, None] & (n < wide)[None, :]) != 0
    s = u
    if SCALED:
        s = u * tl.load(scale + r, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        before = tl.load(gate + tile + where, mask=written, other=0.0).to(tl.float32)
        open_ = activate(before, ACT)
        tl.store(grad_h + tile + where, (s * open_).to(grad_h.dtype.element_ty), mask=written)
        # loaded only here: one more live tile would spill
        mine = tl.load(h + tile + where, mask=written, other=0.0).to(tl.float32)
        grad_inner = s * mine * activation_grad(before, ACT)
        tl.store(grad_gate + tile + where, grad_inner.to(grad_gate.dtype.element_ty), mask=written)
        value = open_ * mine
    else:
        mine = tl.load(h + tile + where, mask=written, other=0.0).to(tl.float32)
        value = activate(mine, ACT)
        grad_inner = s * activation_grad(mine, ACT)
        tl.store(grad_h + tile + where, grad_inner.to(grad_h.dtype.element_ty), mask=written)
    tl.store(after + tile + where, value.to(after.dtype.element_ty), mask=written)
    tl.store(dots + pn.to(tl.int64) * rows + r, tl.sum(tl.where(written, u * value, 0.0), 1),
             mask=inside)


@triton.jit
def weight_step(x, grad, x_token, grad_token, scale, r, end, i, o, I: tl.constexpr, O: tl.constexpr,
                X_GATHER: tl.constexpr, G_GATHER: tl.constexpr, SCALED: tl.constexpr,
                UPCAST: tl.constexpr, total):
    """total + x[rows r]^T (scale * grad[rows r]) for one block of rows."""
    inside = r < end
    x_at, g_at = r.to(tl.int64), r.to(tl.int64)
    x_live, g_live = inside, inside
    if X_GATHER:
        x_at = tl.load(x_token + r, mask=inside, other=-1).to(tl.int64)
        x_live = x_at >= 0
    if G_GATHER:
        g_at = tl.load(grad_token + r, mask=inside, other=-1).to(tl.int64)
        g_live = g_at >= 0
    a = tl.load(x + x_at[None, :] * I + i[:, None], mask=((i < I)[:, None] & x_live[None, :]) != 0,
                other=0.0)
    g = tl.load(grad + g_at[:, None] * O + o[None, :], mask=(g_live[:, None] & (o < O)[None, :])
                != 0, other=0.0)
    if SCALED:
        g = (g.to(tl.float32) *
             tl.load(scale + r, mask=inside, other=0.0).to(tl.float32)[:, None]).to(
                 grad.dtype.element_ty)
    if UPCAST:
        a, g = a.to(tl.float32), g.to(tl.float32)
    return tl.dot(a, g, total, input_precision="ieee")


@triton.jit
def _weight_grad(x, grad, x_token, grad_token, scale, out, ends, lengths, I: tl.constexpr,
                 O: tl.constexpr, X_GATHER: tl.constexpr, G_GATHER: tl.constexpr,
                 SCALED: tl.constexpr, UPCAST: tl.constexpr, ADD: tl.constexpr, WHILE: tl.constexpr,
                 BI: tl.constexpr, BO: tl.constexpr, BR: tl.constexpr):
    """out[group] = rows^T (scale * grad rows), or with ADD out[group] += it.

    One program per group and tile of the matrix, over the group's rows.
    """
    group = tl.program_id(1)
    tiles_o: tl.constexpr = (O + BO - 1) // BO
    i = (tl.program_id(0) // tiles_o) * BI + tl.arange(0, BI)
    o = (tl.program_id(0) % tiles_o) * BO + tl.arange(0, BO)
    end = tl.load(ends + group)
    start = end - tl.load(lengths + group).to(tl.int32)
    total = tl.zeros([BI, BO], tl.float32)
    # some versions of the interpreter reject a range with bounds known only at run time
    if WHILE:
        first = start
        while first < end:
            total = weight_step(x, grad, x_token, grad_token, scale, first + tl.arange(0, BR), end,
                                i, o, I, O, X_GATHER, G_GATHER, SCALED, UPCAST, total)
            first += BR
    else:
        for first in range(start, end, BR):
            total = weight_step(x, grad, x_token, grad_token, scale, first + tl.arange(0, BR), end,
                                i, o, I, O, X_GATHER, G_GATHER, SCALED, UPCAST, total)
    where = group.to(tl.int64) * I * O + i.to(tl.int64)[:, None] * O + o[None, :]
    written = ((i < I)[:, None] & (o < O)[None, :]) != 0
    if ADD:
        total += tl.load(out + where, mask=written, other=0.0).to(tl.float32)
    tl.store(out + where, total.to(out.dtype.element_ty), mask=written)


_WEIGHT_KEY = ["I", "O", "X_GATHER", "G_GATHER"]
weight_grad_kernel = _tuned(WEIGHT_SPACE, ("BI", "BO", "BR"), _WEIGHT_KEY)(_weight_grad)
# trial launches add, too: the tuner restores the tensor
weight_add_kernel = _tuned(WEIGHT_ADD_SPACE, ("BI", "BO", "BR"), _WEIGHT_KEY,
                           restored=("out",))(_weight_grad)


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
