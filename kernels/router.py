"""Compute the scores, the k best experts, their weights and all balance statistics in one pass over
the logits.

The pass reads only the logits [T, E] and writes no other tensor of this size. If two experts have
equal scores, the expert with the lower index is chosen first.

Notation: T is the number of tokens, E the number of experts, K the number of choices per token. The
scores are `s = score(logits)` for a softmax or another `ScoreFunction`, and `p = s / sum_e s`.

Shapes and dtypes: `logits_TE` is float32 (or float64). The tensor `mask_T` is bool with True for
real tokens, or None if all tokens are real. The tensors `ids_TK` and `chosen_TK` are int64. The
tensor `bias_E` is float32. `bias_E` is added to the scores only to choose experts, not to weight
them. All other tensors have the same dtype as the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import wants_graph
from moe_plugin.kernels.registry import op
from moe_plugin.kernels.scores import ADDED, SOFTMAX, ScoreFunction, divisor

FEW = 8  # largest k for which k passes over the scores are faster than one sort
_LITTLE = 2e-7
TINY = 512  # number of scores up to which launching an operation takes longer than its work


@op
def top_k_stable(scores_TE: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest scores in decreasing order, int64 [T, K]. If scores are
    equal, the lower index comes first.

    This function is needed because `torch.topk` does not define the order of equal scores. Like
    this function, `max` and a stable sort return the first of several equal scores. `argmax` also
    returns the first of equal scores, but takes up to three times as long.

    scores_TE: floating-point scores [T, E].
    """
    if _sorts(scores_TE, k):
        return torch.argsort(scores_TE, dim=1, descending=True, stable=True)[:, :k].contiguous()
    left_TE, chosen = scores_TE, []
    for j in range(k):
        chosen.append(left_TE.max(1, keepdim=True).indices)
        if j + 1 < k:
            left_TE = left_TE.scatter(1, chosen[-1], float("-inf"))
    return torch.cat(chosen, 1)


