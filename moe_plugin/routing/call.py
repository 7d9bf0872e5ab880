"""`RoutingCall`: what a router and its losses know of one call."""

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


# Token ids and sequences for routers and losses that need them (router hash, loss sequence), and
# checks of them.
def check_integers(name: str, values_T: Tensor, tokens: int) -> None:
    """`ValueError` unless `values_T` is an integer tensor of shape [tokens]; name: in messages."""
    if tuple(values_T.shape) != (tokens,):
        raise ValueError(f"{name} of shape {tuple(values_T.shape)} does not fit: must be "
                         f"{(tokens,)}, one for each token")
    dtype = values_T.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(f"{name} of dtype {dtype} does not fit: must be integers; pass "
                         f"{name}.long()")


def check_range(values: Tensor, first: int, last: int, message: str) -> None:
    """`ValueError` unless all integers are in first..last. The host does not wait for a GPU: there
    the device stops with an assertion, which the host meets at its next wait.

    Args:
        values: int, any shape.
        first, last: the smallest and the largest allowed value.
        message: `message.format(low, high)` with the values that there are.
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
    """Base of a host's MoE layers, to which `hand_token_ids` hands token ids.

    Attributes:
        needs: what the layer's router needs of a call, see `RouterModule.needs`.
        tokens_BT: int64 [B, T], token ids of the next call; None: not given.
    """

    needs: frozenset[str] = frozenset()
    tokens_BT: Tensor | None = None


def hand_token_ids(model: nn.Module, *names: str) -> None:
    """Hand a model's token ids [B, T] to the MoE layers in it that need them.

    It does so before each forward pass.

    Args:
        model: its token ids are its first positional argument, or a keyword argument.
        names: keyword arguments that may hold them, first match first.
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
    """What the router needs to know of a batch; None where it needs nothing.

    Args:
        x_TBD: [T, B, D] tokens, position after position; [B, T, D] with `batch_axis` 0.
        ids_TB: int64, the same axes: their ids, where the router needs them.
        needs: of the router.
        batch_axis: axis that counts sequences, 0 or 1.
    """
    if not needs:
        return None
    batch = x_TBD.shape[batch_axis]
    sequence = torch.arange(batch, device=x_TBD.device).unsqueeze(1 - batch_axis)
    sequence_TB = sequence.expand(x_TBD.shape[:2])
    return TokenInfo(ids_TB, sequence_TB if "sequences" in needs else None, batch)


