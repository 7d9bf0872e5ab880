"""Confident multiple choice learning (CMCL): ensembles of members for different samples.

Each member is confident on its own samples and predicts a uniform distribution for all others.

Notation: N is the number of samples, M the number of members (models, heads or experts), C the
number of classes, G the number of groups of samples. Source: CMCL (Lee and others, 2017).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.kernels import top_k_stable

# Command-line arguments of ensembles, with the same meaning in every host.
Flags = tuple[tuple[str, dict[str, Any]], ...]
Check = tuple[bool, str, str, str]  # is valid, argument, bound, remedy


@dataclass(frozen=True)
class EnsembleSettings:
    """Settings of an ensemble, from command-line arguments (see `flags`).

    Attributes:
        heads: number of heads, M.
        hidden: width of each head's hidden layer.
        sharing: probability with which a feature of one head is added to the features of another
            head.
        k: see `confident_oracle_loss`.
        beta: see `confident_oracle_loss`.
        labels: see `confident_oracle_loss`.
        by_sequence: whether the same heads are responsible for all samples of a sequence or image.
    """

    heads: int
    hidden: int = 0
    sharing: float = 0.0
    k: int = 1
    beta: float = 0.75
    labels: str = "exact"
    by_sequence: bool = True


def flags(whole: str, part: str, meaning: str) -> Flags:
    """Return the command-line flags of an ensemble: their names and argparse options.

    Args:
        whole: first allowed value of `--oracle-unit`, which is also the default.
        part: second allowed value of `--oracle-unit`.
        meaning: description of the unit `whole` in help texts.
    """
    return (
        ("ensemble-heads", {"type": int, "default": 0, "help": "number of output heads of an "
                            "ensemble with the confident oracle loss; 0: one output layer"}),
        ("ensemble-hidden", {"type": int, "default": 0,
                             "help": "width of each head's hidden layer; 0: no hidden layer"}),
        ("ensemble-sharing", {"type": float, "default": 0.0, "help": "probability that a feature of"
                              " one head is added to another head's; 0: no sharing, CMCL: 0.7"}),
        ("oracle-k", {"type": int, "default": 1,
                      "help": f"number of heads responsible for a {meaning} or {part}"}),
        ("oracle-beta", {"type": float, "default": 0.75,
                         "help": "weight of the loss that pulls the other heads towards "
                         "the uniform distribution"}),
        ("oracle-labels", {"choices": ("exact", "stochastic"), "default": "exact", "help":
                           "how that loss is computed: exactly, or with random labels"}),
        ("oracle-unit", {"choices": (whole, part), "default": whole, "help": "unit for which "
                         f"responsible heads are chosen; {whole}: a {meaning}"}))


def given_settings(args: argparse.Namespace, known: Flags,
                   checks: Iterable[Check] = ()) -> EnsembleSettings | None:
    """Return the ensemble settings from parsed arguments, or None for a single output layer.

    Args:
        args: parsed arguments.
        known: all flags of the host framework, including those that `flags` returns.
        checks: additional checks by the host framework, which run only for an ensemble.
    Raises:
        ValueError: If an argument is out of bounds or has no effect.
    """
    if not args.ensemble_heads:
        given = [name for name, options in known
                 if getattr(args, name.replace("-", "_")) != options["default"]]
        if given:
            raise ValueError(f"--{given[0]} has no effect without an ensemble; leave it out, or "
                             "set --ensemble-heads, e.g. to 5")
        return None
    heads = args.ensemble_heads
    for good, name, bound, remedy in (
        (2 <= heads <= 1024, "ensemble_heads", "in 2..1024", "leave it out for one output layer"),
        (1 <= args.oracle_k <= heads, "oracle_k", f"in 1..{heads}, the heads", "use 1"),
        (0 <= args.oracle_beta < float("inf"), "oracle_beta", ">= 0 and finite", "use 0.75"),
        (0 <= args.ensemble_sharing <= 1, "ensemble_sharing", "in 0..1", "use 0.7"),
        (args.ensemble_hidden >= 0, "ensemble_hidden", ">= 0", "use 0 for no hidden layer"),
        *checks):
        if not good:
            raise ValueError(f"{name}={getattr(args, name)} is out of bounds: must be {bound}; "
                             f"{remedy}")
    return EnsembleSettings(heads, args.ensemble_hidden, args.ensemble_sharing, args.oracle_k,
                            args.oracle_beta, args.oracle_labels,
                            args.oracle_unit == dict(known)["oracle-unit"]["default"])


LABELLING = ("exact", "stochastic")
BINS = 10  # bins of a histogram of confidences
HISTOGRAMS = ("responsible", "other", "ensemble")


@dataclass(frozen=True)
class OracleLoss:
    """Result of `confident_oracle_loss`.

    Attributes:
        loss_N: loss of each sample, float [N]. The loss is differentiable.
        chosen_NM: bool [N, M]. Entry [n, m] is True if member m is responsible for sample n.
    """

    loss_N: Tensor
    chosen_NM: Tensor


def uniform_divergence(logits_NMC: Tensor) -> Tensor:
    """Return the divergence `KL(U || P) = -log C - (1/C) sum_c log P(c)`, [N, M].

    The gradient with respect to the logits is `p - 1/C`.
    """
    return -math.log(logits_NMC.shape[-1]) - F.log_softmax(logits_NMC, dim=-1).mean(-1)


def responsible(cross_entropy_NM: Tensor, divergence_NM: Tensor, k: int, beta: float) -> Tensor:
    """Return the assignment of `k` members to each sample, bool [N, M], with the smallest loss.

    For each sample, the chosen members have the k smallest values of `CE_m - beta KL_m`. If values
    are equal, the member with the lower index is chosen. This is optimal, because the loss is a sum
    over members, and choosing member m changes it by `CE_m - beta KL_m`.

    Args:
        cross_entropy_NM: cross entropy `CE` of each member for each sample, float [N, M].
        divergence_NM: divergence `KL` of each member for each sample, float [N, M].
        k: number of members that are chosen for each sample.
        beta: weight of the divergence.
    Raises:
        ValueError: If k is outside 1..M.
    """
    members = cross_entropy_NM.shape[1]
    if not 1 <= k <= members:
        raise ValueError(f"k={k} is out of bounds: must be in 1..{members}, the number of members "
                         "of the ensemble; use 1 for multiple choice learning")
    best_NK = top_k_stable(beta * divergence_NM - cross_entropy_NM, k)
    return torch.zeros_like(cross_entropy_NM, dtype=torch.bool).scatter_(1, best_NK, True)


def confident_oracle_loss(logits_NMC: Tensor, target_N: Tensor, k: int, beta: float, *,
                          labels: str = "exact", group_N: Tensor | None = None, groups: int = 0,
                          mask_N: Tensor | None = None) -> OracleLoss:
    """Compute the confident oracle loss of each sample.

    For each sample, the loss trains the best `k` members and pulls all other members towards the
    uniform distribution. The loss is `sum_m [ v_m CE(y, P_m) + beta (1 - v_m) KL(U || P_m) ]`,
    where v is the best assignment of k members to each sample. With beta = 0 and k = 1, this is
    multiple choice learning. With k = M, the members are independent. The loss is computed in
    float32 or a wider dtype.

    Args:
        logits_NMC: logits of all members, float [N, M, C].
        target_N: class of each sample, int64 [N].
        k: number of members that are responsible for each sample.
        beta: weight of the divergence for members that are not responsible for a sample.
        labels: "exact" to compute the divergence exactly, or "stochastic" to replace it by the
            cross entropy with a random label, drawn uniformly for each sample and each member that
            is not responsible for it. The expected gradient is the same.
        group_N: optional. Index of the group to which each sample belongs, int64 [N] in
            0..groups-1. All samples of a group (for example, the tokens of a sequence) have the
            same responsible members. By default, each sample is a separate group.
        groups: number of groups of samples, G.
        mask_N: optional. bool [N], False for samples to be ignored. Ignored samples have loss 0 and
            do not affect the choice of members.
    Raises:
        ValueError: If k is outside 1..M, `labels` is unknown, or beta is negative or not finite.
    """
    if labels not in LABELLING:
        raise ValueError(
            f"labels={labels!r} is out of bounds: must be one of {', '.join(LABELLING)}")
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta={beta} is out of bounds: must be >= 0 and finite; use 0.75")
    logits_NMC = logits_NMC.to(torch.promote_types(logits_NMC.dtype, torch.float32))
    real_N = torch.ones_like(target_N, dtype=torch.bool) if mask_N is None else mask_N
    real_N1 = real_N[:, None]
    log_p_NMC = F.log_softmax(logits_NMC, dim=-1)
    target_NM = torch.where(real_N, target_N, 0)[:, None].expand(-1, logits_NMC.shape[1])
    ce_NM = _cross_entropy(log_p_NMC, target_NM) * real_N1
    kl_NM = uniform_divergence(logits_NMC) * real_N1
    chosen_NM = _choose(ce_NM.detach(), kl_NM.detach(), k, beta, group_N, groups)
    other_NM = kl_NM
    if labels == "stochastic":
        drawn_NM = torch.randint(logits_NMC.shape[2], ce_NM.shape, device=ce_NM.device)
        other_NM = _cross_entropy(log_p_NMC, drawn_NM) * real_N1
    loss_N = torch.where(chosen_NM, ce_NM, beta * other_NM).sum(1)
    return OracleLoss(loss_N, chosen_NM & real_N1)


def _cross_entropy(log_p_NMC: Tensor, target_NM: Tensor) -> Tensor:
    return -log_p_NMC.gather(2, target_NM[..., None])[..., 0]


def _choose(ce_NM: Tensor, kl_NM: Tensor, k: int, beta: float, group_N: Tensor | None,
            groups: int) -> Tensor:
    if group_N is None:
        return responsible(ce_NM, kl_NM, k, beta)
    total_2GM = [x.new_zeros(groups, x.shape[1]).index_add_(0, group_N, x) for x in (ce_NM, kl_NM)]
    return responsible(total_2GM[0], total_2GM[1], k, beta)[group_N]


def ensemble_errors(logits_NMC: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the oracle error and the top-1 error of each sample, both bool [N].

    The oracle error is True if no member predicts the correct class. The top-1 error is True if the
    class with the largest mean probability is wrong.

    Args:
        logits_NMC: logits of all members, float [N, M, C].
        target_N: class of each sample, int64 [N].
    """
    right_NM = logits_NMC.argmax(-1) == target_N[:, None]
    mean_NC = F.softmax(logits_NMC.float(), dim=-1).mean(1)
    return ~right_NM.any(1), mean_NC.argmax(1) != target_N


