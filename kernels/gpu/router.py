"""The operation `route_top_k` and its gradient in Triton.

For each tile of tokens, the logits of all experts are kept in registers, and k argmax passes select
the experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_plugin.kernels.gpu.tilings import (
    INTERPRETED,
    ROUTER_REGISTERS_BACKWARD,
    ROUTER_VALUES,
    ROUTER_VALUES_BACKWARD,
    bounded_registers,
    router_tokens,
)
from moe_plugin.kernels.router import Rule
from moe_plugin.kernels.scores import ADDED


@triton.jit
def divisor(total, ADD: tl.constexpr, LEAST: tl.constexpr):
    """Return `max(total + ADD, LEAST)`. NaN stays NaN, as in torch.clamp."""
    raised = total + ADD
    return tl.where(raised < LEAST, LEAST, raised)


@triton.jit
def in_best_groups(left, e, experts, GROUPS: tl.constexpr, TAKE: tl.constexpr, BEST: tl.constexpr,
                   BT: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr):
    """Return each token's scores of the experts in its best groups, and -inf for other experts."""
    size = experts // GROUPS
    g = tl.arange(0, BG)
    scores = tl.full([BT, BG], -float("inf"), tl.float32)
    for number in range(GROUPS):
        mine = ((e // size == number) & (e < experts))[None, :]
        total = tl.zeros([BT], tl.float32)
        if BEST == 0:  # all scores of the group count
            total += tl.sum(tl.where(mine, left, 0.0), 1)
        else:
            rest = tl.where(mine, left, -float("inf"))
            for _ in range(BEST):
                largest = tl.max(rest, 1)
                first = tl.min(tl.where(rest == largest[:, None], e[None, :], BE), 1)
                total += largest
                rest = tl.where(e[None, :] == first[:, None], -float("inf"), rest)
        scores = tl.where(g[None, :] == number, total[:, None], scores)
    allowed = tl.zeros([BT, BE], tl.int32)
    for _ in range(TAKE):
        largest = tl.max(scores, 1)
        best = tl.min(tl.where(scores == largest[:, None], g[None, :], BG), 1)
        scores = tl.where(g[None, :] == best[:, None], -float("inf"), scores)
        allowed = tl.where((e // size)[None, :] == best[:, None], 1, allowed)
    return tl.where(allowed != 0, left, -float("inf"))


@triton.jit
def top_k_kernel(logits, mask, chosen, bias, ids, weights, lse_out, sums, tokens, experts,
                 K: tl.constexpr, MASKED: tl.constexpr, GIVEN: tl.constexpr,
                 BIASED: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
                 GROUPS: tl.constexpr, TAKE: tl.constexpr, BEST: tl.constexpr, ADD: tl.constexpr,
                 LEAST: tl.constexpr, SHARE: tl.constexpr,
                 BT: tl.constexpr, BE: tl.constexpr, BG: tl.constexpr):
    """Compute `route_top_k` for one tile of tokens.

    sums: tensor [programs, E + 2] with each program's partial sums of importance, z and p log p.
    The caller adds the partial sums in a fixed order. BEST: number of scores that are added to
    obtain the score of a group, or 0 for all scores.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = ((t < tokens)[:, None] & (e < experts)[None, :]) != 0
    x = tl.load(logits + t.to(tl.int64)[:, None] * experts + e[None, :], mask=inside,
                other=-float("inf"))
    # Rows past the end get one finite value, because -inf - (-inf) would give NaN below.
    x = tl.where((t < tokens)[:, None], x, tl.where(e[None, :] == 0, 0.0, -float("inf")))
    # Subtracting the largest logit prevents that exp overflows.
    top = tl.max(x, 1)
    grown = tl.exp(x - top[:, None])
    total = tl.sum(grown, 1)
    lse = top + tl.log(total)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
        p = score / divisor(tl.sum(score, 1), SHARE, 0.0)[:, None]
    else:
        score = grown / total[:, None]
        p = score
    real = (t < tokens).to(tl.float32)
    if MASKED:
        real = tl.load(mask + t, mask=t < tokens, other=0).to(tl.float32)
    tl.store(lse_out + t, lse, mask=t < tokens)
    mine = sums + tl.program_id(0) * (experts + 2)
    tl.store(mine + e, tl.sum(p * real[:, None], 0), mask=e < experts)
    tl.store(mine + experts, tl.sum(real * lse * lse, 0))
    # 0 log 0 counts as 0.
    spread = tl.sum(p * tl.log(tl.where(p > 0, p, 1.0)), 1)
    tl.store(mine + experts + 1, tl.sum(real * spread, 0))
    left = score
    if BIASED:
        left += tl.load(bias + e, mask=e < experts, other=0.0).to(tl.float32)[None, :]
    # NaN counts as the largest score, as in torch.argmax. NaN equals no value, so that without this
    # line no expert would be found.
    left = tl.where(left != left, float("inf"), left)
    left = tl.where((e < experts)[None, :], left, -float("inf"))
    if GROUPS > 0:
        left = in_best_groups(left, e, experts, GROUPS, TAKE, BEST, BT, BE, BG)
    order = tl.full([BT, BE], -1, tl.int32)  # the number of the choice for which an expert is used
    chosen_sum = tl.zeros([BT], tl.float32)
    for j in range(K):
        if GIVEN:
            best = tl.load(chosen + t * K + j, mask=t < tokens, other=0).to(tl.int32)
        else:
            largest = tl.max(left, 1)
            # Ties go to the lower index.
            best = tl.min(tl.where(left == largest[:, None], e[None, :], BE), 1)
        hit = e[None, :] == best[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), 1)
        left = tl.where(hit, -float("inf"), left)
        order = tl.where(hit, j, order)
        chosen_sum += value
        tl.store(ids + t * K + j, best.to(tl.int64), mask=t < tokens)
        if not NORMALIZE:
            tl.store(weights + t * K + j, value, mask=t < tokens)
    # A second pass over the choices, because the divisor is known only after the first pass.
    if NORMALIZE:
        for j in range(K):
            value = tl.sum(tl.where(order == j, score, 0.0), 1)
            tl.store(weights + t * K + j, value / divisor(chosen_sum, ADD, LEAST), mask=t < tokens)


@triton.jit
def top_k_backward_kernel(logits, mask, ids, weights, lse_in, grad_weights, grad_importance, grad_z,
                          out, tokens, experts, K: tl.constexpr, MASKED: tl.constexpr,
                          OF_WEIGHTS: tl.constexpr, OF_IMPORTANCE: tl.constexpr,
                          OF_Z: tl.constexpr, NORMALIZE: tl.constexpr, SIGMOID: tl.constexpr,
                          ADD: tl.constexpr, LEAST: tl.constexpr, SHARE: tl.constexpr,
                          BT: tl.constexpr, BE: tl.constexpr):
    """Compute `route_top_k_backward` for one tile of tokens."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = ((t < tokens)[:, None] & (e < experts)[None, :]) != 0
    at = t.to(tl.int64)[:, None] * experts + e[None, :]
    x = tl.load(logits + at, mask=inside, other=-float("inf"))
    lse = tl.load(lse_in + t, mask=t < tokens, other=0.0)
    soft = tl.exp(x - lse[:, None])
    score = soft
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    real = (t < tokens).to(tl.float32)
    if MASKED:
        real = tl.load(mask + t, mask=t < tokens, other=0).to(tl.float32)
    g = tl.zeros([BT, BE], tl.float32)
    if OF_IMPORTANCE:
        p = score
        if SIGMOID:
            p = score / divisor(tl.sum(score, 1), SHARE, 0.0)[:, None]
        pull = p * tl.load(grad_importance + e, mask=e < experts, other=0.0)[None, :]
        g += real[:, None] * (pull - p * tl.sum(pull, 1)[:, None])
        if SIGMOID:
            g *= 1.0 - score
    if OF_WEIGHTS:
        total = tl.zeros([BT], tl.float32)  # sum of the chosen scores
        pulled = tl.zeros([BT], tl.float32)  # sum of each weight times its gradient
        for j in range(K):
            best = tl.load(ids + t * K + j, mask=t < tokens, other=0).to(tl.int32)
            gw = tl.load(grad_weights + t * K + j, mask=t < tokens, other=0.0)
            total += tl.sum(tl.where(e[None, :] == best[:, None], score, 0.0), 1)
            pulled += gw * tl.load(weights + t * K + j, mask=t < tokens, other=0.0)
        shared = tl.zeros([BT], tl.float32)  # part that the divisor subtracts from each choice
        outside = pulled  # part that the softmax subtracts from all logits
        if NORMALIZE:
            raised = total + ADD
            shared = tl.where(raised < LEAST, 0.0, pulled)
            outside = tl.where(raised < LEAST, pulled, pulled * (ADD / raised))
        for j in range(K):
            best = tl.load(ids + t * K + j, mask=t < tokens, other=0).to(tl.int32)
            gw = tl.load(grad_weights + t * K + j, mask=t < tokens, other=0.0)
            w = tl.load(weights + t * K + j, mask=t < tokens, other=0.0)
            here = w * (gw - shared)
            value = tl.broadcast_to(here[:, None], [BT, BE])
            if SIGMOID:
                value = value * (1.0 - score)
            g += tl.where(e[None, :] == best[:, None], value, 0.0)
        if not SIGMOID:
            g -= score * outside[:, None]
    if OF_Z:
        g += soft * (real * 2.0 * tl.load(grad_z) * lse)[:, None]
    tl.store(out + at, g, mask=inside)


def _tile(experts: int, values: int) -> tuple[int, int]:
    columns = triton.next_power_of_2(experts)
    return router_tokens(columns, 1 << 17 if INTERPRETED else values), columns


def route_top_k(logits_TE: Tensor, mask_T: Tensor | None, chosen_TK: Tensor | None,
                bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, ...]:
    """Route in Triton; see `moe_plugin.kernels.router.route_top_k`."""
    (tokens, experts), device, k = logits_TE.shape, logits_TE.device, rule.k
    bt, be = _tile(experts, ROUTER_VALUES)
    programs = triton.cdiv(tokens, bt)
    ids_TK = torch.empty(tokens, k, dtype=torch.int64, device=device)
    weights_TK, lse_T = torch.empty(tokens, k, device=device), torch.empty(tokens, device=device)
    sums_PS = torch.empty(programs, experts + 2, device=device)
    if programs:
        best = 0 if rule.groups and rule.best >= experts // rule.groups else rule.best
        top_k_kernel[(programs,)](
            logits_TE.contiguous(), _pointer(mask_T, logits_TE), _pointer(chosen_TK, ids_TK),
            _pointer(bias_E, logits_TE), ids_TK, weights_TK, lse_T, sums_PS, tokens, experts, k,
            mask_T is not None, chosen_TK is not None, bias_E is not None, rule.normalize,
            not rule.score.is_softmax, rule.groups, rule.take, best,
            rule.add, rule.least, ADDED, bt, be,
            triton.next_power_of_2(max(1, rule.groups)))
    importance_E, z, p_log_p = sums_PS.sum(0).split([experts, 1, 1])
    return ids_TK, weights_TK, lse_T, importance_E, z[0], p_log_p[0]


def route_top_k_backward(logits_TE: Tensor, mask_T: Tensor | None, ids_TK: Tensor,
                         weights_TK: Tensor, lse_T: Tensor, grad_weights_TK: Tensor | None,
                         grad_importance_E: Tensor | None, grad_z: Tensor | None, rule: Rule,
                         sure: bool) -> Tensor:
    """Compute the gradient in Triton; see `moe_plugin.kernels.router.route_top_k_backward`."""
    (tokens, experts), k = logits_TE.shape, ids_TK.shape[1]
    out_TE = torch.empty(tokens, experts, device=logits_TE.device)
    bt, be = _tile(experts, ROUTER_VALUES_BACKWARD)
    # With more experts a thread has more values than this bound allows without spilling.
    bound = bounded_registers(ROUTER_REGISTERS_BACKWARD) if be <= ROUTER_VALUES else {}
    if tokens:
        grads = grad_weights_TK, grad_importance_E, grad_z
        top_k_backward_kernel[(triton.cdiv(tokens, bt),)](
            logits_TE.contiguous(), _pointer(mask_T, logits_TE), ids_TK.contiguous(),
            weights_TK.contiguous(), lse_T, *(_pointer(g, logits_TE) for g in grads), out_TE,
            tokens, experts, k, mask_T is not None, *(g is not None for g in grads),
            rule.normalize, not rule.score.is_softmax, rule.add, rule.least, ADDED, bt,
            be, **bound)
    return out_TE


def _pointer(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """Return `tensor` as a contiguous tensor. If `tensor` is None, return a placeholder, because
    unused pointer arguments also need a tensor.
    """
    return stand_in if tensor is None else tensor.reshape(-1).contiguous()
