"""Balance losses, which are registered by name. Each loss is a function of a `RoutingCall` and
returns a float32 scalar that is not yet multiplied by its weight.

If the ranks of a group share the tokens of a batch (`RoutingCall.comm`), each rank computes its
share of the group's loss, and these shares add up to the loss of the group. If ranks share the
tokens of a batch, loads and counts include the tokens of the whole group, but the importance
includes only the tokens of this rank.

Notation: S is the number of real tokens on this rank, E the number of experts, k the number of
choices per token, p(s, e) the scores after softmax (including any noise), n_e the number of tokens
whose first choice is e, and N_e the number of tokens for which e is one of the k choices. If there
are no real tokens, every loss is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_plugin.records import TokenInfo
from moe_plugin.routing.call import RoutingCall, check_integers, check_range
from moe_plugin.utils.registry import Registry

LossFn = Callable[[RoutingCall], Tensor]
losses: Registry[LossFn] = Registry("loss")


def declares(*, balances: bool = True, needs: frozenset[str] = frozenset()) -> Callable[[Any], Any]:
    """Return a decorator that declares properties of a loss. Place the decorator below
    `losses.register`.

    Args:
        balances: True if the loss increases when the load is uneven.
        needs: names of the fields of `TokenInfo` that the loss reads; see `RouterModule.needs`.
    """

    def add(loss: Any) -> Any:
        loss.balances, loss.needs = balances, needs
        return loss

    return add


@losses.register("gshard")
def gshard(x: RoutingCall) -> Tensor:
    """GShard's balance loss for first choices, `sum_e (sum_s p(s,e)) * (n_e * E / S) / S`.

    Only the first choice of each token is counted. `gshard` is exactly 1 for a uniform router whose
    first choices are distributed evenly. This is the smallest loss of any router whose scores are
    proportional to its load. Source: GShard (Lepikhin et al., 2020), algorithm 1, as implemented in
    Tutel and fairseq.
    """
    experts = x.experts
    return torch.dot(x.importance_E(), x.first_load_E()) * (experts / x.count**2)


@losses.register("switch")
def switch(x: RoutingCall) -> Tensor:
    """Switch Transformer's balance loss for all choices,
    `E / (S sum_e N_e) * sum_e (sum_s p(s,e)) * N_e`.

    With k choices per token, the factor before the sum is `E / (k S^2)`. For k = 1, this loss
    equals `gshard`. `switch` is exactly 1 for a uniform router. Source: Switch Transformer (Fedus
    et al., 2021), equation 4. As in Megatron-core's `aux_loss`, N_e includes all choices.
    """
    return _switch(x, x.load_E())


def _switch(x: RoutingCall, load_E: Tensor, penalty_E: Tensor | float = 1.0) -> Tensor:
    experts = x.experts
    weighed_E = load_E if isinstance(penalty_E, float) else load_E * penalty_E
    total = torch.dot(x.importance_E(), weighed_E)
    # Without any choice the clamp gives a loss of 0 instead of NaN.
    return total * experts / (x.count * load_E.sum().clamp(min=1))


@losses.register("sequence")
@declares(needs=frozenset({"sequences"}))
def sequence(x: RoutingCall) -> Tensor:
    """The mean of the `switch` loss over all sequences q, `mean_q E / (S_q N_q) sum_e P_qe N_qe`.

    For sequence q, P_qe is the sum of the scores of expert e, N_qe is the number of choices of
    expert e, S_q is the number of real tokens, and N_q = sum_e N_qe. All sequences have the same
    weight. `sequence` is 1 for a uniform router. If all micro-batches contain the same number of
    whole sequences, the loss does not depend on their distribution over micro-batches.
    Source: DeepSeek-V2 (2024), section 2.2.3.
    """
    assert x.info.sequence_T is not None
    sequence_T = x.info.sequence_T.long()
    experts, count = x.experts, x.info.sequences
    ones_T1 = x.probs_TE.new_ones(x.probs_TE.shape[0], 1)
    # The additional column collects choices that are -1: -1 % (E + 1) is E.
    chosen_TE = x.probs_TE.new_zeros(x.probs_TE.shape[0], experts + 1).scatter_(
        1, x.balanced_ids_TK() % (experts + 1), 1.0)[:, :experts]

    def by_sequence(values: Tensor) -> Tensor:
        sums = values.new_zeros(count, values.shape[1])
        return sums.index_add(0, sequence_T, x.real(values))

    importance_QE = by_sequence(x.probs_TE)
    load_QE = x.total(by_sequence(chosen_TE))
    tokens_Q = x.total(by_sequence(ones_T1))[:, 0]
    value_Q = (importance_QE * load_QE).sum(1) * experts / (tokens_Q * load_QE.sum(1)).clamp(min=1)
    return value_Q.sum() / (tokens_Q > 0).sum().clamp(min=1)


@losses.register("global_batch")
def global_batch(x: RoutingCall) -> Tensor:
    """The `switch` loss computed with the load of the whole batch,
    `E / (S N) * sum_e (sum_s p(s,e)) * N_e`.

    The scores p and the number of tokens S are those of the current call. N_e is the number of
    choices of expert e on all data-parallel ranks in all micro-batches since the last optimizer
    step (`moe_plugin.routing.finish_step`), and N = sum_e N_e. The loss is 1 for a uniform router.
    The sum of the loss over ranks does not depend on how the batch is split among the ranks. Each
    micro-batch of a step uses the load accumulated up to and including this micro-batch. Only the
    last micro-batch therefore uses the load of the whole batch. Source: Qiu et al., 2025 ("Demons
    in the Detail", global-batch load balancing loss), equation 6, including the buffer for gradient
    accumulation.
    """
    assert x.step_load_E is not None
    return _switch(x, x.step_load_E[:-1].to(x.logits_TE.dtype))


@losses.register("ta_moe")
def ta_moe(x: RoutingCall) -> Tensor:
    """The `switch` loss with link penalties, `E / (S N) * sum_e q_ie (sum_s p(s,e)) N_e` on rank i.

    The penalties are `q_ie = blend * Norm(1 / c_ie) + (1 - blend)`. Here c_ie is the topology-aware
    fraction of tokens for expert e (`links.target_shares`), and Norm scales its argument to a mean
    of 1. Experts that are reached over slow links increase the loss more. If all links are equal or
    if blend = 0, the loss is equal to `switch`. `ta_moe` is 1 for a uniform router. Source: TA-MoE
    (Chen et al., 2022), section 4.2.
    """
    return _switch(x, x.load_E(),
                   1.0 if x.penalty_E is None else x.penalty_E.to(x.logits_TE.dtype))


@losses.register("sam_alignment")
@declares(balances=False)
def sam_alignment(x: RoutingCall) -> Tensor:
    """A loss that aligns choices with the chosen group, `mean_s sum_{e outside the group} max(0,
    p(s,e) - p(s, k-th choice))`.

    The loss is 0 if and only if, for every token, no expert outside the group has a higher score
    than the token's k-th choice. For routers without groups, the loss is always 0. Source: the SAM
    gate of HetuMoE (Nie et al., 2022).
    """
    # The product with 0 keeps the loss in the graph, as for every other router.
    if x.outside_TE is None:
        return x.probs_TE.sum() * 0
    last_T1 = x.probs_TE.gather(1, x.ids_TK[:, -1:])
    excess_T = ((x.probs_TE - last_T1).clamp(min=0) * x.outside_TE).sum(1)
    return x.real(excess_T).sum() / x.count


@losses.register("load_importance")
def load_importance(x: RoutingCall) -> Tensor:
    """The loss `(CV^2(importance) + CV^2(load)) / 2`, where the load is smooth in the scores.

    The importance and the load are defined as `importance_e = sum_s p(s,e)` and
    `load_e = sum_s Phi((q(s,e) - thr_s) / (noise / E))`. In these formulas, q is the score without
    noise, thr_s is the k-th largest noisy score of token s, and Phi is the cumulative distribution
    function of the standard normal distribution. CV^2 is the unbiased variance divided by the
    squared mean. If the importance and the load are both uniform, the loss is 0.
    Source: Shazeer et al., 2017, appendix A, with scores instead of logits. Tutel's loss with the
    same name is computed differently; see `tutel_load_importance`.
    """
    threshold_T1 = x.probs_TE.gather(1, x.ids_TK[:, -1:])
    chance_TE = torch.special.ndtr((x.clean_probs_TE - threshold_T1) / x.noise)
    load_E = x.real(chance_TE).sum(0)
    # CV^2 of each rank's own tokens: the group's loss is the mean over ranks, not the sum.
    return (_squared_cv(x.importance_E()) + _squared_cv(load_E)) / 2 * x.share()


@losses.register("tutel_load_importance")
def tutel_load_importance(x: RoutingCall) -> Tensor:
    """Tutel's `load_importance_loss`, for models that have been trained with this loss.

    `tutel_load_importance` differs from `load_importance` in two ways. First,
    `importance_e = sum_s q(s,e)` uses the scores without noise. Second, thr_s is the noisy logit of
    token s's k-th choice instead of its noisy score. Scores, which do not exceed 1, are therefore
    compared with logits. As a result,
    tokens with large logits are not counted in the load of any expert. Source: Tutel,
    `impls/losses.py` and `impls/moe_layer.py`.
    """
    threshold_T1 = x.logits_TE.gather(1, x.ids_TK[:, -1:])
    chance_TE = torch.special.ndtr((x.clean_probs_TE - threshold_T1) / x.noise)
    importance_E, load_E = (x.real(p_TE).sum(0) for p_TE in (x.clean_probs_TE, chance_TE))
    return (_squared_cv(importance_E) + _squared_cv(load_E)) / 2 * x.share()


@losses.register("importance")
def importance(x: RoutingCall) -> Tensor:
    """The loss `CV^2(sum_s p(s, e))` over experts, where CV^2 is the unbiased variance divided by
    the squared mean.

    `importance` is 0 for a uniform router. Source: Shazeer et al., 2017, equation 6.
    """
    return _squared_cv(x.importance_E()) * x.share()


@losses.register("noisy_load")
def noisy_load(x: RoutingCall) -> Tensor:
    """The loss `CV^2(sum_s P(s, e))` with `P(s, e) = Phi(margin(s, e))`, for the noisy_topk router.

    P is the probability that e is among the k choices of token s if only the noise of e is
    resampled. The margin is `margin(s, e) = (clean logit - k-th largest noisy logit of the other
    experts) / standard deviation of the noise`. The loss is 0 for a uniform router. Source: Shazeer
    et al., 2017, equations 8 to 11.
    """
    margin_TE = x.margin_TE
    assert margin_TE is not None
    return _squared_cv(x.real(torch.special.ndtr(margin_TE)).sum(0)) * x.share()


@losses.register("z")
@declares(balances=False)
def router_z(x: RoutingCall) -> Tensor:
    """The mean squared logsumexp of the logits, `mean_s logsumexp_e(logits(s,e))^2`. Source: ST-MoE
    (Zoph et al., 2022), equation 5.
    """
    return x.squared_z() / x.count


def _squared_cv(values_E: Tensor) -> Tensor:
    # A single expert has no variance. The product with 0 keeps the result in the graph.
    if values_E.numel() < 2:
        return values_E.sum() * 0
    return values_E.var(unbiased=True) / (values_E.mean().square() + 1e-10)


def check_sequences(info: TokenInfo, tokens: int) -> None:
    """Raise a `ValueError` unless sequence numbers are known, as the `sequence` loss requires."""
    remedy = "Pass info=TokenInfo(sequence_T=..., sequences=...) to the layer."
    sequence_T, count = info.sequence_T, info.sequences
    if sequence_T is None:
        raise ValueError("losses.sequence needs the sequence number of each token, but "
                         f"sequence_T=None. {remedy}")
    if count < min(1, tokens):
        raise ValueError(f"losses.sequence needs the number of sequences, at least 1, but "
                         f"sequences={count}. {remedy}")
    check_integers("sequence_T", sequence_T, tokens)
    check_range(sequence_T, 0, count - 1,
                "sequence_T has values {}..{}, but must be in "
                f"0..sequences-1={count - 1}, also for padding. Number the sequences from 0 and "
                "pass the number of sequences.")
