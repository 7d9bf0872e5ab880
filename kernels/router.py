"""Scores, the k best experts, their weights and all balance statistics in one pass over logits.

Reads only the logits [T, E], which exist anyway, and writes nothing of that size. Legend: T tokens,
E experts, K choices; p = softmax(logits). logits_TE: float32 (float64). mask_T: bool, True = real
token. ids_TK, chosen_TK: int64. All others: in the logits' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.derivatives import wants_graph
from moe_plugin.kernels.registry import op
from moe_plugin.kernels.top_k import top_k_stable


@op
def route_top_k(logits_TE: Tensor, mask_T: Tensor, chosen_TK: Tensor | None, k: int,
                normalize: bool) -> tuple[Tensor, ...]:
    """(ids_TK, weights_TK, lse_T, importance_E, z, entropy).

    ids: the k largest p, ties to the lower index, or `chosen_TK` where given. weights: their p,
    divided by their sum with `normalize`. lse: logsumexp of the logits. importance_e = sum_t p(t,
    e), z = sum_t lse(t)^2, entropy = - sum_te p log p, each over real tokens.
    """
    p_TE = torch.softmax(logits_TE, 1)
    lse_T = torch.logsumexp(logits_TE, 1)
    ids_TK = top_k_stable(p_TE, k) if chosen_TK is None else chosen_TK
    weights_TK = p_TE.gather(1, ids_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(
            1, keepdim=True).clamp(min=torch.finfo(p_TE.dtype).eps)
    real_T = mask_T.to(p_TE.dtype)
    importance_E = real_T @ p_TE
    # - sum p log p = lse - sum p l for one token
    entropy = real_T @ (lse_T -
                        torch.linalg.vecdot(p_TE, logits_TE.clamp(min=torch.finfo(p_TE.dtype).min)))
    return ids_TK, weights_TK, lse_T, importance_E, real_T @ lse_T.square(), entropy


@op
def route_top_k_backward(logits_TE: Tensor, mask_T: Tensor, ids_TK: Tensor, weights_TK: Tensor,
                         lse_T: Tensor, grad_weights_TK: Tensor, grad_importance_E: Tensor,
                         grad_z: Tensor, normalize: bool) -> Tensor:
    """Gradient of the logits, [T, E], in one pass: p (g - <p, g>) + mask 2 lse grad_z p.

    g(t, e) = mask grad_importance_e + (gradient of the score, where e was chosen). For normalised
    weights w the latter is (gw - <gw, w>) / sum of the chosen p.
    """
    p_TE = torch.exp(logits_TE - lse_T[:, None])
    real_T1 = mask_T.to(p_TE.dtype)[:, None]
    grad_TK = grad_weights_TK
    if normalize:
        total_T1 = p_TE.gather(1, ids_TK).sum(1, keepdim=True)
        tiny = torch.finfo(p_TE.dtype).eps
        pull_T1 = (grad_TK * weights_TK).sum(1, keepdim=True) * (total_T1 > tiny)
        grad_TK = (grad_TK - pull_T1) / total_T1.clamp(min=tiny)
    g_TE = (real_T1 * grad_importance_E).scatter_add_(1, ids_TK, grad_TK)
    inner_T1 = torch.linalg.vecdot(p_TE, g_TE)[:, None]
    return g_TE.sub_(inner_T1 - real_T1 * (2 * grad_z) * lse_T[:, None]).mul_(p_TE)


@dataclass(frozen=True)
class Routed:
    """See `route_top_k`; weights, importance and z are differentiable."""

    ids_TK: Tensor
    weights_TK: Tensor
    importance_E: Tensor
    z: Tensor
    entropy: Tensor
    lse_T: Tensor


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, mask_T: Tensor, chosen_TK: Tensor | None, k: int,
                normalize: bool) -> tuple[Tensor, ...]:
        ids_TK, weights_TK, lse_T, importance_E, z, entropy = route_top_k(
            logits_TE, mask_T, chosen_TK, k, normalize)
        if ids_TK is chosen_TK:
            ids_TK = ids_TK.clone()
        ctx.normalize = normalize
        ctx.mark_non_differentiable(ids_TK, entropy, lse_T)
        ctx.save_for_backward(logits_TE, mask_T, ids_TK, weights_TK, lse_T)
        return ids_TK, weights_TK, importance_E, z, entropy, lse_T

    @staticmethod
    def backward(ctx: Any, _ids: Tensor, grad_weights_TK: Tensor, grad_importance_E: Tensor,
                 grad_z: Tensor, *_: Tensor) -> tuple[Any, ...]:
        if wants_graph():
            logits_TE, mask_T, ids_TK, _, _ = ctx.saved_tensors
            _, weights_TK, _, importance_E, z, _ = route_top_k.implementation("torch")(
                logits_TE, mask_T, ids_TK, ids_TK.shape[1], ctx.normalize)
            outputs, grads = (weights_TK, importance_E, z), (grad_weights_TK, grad_importance_E,
                                                             grad_z)
            return *torch.autograd.grad(outputs, logits_TE, grads,
                                        create_graph=True), None, None, None, None
        grads = grad_weights_TK.contiguous(), grad_importance_E.contiguous(), grad_z
        return route_top_k_backward(*ctx.saved_tensors, *grads,
                                    ctx.normalize), None, None, None, None


def route(logits_TE: Tensor, mask_T: Tensor, k: int, normalize: bool,
          chosen_TK: Tensor | None = None) -> Routed:
    """Differentiable `route_top_k`.

    logits_TE: [T, E]. mask_T: bool [T]. chosen_TK: int64 [T, K], or None: the k largest scores.
    """
    return Routed(*_Route.apply(logits_TE, mask_T, chosen_TK, k, normalize))