def sequence_oracle_loss(logits_BTMC: Tensor, target_BT: Tensor, real_BT: Tensor, k: int,
                         beta: float, *, labels: str = "exact",
                         by_sequence: bool = True) -> tuple[OracleLoss, dict[str, Tensor]]:
    """Compute the confident oracle loss and the errors of each token.

    Args:
        logits_BTMC: logits of all members, float [B, T, M, C].
        target_BT: class of each token, int64 [B, T].
        real_BT: bool [B, T], False for padding.
        k: see `confident_oracle_loss`.
        beta: see `confident_oracle_loss`.
        labels: see `confident_oracle_loss`.
        by_sequence: whether all tokens of a sequence have the same responsible members.
    Returns: The loss of each token, computed with the members responsible for it, float32 [B * T].
        The second value contains the errors of all tokens, bool [B * T], by name: "oracle" (no
        member is correct) and "top1" (the mean of the members is wrong). For padding, both errors
        are False.
    """
    result = sequence_oracle(logits_BTMC, target_BT, real_BT, k, beta, labels=labels,
                             by_sequence=by_sequence)
    real_N = real_BT.flatten()
    oracle_N, top1_N = ensemble_errors(logits_BTMC.detach().flatten(0, 1), target_BT.flatten())
    return result, {"oracle": oracle_N & real_N, "top1": top1_N & real_N}


