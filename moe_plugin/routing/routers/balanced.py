"""Routers that balance the load within each call: BASE, Sinkhorn and expert choice.

BASE uses an auction, which assigns the same number of tokens to every expert. In each round, every
token that has no expert bids for the expert with the largest `v(t, e) - p_e`, where v is the score
and p the price of the expert. A bid is the expert's price, plus the difference between the token's
largest and second-largest value of `v - p`, plus epsilon. An expert with n slots accepts the n
highest bids. The new price of the expert is the lowest of these bids (Bertsekas and Castanon 1989:
auction for similar objects). All tokens bid at the same time, on the device that stores the scores.
When all slots are occupied, the sum of the chosen scores is below the largest possible sum by at
most epsilon per token. The bound on the sum holds for any initial prices. The auction starts with
prices at which all experts have the same soft demand, which reduces the number of rounds. All
functions in this module are pure, do not support gradients, and compute in float32 (in float64 for
float64 scores).

For example, 4,096 tokens with normally distributed scores and 64 experts need about 60 rounds. The
sum of the chosen scores is below the optimum by only 1e-6 of the spread of the scores per token,
which is far less than the bound.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.kernels import top_k_stable
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import SCORED, SEVERAL, keep_init
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router
from moe_plugin.utils.tensors import fill_

EPSILON = 2e-3  # relative to the spread of the scores
COOLING = (0.1, 0.03, 0.01)  # temperatures of soft demand, relative to the spread
ROUNDS = 4  # rounds of soft demand at each temperature
MOST_ROUNDS = 4096  # afterwards, tokens without an expert get any free slot
LOOK = 8  # rounds between two checks whether all tokens have an expert; a check waits for a GPU
LARGEST = 1e18  # scores up to here have finite sums and differences in float32


def balanced_assignment(scores_TE: Tensor) -> Tensor:
    """Return the expert of each token, int64 [T]. Each expert gets at most ceil(T / E) tokens.

    The sum of the chosen scores is the largest possible sum, with an error of at most `EPSILON`
    times the spread of the scores (largest minus smallest) per token. If T is not divisible by E,
    dummy tokens with a score of 0 are added. The error bound also counts the dummy tokens. The
    problem is described in BASE layers (Lewis et al., 2021), which also solve it with an auction.

    Args:
        scores_TE: float. NaN scores are replaced with 0. +Inf is replaced with a number one spread
            above the largest finite score, and -Inf with a number one spread below the smallest.
            The assignment is balanced for any scores.
    """
    tokens, experts = scores_TE.shape
    if experts == 1 or not tokens:
        return torch.zeros(tokens, dtype=torch.int64, device=scores_TE.device)
    scores_TE = scores_TE.detach()
    value_TE = _finite(scores_TE.to(accumulate_dtype(scores_TE.dtype)))
    each = -(-tokens // experts)
    value_NE = torch.cat([value_TE, value_TE.new_zeros(each * experts - tokens, experts)])
    # Scaled to 0..1, so that EPSILON is relative to the spread of the scores.
    low = value_NE.min()
    value_NE = (value_NE - low) / (value_NE.max() - low).clamp(min=torch.finfo(low.dtype).tiny)
    owner_N = auction(value_NE, _soft_prices(value_NE, each), each)
    return _fill_up(owner_N, each, experts)[:tokens]


def _finite(value_TE: Tensor) -> Tensor:
    """Replace NaN with 0. Replace infinite scores with numbers that lie one spread (at least 1)
    beyond the finite scores.

    If any score exceeds `LARGEST`, all scores are scaled down, which does not change the
    assignment. As a result, sums and differences of scores remain finite.
    """
    value_TE = value_TE.nan_to_num(0.0, float("inf"), float("-inf"))
    known_TE = value_TE.masked_fill(value_TE.isinf(), 0)
    scale = (known_TE.abs().max() / LARGEST).clamp(min=1.0)
    value_TE = value_TE / scale
    finite_TE = value_TE.isfinite()
    low = torch.where(finite_TE, value_TE, float("inf")).min().nan_to_num(posinf=0.0)
    high = torch.where(finite_TE, value_TE, float("-inf")).max().nan_to_num(neginf=0.0)
    margin = (high - low).clamp(min=1.0)
    return torch.minimum(torch.maximum(value_TE, low - margin), high + margin)


def _soft_prices(value_NE: Tensor, each: int) -> Tensor:
    """Return prices [E] for which the demand is about the same for all experts. The demand is a
    softmax with a decreasing temperature.
    """
    price_E = value_NE.new_zeros(value_NE.shape[1])
    for heat in COOLING:
        for _ in range(ROUNDS):
            chance_NE = torch.softmax((value_NE - price_E) / heat, dim=1)
            price_E = price_E + heat * torch.log(chance_NE.sum(0).clamp(min=1e-6) / each)
    return price_E


def auction(value_NE: Tensor, price_E: Tensor, each: int) -> Tensor:
    """Return the expert that owns each token, int64 [N], or -1 without an owner after the last
    round.

    price_E: initial prices.
    """
    on_host = value_NE.device.type == "cpu"
    owner_N = torch.full_like(value_NE[:, 0], -1, dtype=torch.int64)
    bid_N = torch.zeros_like(value_NE[:, 0])
    for number in range(MOST_ROUNDS):
        free_N = owner_N < 0
        if (on_host or number % LOOK == 0) and not bool(free_N.any()):
            break
        # On a GPU all tokens take part, because the host would have to wait for `nonzero`.
        rows_M = free_N.nonzero()[:, 0] if on_host else torch.arange(
            owner_N.numel(), device=owner_N.device)
        net_ME = value_NE.index_select(0, rows_M) - price_E
        best_M2 = top_k_stable(net_ME, 2)
        first_M, second_M = net_ME.gather(1, best_M2).unbind(1)
        offer_M = price_E[best_M2[:, 0]] + (first_M - second_M) + EPSILON
        bids_M = free_N[rows_M]
        wish_N = owner_N.index_copy(0, rows_M, torch.where(bids_M, best_M2[:, 0], owner_N[rows_M]))
        bid_N = bid_N.index_copy(0, rows_M, torch.where(bids_M, offer_M, bid_N[rows_M]))
        owner_N, price_E = accept(wish_N, bid_N, price_E, each)
    return owner_N


def accept(wish_N: Tensor, bid_N: Tensor, price_E: Tensor, each: int) -> tuple[Tensor, Tensor]:
    """Let each expert accept its `each` highest bids. Return the owner of each token (-1 if no
    expert accepted the token's bid) and the new prices.
    """
    # Two stable sorts order the tokens by expert, and within an expert by falling bid.
    by_bid_N = torch.argsort(bid_N, descending=True, stable=True)
    sorted_N, by_expert_N = torch.sort(wish_N[by_bid_N], stable=True)
    order_N = by_bid_N[by_expert_N]
    start_E = torch.searchsorted(sorted_N, torch.arange(price_E.numel() + 1,
                                                        device=sorted_N.device))
    rank_N = torch.arange(sorted_N.numel(), device=sorted_N.device) - start_E[sorted_N]
    owner_N = torch.empty_like(wish_N).index_copy_(
        0, order_N, torch.where(rank_N < each, sorted_N, -1))
    last_E = (start_E[:-1] + each - 1).clamp(max=sorted_N.numel() - 1)
    # The price rises only if all slots of the expert are taken.
    price_E = torch.where(start_E.diff() >= each, bid_N[order_N[last_E]], price_E)
    return owner_N, price_E


def _fill_up(owner_N: Tensor, each: int, experts: int) -> Tensor:
    """Assign tokens without an expert to free slots in order, so that all experts are full."""
    key_N = torch.where(owner_N < 0, experts, owner_N)
    order_N = torch.argsort(key_N, stable=True)
    load_E = torch.zeros(experts + 1, dtype=torch.int64, device=key_N.device).index_add_(
        0, key_N, torch.ones_like(key_N))[:experts]
    # experts of the open slots, sorted to the front
    slot_N = torch.arange(owner_N.numel(), device=key_N.device)
    open_N = (slot_N % each >= load_E[slot_N // each]).long()
    free_N = torch.argsort(open_N, stable=True) // each
    filled_N = torch.where(key_N[order_N] == experts, free_N, key_N[order_N])
    return torch.empty_like(owner_N).index_copy_(0, order_N, filled_N)


@routers.register("base")
class BASERouter(Router):
    """A router that assigns the same number of tokens to every expert and maximizes the total score
    `<x, c_e>`.

    The output of the layer is `a * expert(x) + (1 - a) * x` with `a = sigmoid(<x, c_e>)`. In
    training, each rank distributes its tokens randomly over all ranks. Without this random
    distribution, an assignment problem might contain only similar neighboring tokens. Each rank
    assigns the same number of received tokens to every expert, and returns the assigned experts.
    For each token, a rank sends the token's scores [E] and receives a single number. The token
    itself is never sent, because the output does not depend on which rank assigned the token. Every
    call in training therefore requires two exchanges of data and one exchange of sizes. In
    evaluation, each token uses the expert with the largest score without balancing, as in the
    original implementation. The centroids `c_e` are initialized to an orthogonal matrix with a gain
    of 0.1.
    Source: BASE layers (Lewis et al., 2021).
    """

    reads = SCORED
    fixed_k = 1
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the centroids, which host frameworks must not initialize again (`keep_init`)."""
        super().build(dtype, device)
        keep_init(self.weight_ED)

    def reset_parameters(self) -> None:
        """Initialize the centroids to an orthogonal matrix with a gain of 0.1."""
        whole_ED = torch.empty(self.weight_ED.shape, dtype=torch.float32)
        fill_(self.weight_ED, nn.init.orthogonal_(whole_ED, gain=0.1))

    def select(self, call: RoutingCall) -> Tensor:
        """Choose one expert per token; see `Router.select`."""
        logits_TE, real_T = call.logits_TE.detach(), call.real_T
        if not self.training:
            return top_k_stable(logits_TE, 1)
        chosen_T = torch.zeros(real_T.shape, dtype=torch.int64, device=real_T.device)
        chosen_T[real_T] = spread_and_assign(logits_TE[real_T], self.comm)
        return chosen_T[:, None]

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the weights `a`, and set the weight of the token itself; see `Router.weigh`."""
        alpha_T1 = torch.sigmoid(call.logits_TE.gather(1, ids_TK))
        call.passthrough_T = 1 - alpha_T1[:, 0]
        return alpha_T1


def spread_and_assign(scores_TE: Tensor, comm: Comm) -> Tensor:
    """Distribute tokens randomly over ranks, and return the experts [T] of this rank's tokens.

    Collective. The shuffled tokens of rank i are sent to rank i and the following ranks in
    round-robin order. The numbers of tokens received by two ranks differ by at most the number of
    ranks.

    Args:
        scores_TE: scores, float.
        comm: group of ranks among which the tokens are distributed.
    """
    tokens, size = scores_TE.shape[0], comm.size
    order_T = torch.randperm(tokens, device=scores_TE.device)
    send = [tokens // size + ((peer - comm.rank) % size < tokens % size) for peer in range(size)]
    counts_W = comm.hosts.all_gather(torch.tensor([tokens])).tolist()
    recv = [
        count // size + ((comm.rank - peer) % size < count % size)
        for peer, count in enumerate(counts_W)
    ]
    got_NE = comm.all_to_all(scores_TE[order_T].contiguous(), send, recv)
    assigned_N = balanced_assignment(got_NE)
    back_T = comm.all_to_all(assigned_N, recv, send)
    return torch.empty_like(back_T).index_copy_(0, order_T, back_T)


@routers.register("sinkhorn")
class SinkhornRouter(Router):
    """A router that, in training, chooses the k largest elements per token of a balanced plan.

    In evaluation, the router chooses the k largest scores. The plan is computed from `exp(logits)`
    of the real tokens on this rank. The rows (tokens) and the columns (experts) of the plan are
    scaled alternately, in `sinkhorn_rounds` rounds. For k = 1, the weight is the sigmoid of the
    logit. For k > 1, the weights are a softmax over all experts. The weights are not divided by
    their sum.
    Source: Clark et al., 2022 (S-BASE). The weights are computed as in Megatron-core.
    """

    reads = SEVERAL | {"sinkhorn_rounds"}
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """In training, choose experts from the plan; see `Router.select`."""
        if self.training:
            return top_k_stable(log_plan(call.logits_TE.detach(), call.real_T,
                                         self.config.sinkhorn_rounds), call.k)
        return top_k_stable(_scores(call).detach(), call.k)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the scores; see `Router.weigh`."""
        return _scores(call).gather(1, ids_TK)


def _scores(call: RoutingCall) -> Tensor:
    return torch.sigmoid(call.logits_TE) if call.k == 1 else call.scores_TE


def log_plan(logits_TE: Tensor, mask_T: Tensor, rounds: int) -> Tensor:
    """Return the logarithm of the plan, [T, E]. The columns of the plan sum to 1/E, and its row
    sums converge to 1/S.

    S is the number of real tokens. The computation uses logarithms, so that logits of any magnitude
    are allowed. The number of rounds is fixed, because testing for convergence would make the host
    wait for the device.

    Args:
        logits_TE: float tensor that does not require gradients.
        mask_T: bool, True for tokens that are not padding.
        rounds: number of rounds. Each round scales the rows and the columns once.
    """
    tokens = mask_T.sum().clamp(min=1).to(logits_TE.dtype)
    plan_TE = torch.where(mask_T[:, None], logits_TE, torch.zeros_like(logits_TE))
    # Adding -inf removes padding from the sums over tokens without a change of shape.
    hidden_T1 = torch.zeros_like(plan_TE[:, :1]).masked_fill(~mask_T[:, None], float("-inf"))
    if not plan_TE.shape[0]:
        return plan_TE
    for _ in range(rounds):
        plan_TE = plan_TE - torch.logsumexp(plan_TE, 1, keepdim=True) - tokens.log()
        column_1E = torch.logsumexp(plan_TE + hidden_T1, 0, keepdim=True)
        # Without any real token the sums are -inf, which would turn the plan into NaN.
        column_1E = torch.where(column_1E.isfinite(), column_1E, 0.0)
        plan_TE = plan_TE - column_1E - math.log(plan_TE.shape[1])
    return plan_TE


@routers.register("expert_choice")
class ExpertChoiceRouter(Router):
    """A router in which each expert chooses the `ceil(n k / E)` tokens with the highest scores
    among the n real tokens on this rank.

    The scores p are a softmax over experts and are also the weights of the choices. The load is
    always balanced, because all experts choose the same number of tokens. A token may be chosen by
    0 to E experts. On average, `top_k` experts choose a token. Among tokens with equal scores, the
    earlier token is chosen. An expert chooses among all tokens of a call. Do not use this router if
    a token must not depend on later tokens. For example, a language model would make different
    choices during generation than in training. Source: Zhou et al., 2022.
    """

    reads = SEVERAL
    any_number = True
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Return up to E choices per token, ordered by decreasing score; see `Router.select`."""
        probs_TE, real_T = call.scores_TE.detach(), call.real_T
        # Ranks of tokens are compared with a number on the device. `topk` would need the number of
        # real tokens on the host, which would have to wait for the device.
        order_TE = torch.sort(probs_TE.masked_fill(~real_T[:, None], -1.0), dim=0, descending=True,
                              stable=True).indices
        place_T1 = torch.arange(real_T.shape[0], device=real_T.device)[:, None]
        rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, place_T1.expand_as(order_TE))
        tokens_per_expert = (real_T.sum() * call.k + self.num_experts - 1) // self.num_experts
        taken_TE = (rank_TE < tokens_per_expert) & real_T[:, None]
        # Probabilities are not negative, so -1 sorts experts that did not choose the token last.
        picked_TE = probs_TE.masked_fill(~taken_TE, -1.0)
        value_TE, ids_TE = torch.sort(picked_TE, dim=1, descending=True, stable=True)
        return ids_TE.masked_fill(value_TE < 0, -1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the scores p; see `Router.weigh`."""
        return call.scores_TE.gather(1, ids_TK.clamp(min=0))
