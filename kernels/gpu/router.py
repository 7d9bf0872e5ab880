"""route_top_k and its gradient in Triton.

A tile of tokens by all experts is in registers, and k argmax passes run over it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.gpu.common import INTERPRETED

EPS = torch.finfo(torch.float32).eps


@triton.jit
def top_k_kernel(logits, mask, chosen, ids, weights, lse_out, importance, sums, tokens, experts,
                 K: tl.constexpr, GIVEN: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr,
                 BT: tl.constexpr, BE: tl.constexpr):
    """importance: [programs, E], sums: [programs, 2] (z, entropy): partial sums.

    The caller adds them in a fixed order.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = ((t < tokens)[:, None] & (e < experts)[None, :]) != 0
    x = tl.load(logits + t.to(tl.int64)[:, None] * experts + e[None, :], mask=inside,
                other=-float("inf"))
    # a harmless row past the end
    x = tl.where((t < tokens)[:, None], x, tl.where(e[None, :] == 0, 0.0, -float("inf")))
    top = tl.max(x, 1)
    grown = tl.exp(x - top[:, None])
    total = tl.sum(grown, 1)
    p = grown / total[:, None]
    lse = top + tl.log(total)
    real = tl.load(mask + t, mask=t < tokens, other=0).to(tl.float32)
    tl.store(lse_out + t, lse, mask=t < tokens)
    tl.store(importance + tl.program_id(0) * experts + e, tl.sum(p * real[:, None], 0), mask=e
             < experts)
    tl.store(sums + tl.program_id(0) * 2, tl.sum(real * lse * lse, 0))
    spread = tl.sum(p * tl.where(p > 0, x, 0.0), 1)
    tl.store(sums + tl.program_id(0) * 2 + 1, tl.sum(real * (lse - spread), 0))
    left = tl.where((e < experts)[None, :], p, -1.0)
    order = tl.full([BT, BE], -1, tl.int32)  # which choice an expert is
    chosen_sum = tl.zeros([BT], tl.float32)
    for j in range(K):
        if GIVEN:
            best = tl.load(chosen + t * K + j, mask=t < tokens, other=0).to(tl.int32)
        else:
            largest = tl.max(left, 1)
            # of equal scores the lower index
            best = tl.min(tl.where(left == largest[:, None], e[None, :], BE), 1)
        hit = e[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, p, 0.0), 1)
        left = tl.where(hit, -2.0, left)
        order = tl.where(hit, j, order)
        chosen_sum += value
        tl.store(ids + t * K + j, best.to(tl.int64), mask=t < tokens)
        if not NORMALIZE:
            tl.store(weights + t * K + j, value, mask=t < tokens)
    if NORMALIZE:
        for j in range(K):
            value = tl.sum(tl.where(order == j, p, 0.0), 1)
            tl.store(weights + t * K + j, value / tl.maximum(chosen_sum, EPS), mask=t < tokens)


@triton.jit
def top_k_backward_kernel(logits, mask, ids, weights, lse_in, grad_weights, grad_importance, grad_z,
                          out, tokens, experts, K: tl.constexpr, NORMALIZE: tl.constexpr,
                          EPS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr):
    """See route_top_k_backward."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = ((t < tokens)[:, None] & (e < experts)[None, :]) != 0
    at = t.to(tl.int64)[:, None] * experts + e[None, :]
    lse = tl.load(lse_in + t, mask=t < tokens, other=0.0)
    p = tl.exp(tl.load(logits + at, mask=inside, other=-float("inf")) - lse[:, None])
    real = tl.load(mask + t, mask=t < tokens, other=0).to(tl.float32)
    g = real[:, None] * tl.load(grad_importance + e, mask=e < experts, other=0.0)[None, :]
    pull = tl.zeros([BT], tl.float32)
    total = tl.zeros([BT], tl.float32)
    if NORMALIZE:
        for j in range(K):
            best = tl.load(ids + t * K + j, mask=t < tokens, other=0).to(tl.int32)
            total += tl.sum(tl.where(e[None, :] == best[:, None], p, 0.0), 1)
            gw = tl.load(grad_weights + t * K + j, mask=t < tokens, other=0.0)
            pull += gw * tl.load(weights + t * K + j, mask=t < tokens, other=0.0)
        pull = tl.where(total > EPS, pull, 0.0)
        total = tl.maximum(total, EPS)
    else:
        total += 1.0
    for j in range(K):
        best = tl.load(ids + t * K + j, mask=t < tokens, other=0).to(tl.int32)
        gw = tl.load(grad_weights + t * K + j, mask=t < tokens, other=0.0)
        g += tl.where(e[None, :] == best[:, None], ((gw - pull) / total)[:, None], 0.0)
    inner = tl.sum(p * g, 1)
    g = p * (g - inner[:, None] + (real * 2.0 * tl.load(grad_z) * lse)[:, None])
    tl.store(out + at, g, mask=inside)


def _tile(experts: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(experts)
    return max(1, min(128, (1 << 17 if INTERPRETED else 1024) // columns)), columns


def route_top_k(logits_TE: Tensor, mask_T: Tensor, chosen_TK: Tensor | None, k: int,
                normalize: bool) -> tuple[Tensor, ...]:
    """See `moe_plugin.kernels.router.route_top_k`."""
    (tokens, experts), device = logits_TE.shape, logits_TE.device
    bt, be = _tile(experts)
    programs = triton.cdiv(tokens, bt)
    ids_TK = torch.empty(tokens, k, dtype=torch.int64, device=device)
    weights_TK, lse_T = torch.empty(tokens, k, device=device), torch.empty(tokens, device=device)
    importance_PE, sums_P2 = torch.empty(programs, experts,
                                         device=device), torch.empty(programs, 2, device=device)
    if programs:
        given = ids_TK if chosen_TK is None else chosen_TK.contiguous()
        top_k_kernel[(programs,)](logits_TE.contiguous(), mask_T.contiguous(), given, ids_TK,
                                  weights_TK, lse_T, importance_PE, sums_P2, tokens, experts, k,
                                  chosen_TK is not None, normalize, EPS, bt, be)
    z, entropy = sums_P2.sum(0).unbind(0)
    return ids_TK, weights_TK, lse_T, importance_PE.sum(0), z, entropy


def route_top_k_backward(logits_TE: Tensor, mask_T: Tensor, ids_TK: Tensor, weights_TK: Tensor,
                         lse_T: Tensor, grad_weights_TK: Tensor, grad_importance_E: Tensor,
                         grad_z: Tensor, normalize: bool) -> Tensor:
    """See `moe_plugin.kernels.router.route_top_k_backward`."""
    (tokens, experts), k = logits_TE.shape, ids_TK.shape[1]
    out_TE = torch.empty(tokens, experts, device=logits_TE.device)
    bt, be = _tile(experts)
    if tokens:
        top_k_backward_kernel[(triton.cdiv(
            tokens, bt),)](logits_TE.contiguous(), mask_T.contiguous(), ids_TK, weights_TK, lse_T,
                           grad_weights_TK.contiguous(), grad_importance_E.contiguous(),
                           grad_z.reshape(1).contiguous(), out_TE, tokens, experts, k, normalize,
                           EPS, bt, be)
    return out_TE