@dataclass(eq=False)
class RoutingCall:
    """One call of a router: its hooks fill it step by step, its losses read it.

    Attributes:
        logits_TE: noisy logits, of hook `scores`, in float32 or float64.
        ids_TK: int64, chosen experts (all k, before policies and capacity), -1: none.
        mask_T: bool, True = real token; None: all are.
        k: experts per token.
        info: what else is known of the tokens.
        noise: standard deviation of the logits' noise (already divided by E), 0 without noise.
        score: what makes scores of logits.
        divides: weights are divided by their sum over the choices, that is, by
            max(sum + added, least).
        one_pass: choice, weights and sums come from one kernel; False: step by step.
        reads_z: a loss reads the logits' logsumexp.
        leaves_none: no choice of a real token is -1; False: perhaps some are.
        replays_whole: nor in a recording of any router of this class, on however many nodes.
        comm: ranks that share the batch's tokens; None: this rank has them all.
        clean_TE: logits without noise; None: the same.
        deviation_TE: standard deviation of each logit's own noise (noisy_topk).
        outside_TE: bool, experts that a token could not choose (of groups not chosen).
        penalty_E: link penalties of this rank, mean 1.
        step_load_E: int64 [E + 1], choices by expert, and tokens (last element), of all ranks and
            micro-batches of the step so far, including this one.
        priority_T, passthrough_T, chosen_TK: see `moe_plugin.records.Routing`.
        routed: choice, weights and sums over tokens of one pass; None: the router made none. Its z
            may be None: from `logits_TE`.
    """

    logits_TE: Tensor = None  # until hook `scores`
    ids_TK: Tensor = None  # until hook `select`
    mask_T: Tensor | None = None
    k: int = 1
    # no objects as defaults: up to torch 2.11 its compiler wraps none that it finds in a class
    info: TokenInfo = None  # of every call of a router
    noise: float = 0.0
    score: ScoreFunction = None  # of every call of a router
    divides: bool = False
    added: float = ADDED
    least: float = 0.0
    one_pass: bool = False
    reads_z: bool = True
    leaves_none: bool = False
    replays_whole: bool = False
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
    # computed when read; not cached_property, whose lock all instances (ranks as threads) share up
    # to 3.11
    _scores_TE: Tensor | None = field(default=None, repr=False)
    _probs_TE: Tensor | None = field(default=None, repr=False)
    _clean_probs_TE: Tensor | None = field(default=None, repr=False)
    _count: Tensor | float | None = field(default=None, repr=False)
    _load_KE: Tensor | None = field(default=None, repr=False)

    def choose(self, chosen_TK: Tensor | None = None, *, bias_E: Tensor | None = None,
               groups: int = 0, take: int = 1, best: int = 1) -> Tensor:
        """The k best experts of each token, int64 [T, K], or `chosen_TK`; sets `routed`.

        Args:
            chosen_TK: int64, without -1.
            bias_E: added to the scores for the choice alone.
            groups, take, best: see `moe_plugin.kernels.router.Rule`.
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
        """Weights [T, K] of chosen experts: their scores, divided by their sum with `divides`.

        ids_TK: int64, from `choose`, repeated from a recording, or of a choice of one's own.
        """
        if self.routed is not None and self.routed.ids_TK is ids_TK:
            self.leaves_none = True
        elif self.leaves_none and (
                inside_backward() or (self.replays_whole and self.routed is None)):
            self.choose(ids_TK)  # a recomputation, or a replay, gives the bits of the first pass
        else:
            return self._weights_of_some(ids_TK)
        return self.routed.weights_TK

    def _weights_of_some(self, ids_TK: Tensor) -> Tensor:
        """Where choices may be -1, which a pass cannot leave out of its sum."""
        divides, self.divides, self.leaves_none = self.divides, False, False
        self.choose(ids_TK.clamp(min=0))
        self.divides = divides
        weights_TK = self.routed.weights_TK * (ids_TK >= 0)
        return shares_of_rest(weights_TK, self.added, self.least) if divides else weights_TK

    @property
    def experts(self) -> int:
        """E."""
        return self.logits_TE.shape[1]

    @property
    def real_T(self) -> Tensor:
        """`mask_T`, or True for every token, bool [T]."""
        if self.mask_T is not None:
            return self.mask_T
        return self.logits_TE.new_ones(self.logits_TE.shape[0], dtype=torch.bool)

    @property
    def scores_TE(self) -> Tensor:
        """Scores of all experts; a router may set others than those of `score`."""
        if self._scores_TE is None:
            self._scores_TE = self.score.scores(self.logits_TE)
        return self._scores_TE

    @scores_TE.setter
    def scores_TE(self, scores_TE: Tensor) -> None:
        self._scores_TE = scores_TE

    @property
    def probs_TE(self) -> Tensor:
        """Scores whose rows sum to 1; a router may set others."""
        if self._probs_TE is None:
            self._probs_TE = self.score.shares(self.scores_TE)
        return self._probs_TE

    @probs_TE.setter
    def probs_TE(self, probs_TE: Tensor) -> None:
        self._probs_TE = probs_TE

    @property
    def clean_probs_TE(self) -> Tensor:
        """`probs_TE` without noise."""
        if self.clean_TE is None or self.clean_TE is self.logits_TE:
            return self.probs_TE
        if self._clean_probs_TE is None:
            self._clean_probs_TE = self.score.shares(self.score.scores(self.clean_TE))
        return self._clean_probs_TE

    @property
    def margin_TE(self) -> Tensor | None:
        """(clean logit - k-th largest noisy logit of the other experts) / deviation of the noise;
        None without noise of one's own. With k = E every expert is always in.
        """
        if self.deviation_TE is None:
            return None
        clean_TE, k = self.clean_TE, self.k
        if k == self.experts:
            return torch.full_like(clean_TE, float("inf")) + 0 * clean_TE
        top_T2 = self.logits_TE.topk(k + 1, dim=1).values[:, k - 1:]
        # for a chosen expert the k-th largest of the others is the (k+1)-th of all, else the k-th
        threshold_TE = torch.where(self.unchosen_TE, top_T2[:, :1], top_T2[:, 1:])
        return (clean_TE - threshold_TE) / self.deviation_TE

    @property
    def unchosen_TE(self) -> Tensor:
        """Whether a token has not chosen an expert, bool [T, E]; of complete choices."""
        return torch.ones_like(self.logits_TE, dtype=torch.bool).scatter_(1, self.ids_TK, False)

    @property
    def count(self) -> Tensor | float:
        """Number of real tokens of the group, scalar >= 1 (a divisor); a tensor in the scores'
        dtype where the host does not know it.
        """
        if self._count is None:
            if self.mask_T is None and self.comm is None:
                self._count = max(1, self.ids_TK.shape[0])
            else:
                total = self.total(self.own_count())
                self._count = total.clamp(min=1).to(self.logits_TE.dtype)
        return self._count

    def own_count(self) -> Tensor:
        """Number of real tokens of this rank, scalar int64."""
        if self.mask_T is not None:
            return self.mask_T.sum()
        tokens, device = self.ids_TK.shape[0], self.ids_TK.device
        return torch.full((), tokens, dtype=torch.int64, device=device)

    @property
    def own_load_KE(self) -> Tensor:
        """Tokens of this rank whose j-th choice is expert e, int64 [K, E]."""
        if self._load_KE is None:
            self._load_KE = expert_load(self.ids_TK, self.experts, self.mask_T, per_choice=True,
                                        complete=self.leaves_none and self.mask_T is None)
        return self._load_KE

    def load_E(self) -> Tensor:
        """Tokens of the group by expert over all choices, [E] in the scores' dtype."""
        return self.total(self.own_load_KE.sum(0).to(self.logits_TE.dtype))

    def first_load_E(self) -> Tensor:
        """Tokens of the group by first choice, [E] in the scores' dtype."""
        return self.total(self.own_load_KE[0].to(self.logits_TE.dtype))

    def real(self, values: Tensor) -> Tensor:
        """Values of tokens, [T] or [T, n], times 0 for padding."""
        if self.mask_T is None:
            return values
        return values * (self.mask_T if values.dim() == 1 else self.mask_T[:, None])

    def importance_E(self) -> Tensor:
        """Sum of the scores over real tokens by expert, [E]."""
        if self.routed is not None:
            return self.routed.importance_E
        return self.real(self.probs_TE).sum(0)

    def squared_z(self) -> Tensor:
        """Sum of logsumexp(logits)^2 over real tokens."""
        if self.routed is not None and self.routed.z is not None:
            return self.routed.z
        return self.real(torch.logsumexp(self.logits_TE, dim=1).square()).sum()

    def entropy(self) -> Tensor:
        """Mean entropy in nats of the scores over this rank's real tokens; no gradient."""
        count = (max(1, self.ids_TK.shape[0]) if self.mask_T is None else
                 self.mask_T.sum().clamp(min=1))
        if self.routed is not None:
            return self.routed.p_log_p / -count
        p_TE = self.probs_TE.detach()
        p_log_p_T = (p_TE * p_TE.clamp(min=torch.finfo(p_TE.dtype).tiny).log()).sum(1)
        return self.real(p_log_p_T).sum() / -count

    def total(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks that share the batch."""
        return x if self.comm is None else self.comm.all_reduce(x)

    def share(self) -> float:
        """The part that this rank reports of a loss that every rank of the group computes."""
        return 1.0 if self.comm is None else 1.0 / self.comm.size
