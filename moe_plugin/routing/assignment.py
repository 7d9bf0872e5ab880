"""Balanced assignment of tokens to experts with the largest total score, for the BASE router.

Prices p_e as in an auction (Bertsekas): if every token takes the expert with the largest
v(t, e) - p_e, the assignment is the best one for its loads. Prices are adjusted until loads are
almost equal. The remaining surplus moves along cheapest paths to experts with too few tokens; after
each path the assignment is again the best one for its loads. Pure functions on the CPU, without
gradient, in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 12  # of scaling at each temperature
COOLING = (0.1, 0.03, 0.01)  # temperatures, relative to the spread of the scores
SLACK = 1e-12  # relative to the spread: a path must be better by this much, against rounding cycles
LARGEST = 1e100  # scores up to here have finite sums and differences in float64


def balanced_assignment(scores_TE: Tensor) -> Tensor:
    """Expert of each token, int64 [T], with at most ceil(T / E) tokens per expert.

    The sum of the chosen scores is the largest possible (up to rounding). If E does not divide T,
    dummy tokens with score 0 fill up. Source of the problem: BASE layers (Lewis et al. 2021), which
    solve it by an auction to within epsilon per token.

    Args:
        scores_TE: float. NaN counts as 0, +Inf and -Inf as finite extremes: one spread above the
            largest and below the smallest finite score. The assignment is always balanced.
    """
    tokens, experts = scores_TE.shape
    value_TE = _finite(scores_TE.detach().to("cpu", torch.float64))
    each = -(-tokens // experts)
    value_NE = torch.cat([value_TE, value_TE.new_zeros(each * experts - tokens, experts)])
    if experts == 1 or not tokens:
        return torch.zeros(tokens, dtype=torch.int64)
    spread = float(value_NE.max() - value_NE.min())
    owner_N = (value_NE - _prices(value_NE, each, spread)).argmax(1)
    return _level(value_NE, owner_N, each, SLACK * spread)[:tokens]


def _finite(value_TE: Tensor) -> Tensor:
    """The scores with NaN as 0, and infinities one spread (at least 1) beyond the finite ones.

    Scores above `LARGEST` are scaled down with all others, which changes no assignment: sums and
    differences stay finite.
    """
    value_TE = value_TE.nan_to_num(0.0, float("inf"), float("-inf"))
    known_N = value_TE[value_TE.isfinite()]
    if not known_N.numel():
        return value_TE.clamp(-1.0, 1.0)
    scale = max(float(known_N.abs().max()) / LARGEST, 1.0)
    value_TE, known_N = value_TE / scale, known_N / scale
    low, high = float(known_N.min()), float(known_N.max())
    margin = max(high - low, 1.0)
    return value_TE.clamp(low - margin, high + margin)


def _prices(value_NE: Tensor, each: int, spread: float) -> Tensor:
    """Prices [E] of about equal demand for experts: log-sum-exp demand, scaled at falling
    temperatures, then exact demand.
    """
    price_E = value_NE.new_zeros(value_NE.shape[1])
    if spread == 0.0:
        return price_E
    for relative in COOLING:
        heat = relative * spread
        for _ in range(ROUNDS):
            chance_NE = torch.softmax((value_NE - price_E) / heat, dim=1)
            price_E = price_E + heat * torch.log(chance_NE.sum(0).clamp(min=1e-6) / each)
    for e in range(value_NE.shape[1]):
        price_E[e] = _clearing_price(value_NE, price_E, e, each)
    return price_E


def _clearing_price(value_NE: Tensor, price_E: Tensor, e: int, each: int) -> Tensor:
    """The price at which exactly `each` tokens prefer e, if no two scores are equal."""
    net_NE = value_NE - price_E
    net_NE[:, e] = float("-inf")
    margin_N = torch.sort(value_NE[:, e] - net_NE.amax(1), descending=True).values
    return (margin_N[each - 1] + margin_N[each]) / 2


def _level(value_NE: Tensor, owner_N: Tensor, each: int, slack: float) -> Tensor:
    """Move tokens along cheapest paths from experts with too many to experts with too few."""
    experts = value_NE.shape[1]
    owner_N, cost_EE = owner_N.clone(), value_NE.new_full((experts, experts), float("inf"))
    for e in range(experts):
        cost_EE[e] = _costs(value_NE, owner_N, e)
    # a round moves at least one token out of an expert with too many, so tokens bound the rounds
    for _ in range(len(owner_N)):
        excess_E = torch.bincount(owner_N, minlength=experts) - each
        if not bool((excess_E > 0).any()):
            break
        path = _cheapest_path(cost_EE, excess_E, slack)
        most = min(int(excess_E[path[0]]), -int(excess_E[path[-1]]))
        _move(value_NE, owner_N, cost_EE, path, most)
        for e in path:
            cost_EE[e] = _costs(value_NE, owner_N, e)
    return owner_N


def _costs(value_NE: Tensor, owner_N: Tensor, e: int) -> Tensor:
    """Cost [E] of the cheapest move of one of e's tokens to each expert; inf: e has no token."""
    mine_ME = value_NE[owner_N == e]
    if not mine_ME.shape[0]:
        return value_NE.new_full((value_NE.shape[1],), float("inf"))
    return (mine_ME[:, e : e + 1] - mine_ME).amin(0)


def _cheapest_path(cost_EE: Tensor, excess_E: Tensor, slack: float) -> list[int]:
    """Experts from one with too many to one with too few (Bellman and Ford)."""
    dist_E = torch.where(excess_E > 0, 0.0, float("inf")).double()
    parent_E = torch.full_like(excess_E, -1)
    for _ in range(len(excess_E)):
        through_E, best_E = (dist_E[:, None] + cost_EE).min(0)
        better_E = through_E < dist_E - slack
        if not bool(better_E.any()):
            break
        dist_E = torch.where(better_E, through_E, dist_E)
        parent_E = torch.where(better_E, best_E, parent_E)
    at = int(torch.where(excess_E < 0, dist_E, float("inf")).argmin())
    path = [at]
    for _ in range(len(excess_E)):
        if int(parent_E[path[-1]]) < 0:
            return path[::-1]
        path.append(int(parent_E[path[-1]]))
    # rounding made a cycle of negative cost: move directly, at its price, so that loads get level
    return [int(excess_E.argmax()), at]


def _move(value_NE: Tensor, owner_N: Tensor, cost_EE: Tensor, path: list[int], most: int) -> None:
    """Move the cheapest tokens along each step of the path: at most `most`, and as many as every
    step has at its least cost.
    """
    steps = []
    for source, target in zip(path, path[1:], strict=False):
        mine_M = (owner_N == source).nonzero()[:, 0]
        cost_M = value_NE[mine_M, source] - value_NE[mine_M, target]
        steps.append((mine_M[cost_M <= cost_EE[source, target]], target))
        most = min(most, len(steps[-1][0]))
    for tokens_M, target in steps:
        owner_N[tokens_M[:most]] = target
