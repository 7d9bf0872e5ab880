"""`RoutingCall`: the data of one router call, which the router's hooks and losses share.

The module also contains functions that check token ids and sequence numbers, and that pass token
ids from a model to its MoE layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.kernels import expert_load, route, route_by_steps
from moe_plugin.kernels.router import Routed, Rule
from moe_plugin.kernels.scores import ADDED, ScoreFunction, shares_of_rest
from moe_plugin.records import TokenInfo
from moe_plugin.utils.machine import inside_backward


# Token ids and sequence numbers are needed only by some routers and losses (router hash, loss
# sequence).
def check_integers(name: str, values_T: Tensor, tokens: int) -> None:
    """Raise a `ValueError` unless `values_T` is an integer tensor of shape [tokens].

    name: name of the tensor, for use in error messages.
    """
    if tuple(values_T.shape) != (tokens,):
        raise ValueError(f"The tensor {name} has shape {tuple(values_T.shape)}, but must have "
                         f"shape {(tokens,)}, one value per token.")
    dtype = values_T.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"The tensor {name} has dtype {dtype}, but must contain integers. Pass "
                         f"{name}.long().")


def check_range(values: Tensor, first: int, last: int, message: str) -> None:
    """Raise a `ValueError` unless every integer is at least `first` and at most `last`.

    The host does not wait for the GPU. On a GPU, a failed check triggers an assertion on the
    device. The host is informed of the assertion when it next synchronizes with the device.

    Args:
        values: integer tensor of any shape.
        first, last: smallest and largest allowed integer.
        message: template of the error message. The message is `message.format(low, high)`, where
            `low` and `high` are the smallest and the largest element of `values`.
    """
    if not values.numel() or torch.compiler.is_compiling() or values.is_meta:
        return
    if values.device.type != "cpu":
        torch._assert_async(((values >= first) & (values <= last)).all(),
                            message.format(f"below {first}", f"or above {last}"))
        return
    low, high = int(values.min()), int(values.max())
    if not first <= low <= high <= last:
        raise ValueError(message.format(low, high))


class TakesTokenIds:
    """Base class for the MoE layers of a host framework that receive token ids from
    `hand_token_ids`.

    Attributes:
        needs: names of the token information that the layer's router needs; see
            `RouterModule.needs`.
        tokens_BT: int64 [B, T], the token ids for the next call, or None if none were passed.
    """

    needs: frozenset[str] = frozenset()
    tokens_BT: Tensor | None = None


def hand_token_ids(model: nn.Module, *names: str) -> None:
    """Register a hook that passes a model's token ids [B, T] to the MoE layers that need them.

    The hook runs before each forward pass of the model.

    Args:
        model: model that receives token ids as its first positional argument or as a keyword
            argument.
        names: names of the keyword arguments that may contain the token ids. If several of the
            named arguments are passed, the argument that comes first in `names` is used.
    """
    layers = [m for m in model.modules() if isinstance(m, TakesTokenIds) and "token_ids" in m.needs]

    def hand_over(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[:1], *(kwargs[name] for name in names if name in kwargs), None]
        for layer in layers:
            layer.tokens_BT = given[0]

    if layers:
        model.register_forward_pre_hook(hand_over, with_kwargs=True)


def token_info(x_TBD: Tensor, ids_TB: Tensor | None, needs: frozenset[str],
               batch_axis: int = 1) -> TokenInfo | None:
    """Return the token information that a router needs, or None if it needs no information.

    Args:
        x_TBD: tokens [T, B, D], or [B, T, D] if `batch_axis` is 0.
        ids_TB: int64, the token ids, whose axes are in the same order as the first two axes of
            `x_TBD`. Token ids are required only if the router reads them.
        needs: the router's `RouterModule.needs` attribute.
        batch_axis: index of the axis of `x_TBD` that enumerates the sequences, 0 or 1.
    """
    if not needs:
        return None
    batch = x_TBD.shape[batch_axis]
    sequence = torch.arange(batch, device=x_TBD.device).unsqueeze(1 - batch_axis)
    sequence_TB = sequence.expand(x_TBD.shape[:2])
    return TokenInfo(ids_TB, sequence_TB if "sequences" in needs else None, batch)


@dataclass(eq=False)
class RoutingCall:
    """The data of one call of a router.

    The router's hooks set the fields one after another, and the router's losses read them.

    Attributes:
        logits_TE: logits with noise, computed by the `scores` hook in float32 or float64.
        ids_TK: int64, the chosen experts before any policy or capacity drops choices. A value of -1
            means that the choice has no expert.
        mask_T: bool, True for tokens that are not padding. `mask_T` is None if all tokens are real.
        k: number of experts per token.
        info: additional information about the tokens.
        noise: standard deviation of the noise in the logits, already divided by E, or 0 without
            noise.
        score: function that converts logits to scores.
        divides: True if the weights are divided by `max(sum over the choices + added, least)`.
        one_pass: True if a single kernel computes the choices, weights and sums. If `one_pass` is
            False, the choices, weights and sums are computed in separate steps.
        reads_z: True if a configured loss needs the logsumexp of the logits.
        leaves_none: True if every real token has an expert for each of its choices. If
            `leaves_none` is False, some choices may be -1.
        replays_whole: True if recordings of this router class never contain -1 for a real token,
            for any number of nodes.
        balances_best: True if losses count the k experts with the largest logits of each token
            instead of the chosen experts, as Megatron's router does when choices are replayed.
        comm: group of ranks whose tokens form the batch, or None if this rank has the whole batch.
        clean_TE: logits without noise, or None if no noise was added to the logits.
        deviation_TE: standard deviation of the noise for each logit (noisy_topk).
        outside_TE: bool, True for experts that do not belong to the groups chosen for the token.
        penalty_E: penalty of each expert for the link between this rank and the expert. The mean of
            all penalties is 1.
        step_load_E: int64 [E + 1], the number of choices of each expert, followed by the number of
            tokens. The counts include all ranks and all micro-batches of the step, up to and
            including this call.
        priority_T, passthrough_T, chosen_TK: see `moe_plugin.records.Routing`.
        routed: choices, weights and sums over tokens, as returned by `route` or `route_by_steps`.
            `routed` is None if the router uses neither `route` nor `route_by_steps`. If the `z`
            field of `routed` is None, z is computed from `logits_TE`.
    """

    logits_TE: Tensor = None  # type: ignore[assignment]  # until hook `scores`
    ids_TK: Tensor = None  # type: ignore[assignment]  # until hook `select`
    mask_T: Tensor | None = None
    k: int = 1
    # Defaults are None, not objects: up to version 2.11, torch's compiler cannot wrap objects that
    # it finds in a class. Every call of a router sets `info` and `score`.
    info: TokenInfo = None  # type: ignore[assignment]
    noise: float = 0.0
    score: ScoreFunction = None  # type: ignore[assignment]
    divides: bool = False
    added: float = ADDED
    least: float = 0.0
    one_pass: bool = False
    reads_z: bool = True
    leaves_none: bool = False
    replays_whole: bool = False
    balances_best: bool = False
    comm: Comm | None = None
    clean_TE: Tensor | None = None
    deviation_TE: Tensor | None = None
    outside_TE: Tensor | None = None
    penalty_E: Tensor | None = None
    step_load_E: Tensor | None = None
    priority_T: Tensor | None = None
    passthrough_T: Tensor | None = None
    chosen_TK: Tensor | None = None
    routed: Routed | None = None
    # Computed on first access. `cached_property` is not used, because up to Python 3.11 all
    # instances share its lock, and ranks may run as threads.
    _scores_TE: Tensor | None = field(default=None, repr=False)
    _probs_TE: Tensor | None = field(default=None, repr=False)
    _clean_probs_TE: Tensor | None = field(default=None, repr=False)
    _count: Tensor | float | None = field(default=None, repr=False)
    _load_KE: Tensor | None = field(default=None, repr=False)

    def choose(self, chosen_TK: Tensor | None = None, *, bias_E: Tensor | None = None,
               groups: int = 0, take: int = 1, best: int = 1) -> Tensor:
        """Choose the k best experts of each token, or use given choices. The method also sets
        `routed`.

        Args:
            chosen_TK: int64, choices without -1 to use instead of the k best experts. Optional.
            bias_E: bias that is added to the scores when experts are chosen, but not when weights
                are computed. Optional.
            groups, take, best: see `moe_plugin.kernels.router.Rule`.

        Returns: int64 [T, K], the chosen experts.
        """
        rule = Rule(self.k, self.divides, self.score, groups, take, best, self.reads_z, self.added,
                    self.least)
        if self.one_pass:
            self.routed = route(self.logits_TE, self.mask_T, rule, chosen_TK, bias_E)
        else:
            self.routed = route_by_steps(self.logits_TE, self.scores_TE, self.probs_TE,
                                         self.mask_T, rule, chosen_TK, bias_E)
        return self.routed.ids_TK

    def weights_of(self, ids_TK: Tensor) -> Tensor:
        """Return the weights [T, K] of the chosen experts.

        The weights are the scores. If `divides` is true, the scores are divided by their sum.

        ids_TK: int64, the chosen experts, which were returned by `choose`, read from a recording,
            or chosen by the router itself.
        """
        if self.routed is not None and self.routed.ids_TK is ids_TK:
            self.leaves_none = True
        elif self.leaves_none and (
                inside_backward() or (self.replays_whole and self.routed is None)):
            # The same kernel as in the first pass, so that the weights agree in every bit.
            self.choose(ids_TK)
        else:
            return self._weights_of_some(ids_TK)
        assert self.routed is not None
        return self.routed.weights_TK

    def _weights_of_some(self, ids_TK: Tensor) -> Tensor:
        """Return the weights of choices when some choices may be -1. The kernel cannot exclude
        choices of -1 from the sum of the scores.
        """
        # The weights are divided only after the choices of -1 were set to 0.
        divides, self.divides, self.leaves_none = self.divides, False, False
        self.choose(ids_TK.clamp(min=0))
        self.divides = divides
        assert self.routed is not None
        weights_TK = self.routed.weights_TK * (ids_TK >= 0)
        return shares_of_rest(weights_TK, self.added, self.least) if divides else weights_TK

    @property
    def experts(self) -> int:
        """Number of experts, E."""
        return self.logits_TE.shape[1]

    @property
    def real_T(self) -> Tensor:
        """`mask_T` as bool [T], or a tensor that is True for every token if there is no mask."""
        if self.mask_T is not None:
            return self.mask_T
        return self.logits_TE.new_ones(self.logits_TE.shape[0], dtype=torch.bool)

    @property
    def scores_TE(self) -> Tensor:
        """Scores [T, E], computed by `score` by default. A router may replace the scores."""
        if self._scores_TE is None:
            self._scores_TE = self.score.scores(self.logits_TE)
        return self._scores_TE

    @scores_TE.setter
    def scores_TE(self, scores_TE: Tensor) -> None:
        self._scores_TE = scores_TE

    @property
    def probs_TE(self) -> Tensor:
        """Scores normalized so that each row sums to 1. A router may replace this tensor."""
        if self._probs_TE is None:
            self._probs_TE = self.score.shares(self.scores_TE)
        return self._probs_TE

    @probs_TE.setter
    def probs_TE(self, probs_TE: Tensor) -> None:
        self._probs_TE = probs_TE

    @property
    def clean_probs_TE(self) -> Tensor:
        """Like `probs_TE`, but computed from the logits without noise."""
        if self.clean_TE is None or self.clean_TE is self.logits_TE:
            return self.probs_TE
        if self._clean_probs_TE is None:
            self._clean_probs_TE = self.score.shares(self.score.scores(self.clean_TE))
        return self._clean_probs_TE

    @property
    def margin_TE(self) -> Tensor | None:
        """For each expert, `(clean logit - k-th largest noisy logit of the other experts) /
        (deviation of the noise)`.

        The margin is None if the deviation of the noise is not learned. If k = E, the margin is
        infinite, because every expert is always chosen.
        """
        if self.deviation_TE is None:
            return None
        clean_TE, k = self.clean_TE, self.k
        assert clean_TE is not None
        if k == self.experts:
            # 0 * clean_TE connects the result to the graph, so that its gradients are zeros.
            return torch.full_like(clean_TE, float("inf")) + 0 * clean_TE
        top_T2 = self.logits_TE.topk(k + 1, dim=1).values[:, k - 1:]
        # The k-th largest logit of the other experts is the (k+1)-th of all experts for a chosen
        # expert, and the k-th of all experts for any other expert.
        threshold_TE = torch.where(self.unchosen_TE, top_T2[:, :1], top_T2[:, 1:])
        return (clean_TE - threshold_TE) / self.deviation_TE

    @property
    def unchosen_TE(self) -> Tensor:
        """Bool [T, E], True for experts that a token did not choose. No choice may be -1."""
        return torch.ones_like(self.logits_TE, dtype=torch.bool).scatter_(1, self.ids_TK, False)

    @property
    def count(self) -> Tensor | float:
        """Number of real tokens in the group, but at least 1, so that it can be used as a divisor.

        If the host does not know the number of tokens, `count` is a tensor in the dtype of the
        scores.
        """
        if self._count is None:
            if self.mask_T is None and self.comm is None:
                self._count = max(1, self.ids_TK.shape[0])
            else:
                total = self.total(self.own_count())
                self._count = total.clamp(min=1).to(self.logits_TE.dtype)
        return self._count

    def own_count(self) -> Tensor:
        """Return the number of real tokens on this rank as an int64 scalar tensor."""
        if self.mask_T is not None:
            return self.mask_T.sum()
        tokens, device = self.ids_TK.shape[0], self.ids_TK.device
        return torch.full((), tokens, dtype=torch.int64, device=device)

    @property
    def own_load_KE(self) -> Tensor:
        """Int64 tensor [K, E]: the number of this rank's tokens whose j-th choice is expert e."""
        if self._load_KE is None:
            self._load_KE = expert_load(self.ids_TK, self.experts, self.mask_T, per_choice=True,
                                        complete=self.leaves_none and self.mask_T is None)
        return self._load_KE

    def balanced_ids_TK(self) -> Tensor:
        """Return the choices that losses count, int64 [T, K]."""
        if self.balances_best:
            return self.logits_TE.detach().topk(self.k, dim=1).indices
        return self.ids_TK

    def balanced_load_KE(self) -> Tensor:
        """Return the loads of the choices that losses count, int64 [K, E]. Unless `balances_best`
        is true, they are `own_load_KE`.
        """
        if self.balances_best:
            return expert_load(self.balanced_ids_TK(), self.experts, self.mask_T, per_choice=True)
        return self.own_load_KE

    def load_E(self) -> Tensor:
        """How often the group's tokens chose each expert, [E] in the dtype of the scores."""
        load_KE = self.balanced_load_KE() if self.balances_best else self.own_load_KE
        return self.total(load_KE.sum(0).to(self.logits_TE.dtype))

    def first_load_E(self) -> Tensor:
        """For each expert, return how often it is the first choice of a token of the group, [E] in
        the dtype of the scores.
        """
        load_KE = self.balanced_load_KE() if self.balances_best else self.own_load_KE
        return self.total(load_KE[0].to(self.logits_TE.dtype))

    def real(self, values: Tensor) -> Tensor:
        """Return values [T] or [T, n], with the values of padding tokens set to 0."""
        if self.mask_T is None:
            return values
        return values * (self.mask_T if values.dim() == 1 else self.mask_T[:, None])

    def importance_E(self) -> Tensor:
        """For each expert, return the sum of its scores over the real tokens, [E]."""
        if self.routed is not None:
            return self.routed.importance_E
        return self.real(self.probs_TE).sum(0)

    def squared_z(self) -> Tensor:
        """Return the sum of `logsumexp(logits)^2` over real tokens."""
        if self.routed is not None and self.routed.z is not None:
            return self.routed.z
        return self.real(torch.logsumexp(self.logits_TE, dim=1).square()).sum()

    def entropy(self) -> Tensor:
        """Return the mean entropy of the scores over this rank's real tokens in nats, detached."""
        count = (max(1, self.ids_TK.shape[0]) if self.mask_T is None else
                 self.mask_T.sum().clamp(min=1))
        if self.routed is not None:
            return self.routed.p_log_p / -count
        p_TE = self.probs_TE.detach()
        # The smallest normal number in the logarithm makes 0 log 0 count as 0.
        p_log_p_T = (p_TE * p_TE.clamp(min=torch.finfo(p_TE.dtype).tiny).log()).sum(1)
        return self.real(p_log_p_T).sum() / -count

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that share the batch."""
        return x if self.comm is None else self.comm.all_reduce(x)

    def share(self) -> float:
        """Return the fraction of a loss that each rank reports if all ranks compute all of it."""
        return 1.0 if self.comm is None else 1.0 / self.comm.size