def sequence_oracle(logits_BTMC: Tensor, target_BT: Tensor, real_BT: Tensor, k: int, beta: float, *,
                    labels: str = "exact", by_sequence: bool = True) -> OracleLoss:
    """Compute `confident_oracle_loss` for all tokens. Arguments: see `sequence_oracle_loss`."""
    batch, length = target_BT.shape
    group_N = torch.arange(batch, device=target_BT.device).repeat_interleave(length)
    return confident_oracle_loss(logits_BTMC.flatten(0, 1), target_BT.flatten(), k, beta,
                                 labels=labels, mask_N=real_BT.flatten(),
                                 group_N=group_N if by_sequence else None, groups=batch)


def sequence_errors(logits_BTMC: Tensor, target_BT: Tensor, by_sequence: bool) -> dict[str, Tensor]:
    """Return the fraction of wrong tokens in each sequence, float64 [B], for each type of error.

    "top1" is the error of the mean of the members' predictions. "member" is the mean of the errors
    of the individual members. "oracle" is the error of the best member of each sequence. If
    `by_sequence` is False, "oracle" uses the best member of each token, so a token is wrong only if
    no member is correct.

    Args:
        logits_BTMC: logits of all members, float [B, T, M, C].
        target_BT: class of each token, int64 [B, T].
        by_sequence: whether to select the best member per sequence (True) or per token (False).
    """
    wrong_BTM = (logits_BTMC.argmax(-1) != target_BT[..., None]).double()
    mean_BTC = F.softmax(logits_BTMC.float(), dim=-1).mean(2)
    oracle_B = wrong_BTM.mean(1).amin(1) if by_sequence else wrong_BTM.amin(2).mean(1)
    return {"top1": (mean_BTC.argmax(-1) != target_BT).double().mean(1), "oracle": oracle_B,
            "member": wrong_BTM.mean((1, 2))}