def best_scores(scores_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices that `top_k_stable` selects, and their scores [T, K]. The returned scores
    are differentiable.
    """
    # If a gradient is needed, `gather` is used, so that a first pass saves the same tensors as a
    # recomputation with given choices.
    if not scores_TE.requires_grad and _sorts(scores_TE, k) and not torch.compiler.is_compiling():
        sorted_TE, order_TE = torch.sort(scores_TE, dim=1, descending=True, stable=True)
        return order_TE[:, :k].contiguous(), sorted_TE[:, :k]
    ids_TK = top_k_stable.implementation("torch")(scores_TE.detach(), k)
    return ids_TK, scores_TE.gather(1, ids_TK)


def _sorts(scores_TE: Tensor, k: int) -> bool:
    # Under torch.compile the comparison would become a guard on the number of tokens.
    tiny = not torch.compiler.is_compiling() and scores_TE.numel() <= TINY
    return k > FEW or scores_TE.shape[0] == 0 or tiny


def group_members(groups_TG: Tensor, groups: int, experts: int) -> Tensor:
    """Return a bool tensor [T, E] whose entry [t, e] is True if expert e belongs to one of the
    groups of token t.

    groups_TG: int64 [T, G], the indices of G groups for each token.
    """
    chosen_TG = torch.zeros(groups_TG.shape[0], groups, dtype=torch.bool, device=groups_TG.device)
    return chosen_TG.scatter_(1, groups_TG, True).repeat_interleave(experts // groups, dim=1)


def in_best_groups(scores_TE: Tensor, groups: int, take: int, best: int) -> Tensor:
    """Return the scores [T, E], in which the scores of experts outside each token's `take` best
    groups are replaced by -inf. A group consists of consecutive experts.

    best: number of scores that determine the score of a group. The score of a group is the sum of
    its `best` largest scores. If scores are equal, the lower index comes first.
    """
    tokens, experts = scores_TE.shape
    scores_TGP = scores_TE.view(tokens, groups, experts // groups)
    if best < experts // groups:
        scores_TGP = scores_TGP.topk(best, dim=2).values
    groups_TG = top_k_stable.implementation("torch")(scores_TGP.sum(2), take)
    return scores_TE.masked_fill(~group_members(groups_TG, groups, experts), float("-inf"))


@dataclass(frozen=True)
class Rule:
    """Settings that determine how experts are chosen and weighted.

    Attributes:
        k: number of choices per token.
        normalize: whether to divide the weights by `max(sum of the chosen weights + add, least)`.
        score: the function that converts logits to scores.
        groups: number of groups of consecutive experts. All groups have the same size. For each
            group, its `best` largest scores are summed. Only experts in the `take` groups with the
            largest sums may be chosen. If `groups` is 0, any expert may be chosen.
        z: whether to compute the z sum and the logsumexp of each token.
    """

    k: int
    normalize: bool
    score: ScoreFunction
    groups: int = 0
    take: int = 1
    best: int = 1
    z: bool = True
    add: float = ADDED
    least: float = 0.0


@dataclass(frozen=True)
class Routed:
    """The outputs of `route_top_k`. The weights, importance and z are differentiable."""

    ids_TK: Tensor
    weights_TK: Tensor
    importance_E: Tensor
    z: Tensor | None
    p_log_p: Tensor


def route_by_steps(logits_TE: Tensor, s_TE: Tensor, p_TE: Tensor, mask_T: Tensor | None, rule: Rule,
                   chosen_TK: Tensor | None = None, bias_E: Tensor | None = None) -> Routed:
    """A reference implementation of `route` in separate torch operations, differentiated by
    autograd.

    s_TE: scores computed from the logits.
    p_TE: the scores divided by their sum.
    """
    ids_TK, weights_TK, _, *sums = _steps(logits_TE, s_TE, p_TE, mask_T, rule, chosen_TK, bias_E)
    return Routed(ids_TK, weights_TK, *sums)


def _steps(logits_TE: Tensor, s_TE: Tensor, p_TE: Tensor, mask_T: Tensor | None, rule: Rule,
           chosen_TK: Tensor | None, bias_E: Tensor | None, sure: bool = False) -> tuple[Any, ...]:
    if chosen_TK is None:
        ids_TK, weights_TK = _choose(s_TE, bias_E, rule)
    else:
        ids_TK, weights_TK = chosen_TK, s_TE.gather(1, chosen_TK)
    if rule.normalize:
        total_T1 = weights_TK.sum(1, keepdim=True)
        weights_TK = weights_TK / (
            total_T1 if sure else divisor(total_T1, rule.add, rule.least))
    # The entropy is only reported, so it has no gradient. The clamp makes 0 log 0 count as 0.
    detached_TE = p_TE.detach()
    log_TE = detached_TE * detached_TE.clamp(min=torch.finfo(p_TE.dtype).tiny).log()
    lse_T = torch.logsumexp(logits_TE, 1) if rule.z else None
    if mask_T is None:
        importance_E, p_log_p = p_TE.sum(0), log_TE.sum()
        z = None if lse_T is None else torch.dot(lse_T, lse_T)
    else:
        # Products with the mask, because selecting the real tokens would give a shape that depends
        # on data.
        real_T = mask_T.to(p_TE.dtype)
        importance_E, p_log_p = real_T @ p_TE, real_T @ log_TE.sum(1)
        z = None if lse_T is None else real_T @ lse_T.square()
    return ids_TK, weights_TK, lse_T, importance_E, z, p_log_p


def _choose(s_TE: Tensor, bias_E: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Return the chosen experts and their scores s."""
    if bias_E is None and not rule.groups:
        return best_scores(s_TE, rule.k)
    left_TE = s_TE if bias_E is None else s_TE + bias_E.to(s_TE.dtype)
    if rule.groups:
        left_TE = in_best_groups(left_TE, rule.groups, rule.take, rule.best)
    ids_TK = best_scores(left_TE.detach(), rule.k)[0]
    return ids_TK, s_TE.gather(1, ids_TK)


@op
def route_top_k(logits_TE: Tensor, mask_T: Tensor | None, chosen_TK: Tensor | None,
                bias_E: Tensor | None, rule: Rule) -> tuple[Tensor | None, ...]:
    """Return (ids_TK, weights_TK, lse_T, importance_E, z, p_log_p).

    The tensor `ids_TK` contains the experts with the k largest values of s + bias (ties are broken
    in favor of the lower index), or `chosen_TK` if it is given. The weights are the scores s of
    these experts. If `Rule.normalize` is true, the weights are divided by their sum. The tensor
    `lse` is the logsumexp of the logits. The sums `importance_e = sum_t p(t, e)`,
    `z = sum_t lse(t)^2` and `p_log_p = sum_te p log p` include only real tokens. `lse` and `z` may
    be None if `Rule.z` is False.
    """
    s_TE = rule.score.scores(logits_TE)
    return _steps(logits_TE, s_TE, rule.score.shares(s_TE), mask_T, rule, chosen_TK, bias_E,
                  _sure(chosen_TK, bias_E, rule))


def _sure(chosen_TK: Tensor | None, bias_E: Tensor | None, rule: Rule) -> bool:
    # The largest values of a softmax sum to at least 1 / E, so the additions have no effect.
    little = rule.add <= ADDED and rule.least <= _LITTLE
    return (chosen_TK is None and bias_E is None and rule.score.is_softmax and not rule.groups
            and little)


@op
def route_top_k_backward(logits_TE: Tensor, mask_T: Tensor | None, ids_TK: Tensor,
                         weights_TK: Tensor, lse_T: Tensor | None, grad_weights_TK: Tensor | None,
                         grad_importance_E: Tensor | None, grad_z: Tensor | None,
                         rule: Rule, sure: bool) -> Tensor:
    """Compute the gradient of the logits, [T, E], in one pass.

    If the gradient of an output is None, it is treated as zeros.

    Let w be the weights computed from the chosen scores s, and let g be the gradient of w. With
    normalization, the gradient with respect to the log s of a choice is `w (g - <g, w>)`. Without
    normalization, this gradient is `w g`. For a softmax without normalization, s times the sum of
    `w g` is also subtracted from the gradient of each logit. If G is the gradient of the
    importance, `p (G - <p, G>)` is added to the gradients with respect to log s. The gradients with
    respect to log s are multiplied by the slope of the score function to obtain the gradients of
    the logits. The sum z adds `2 lse softmax(logits) grad_z` to the gradients of the logits.

    Args:
        lse_T: logsumexp of the logits of each token. Used only if `grad_z` is given.
        sure: True if the sum of each token's chosen scores is known to be at least the minimum
            divisor, so that normalization divided by exactly this sum.
    """
    s_TE = rule.score.scores(logits_TE)
    if grad_importance_E is None:
        grad_TE = torch.zeros_like(logits_TE)
    else:
        grad_TE = _grad_of_importance(s_TE, mask_T, grad_importance_E, rule)
    if grad_weights_TK is not None:
        local_TK, outside_T1 = _grad_of_choices(s_TE, ids_TK, weights_TK, grad_weights_TK, rule,
                                                sure)
        if outside_T1 is not None:
            grad_TE.addcmul_(s_TE, outside_T1, value=-1)
        grad_TE.scatter_add_(1, ids_TK, local_TK)
    if grad_z is not None:
        assert lse_T is not None
        share_T = 2 * grad_z * lse_T
        if mask_T is not None:
            share_T = share_T * mask_T
        softmax_TE = s_TE if rule.score.is_softmax else SOFTMAX.scores(logits_TE)
        grad_TE.addcmul_(softmax_TE, share_T[:, None])
    return grad_TE


def _grad_of_importance(s_TE: Tensor, mask_T: Tensor | None, grad_E: Tensor, rule: Rule) -> Tensor:
    p_TE = rule.score.shares(s_TE)
    grad_TE = p_TE * grad_E
    grad_TE.addcmul_(p_TE, grad_TE.sum(1, keepdim=True), value=-1)
    grad_TE = rule.score.slope_(grad_TE, s_TE)
    return grad_TE if mask_T is None else grad_TE.mul_(mask_T[:, None])


def _grad_of_choices(s_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor, grad_TK: Tensor, rule: Rule,
                     sure: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the chosen logits [T, K], and a factor [T, 1] per token: s times this
    factor is subtracted from the gradients of all logits.
    """
    pull_TK = weights_TK * grad_TK
    total_T1 = outside_T1 = pull_TK.sum(1, keepdim=True)
    if not rule.normalize:
        chosen_TK = weights_TK
    elif sure:
        return pull_TK.addcmul_(weights_TK, total_T1, value=-1), None
    else:
        chosen_TK = s_TE.gather(1, ids_TK)
        raised_T1 = chosen_TK.sum(1, keepdim=True) + rule.add
        # A sum that was raised to `least` is a constant and has no gradient.
        fixed_T1 = raised_T1 < rule.least
        pull_TK.addcmul_(weights_TK, total_T1.masked_fill(fixed_T1, 0), value=-1)
        # the fraction of the divisor that does not depend on the scores
        outside_T1 = total_T1 * torch.where(fixed_T1, 1.0, rule.add / raised_T1)
    return rule.score.slope_(pull_TK, chosen_TK), outside_T1 if rule.score.is_softmax else None


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, mask_T: Tensor | None, chosen_TK: Tensor | None,
                bias_E: Tensor | None, rule: Rule) -> tuple[Tensor | None, ...]:
        ids_TK, weights_TK, lse_T, importance_E, z, p_log_p = route_top_k(
            logits_TE, mask_T, chosen_TK, bias_E, rule)
        if chosen_TK is not None and ids_TK is chosen_TK:
            ids_TK = chosen_TK.clone()  # autograd does not allow to return an input as an output
        ctx.rule, ctx.sure = rule, _sure(chosen_TK, bias_E, rule)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_TK, p_log_p)
        ctx.save_for_backward(logits_TE, mask_T, ids_TK, weights_TK, lse_T)
        return ids_TK, weights_TK, importance_E, z, p_log_p

    @staticmethod
    def backward(ctx: Any, _ids: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grads_of_outputs = grads[:3]
        if all(g is None for g in grads_of_outputs):
            return None, None, None, None, None
        if wants_graph():
            return _grad_with_graph(ctx, grads_of_outputs), None, None, None, None
        grads_of_outputs = tuple(None if g is None else g.contiguous() for g in grads_of_outputs)
        grad_TE = route_top_k_backward(*ctx.saved_tensors, *grads_of_outputs, ctx.rule, ctx.sure)
        return grad_TE, None, None, None, None


def _grad_with_graph(ctx: Any, grads: tuple[Tensor | None, ...]) -> Tensor:
    logits_TE, mask_T, ids_TK, _, _ = ctx.saved_tensors
    # The kernel's backward cannot be differentiated, so torch's operations compute the forward pass
    # again.
    _, weights_TK, _, importance_E, z, _ = route_top_k.implementation("torch")(
        logits_TE, mask_T, ids_TK, None, ctx.rule)
    outputs, given = zip(*((out, g) for out, g in zip((weights_TK, importance_E, z), grads,
                                                      strict=True) if g is not None), strict=True)
    return torch.autograd.grad(outputs, logits_TE, given, create_graph=True)[0]


def route(logits_TE: Tensor, mask_T: Tensor | None, rule: Rule, chosen_TK: Tensor | None = None,
          bias_E: Tensor | None = None) -> Routed:
    """Compute `route_top_k`, differentiable.

    Args:
        logits_TE: logits [T, E] of all experts.
        mask_T: bool [T], True for tokens that are not padding, or None.
        rule: settings that determine how experts are chosen and weighted.
        chosen_TK: predetermined choices, int64 [T, K], or None if `rule` chooses the experts.
        bias_E: bias [E] that is added to the scores only to choose experts, or None.
    """
    return Routed(*_Route.apply(logits_TE, mask_T, chosen_TK, bias_E, rule))