def confidence_histograms(logits_NMC: Tensor, chosen_NM: Tensor,
                          real_N: Tensor) -> dict[str, Tensor]:
    """Compute histograms of the confidence of the predictions. `HISTOGRAMS` contains their names.

    The three histograms, float64 [BINS], describe the members that are responsible for a sample,
    all other members, and the mean of the members; see `confidence_counts`.

    Args:
        logits_NMC: float [N, M, C].
        chosen_NM: bool [N, M]. Entry [n, m] is True if member m is responsible for sample n.
        real_N: bool [N], False for samples to be ignored.
    """
    p_NMC, real_N1 = F.softmax(logits_NMC.detach().float(), dim=-1), real_N[:, None]
    shown = {"responsible": (p_NMC, chosen_NM & real_N1), "other": (p_NMC, ~chosen_NM & real_N1),
             "ensemble": (p_NMC.mean(1), real_N)}
    return {name: confidence_counts(*shown[name], BINS) for name in HISTOGRAMS}


def confidence_counts(p: Tensor, counted: Tensor, bins: int) -> Tensor:
    """Count how often a distribution's largest probability is in each interval of 0..1, [bins].

    Args:
        p: class probabilities of each distribution, float [..., C].
        counted: bool [...], False for distributions to be ignored.
        bins: number of intervals.
    """
    bin_index = (p.amax(-1) * bins).long().clamp(max=bins - 1)
    return torch.bincount(bin_index[counted], minlength=bins).double()


def share_features(features: Tensor, probability: float, training: bool, dim: int = -2) -> Tensor:
    """Add random features of other members to each member: `h_m + sum_{n != m} s_nm * h_n`.

    Each element of s_nm is 1 with the given probability, and otherwise 0. Outside of training,
    `s_nm` is replaced by its mean. Source: CMCL, section 3.3.

    Args:
        features: float tensor with one axis for the members.
        probability: probability with which an element of `s_nm` is 1.
        training: whether to draw `s_nm` at random (True) or to use its mean (False).
        dim: axis of `features` that corresponds to the members.
    Raises:
        ValueError: If the probability is outside [0, 1].
    """
    if not 0 <= probability <= 1:
        raise ValueError(f"sharing probability {probability} is out of bounds: must be in [0, 1]; "
                         "use 0 for no sharing")
    if probability == 0 or features.shape[dim] == 1:
        return features
    if not training:
        return features + probability * (features.sum(dim, keepdim=True) - features)
    members = features.unbind(dim)
    mixed = []
    for m, member in enumerate(members):
        others = [
            torch.bernoulli(torch.full_like(h, probability)) * h for n, h in enumerate(members)
            if n != m
        ]
        mixed.append(member + torch.stack(others).sum(0))
    return torch.stack(mixed, dim)


class EnsembleHeads(nn.Module):
    """M output heads, each with a hidden layer (gelu) and a linear layer to C classes.

    Args:
        dim: width of the input features.
        classes: number of classes, C.
        heads: number of heads, M.
        hidden: width of each head's hidden layer. If 0, each head is a single linear layer.
        sharing: probability with which a feature of one head is added to the features of another
            head (see `share_features`). If the probability is 0, features are not shared. Sharing
            requires a hidden layer.
        dtype: dtype of the parameters.
        device: device of the parameters.
    Raises:
        ValueError: If `heads` is less than 1, or if features are shared without a hidden layer.
    """

    def __init__(self, dim: int, classes: int, heads: int, *, hidden: int = 0, sharing: float = 0.0,
                 dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads={heads} is out of bounds: must be >= 1; use e.g. 5")
        if sharing and not hidden:
            raise ValueError(f"sharing={sharing} has no effect: it must be 0 without a hidden "
                             "layer; set `hidden`, or use sharing=0")
        where = {"dtype": dtype, "device": device}
        self.sharing = sharing
        hidden_MDH = torch.empty(heads, dim, hidden, **where) if hidden else None
        self.w_hidden_MDH = None if hidden_MDH is None else nn.Parameter(hidden_MDH)
        self.w_out_MHC = nn.Parameter(torch.empty(heads, hidden or dim, classes, **where))
        for parameter in self.parameters():
            for head in parameter:
                nn.init.xavier_uniform_(head)

    def forward(self, x: Tensor, own: bool = False) -> Tensor:
        """Return the logits of all heads, float [..., M, C].

        Args:
            x: output of the model before the heads, float [..., D].
            own: whether `x` contains separate features for each head, with shape [..., M, D].
        """
        inputs = "...md" if own else "...d"
        if self.w_hidden_MDH is None:
            return torch.einsum(f"{inputs},mdc->...mc", x, self.w_out_MHC)
        h_MH = F.gelu(torch.einsum(f"{inputs},mdh->...mh", x, self.w_hidden_MDH))
        return torch.einsum("...mh,mhc->...mc", share_features(h_MH, self.sharing, self.training),
                            self.w_out_MHC)
