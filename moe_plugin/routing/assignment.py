"""Balanced assignment of tokens to experts, the heart of the BASE router: of all balanced
assignments the one with the largest score.

Prices p_e as in an auction (Bertsekas): with every token where v(t, e) - p_e is largest, an
assignment is the best for the loads that it has. So prices are moved until loads are almost equal,
and what is still too much somewhere goes where it is missing by cheapest paths, after each of which
the assignment is again the best for its loads. Pure functions on the CPU, without gradient, in
float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

# of scaling, at temperatures relative to the spread of the scores
ROUNDS, COOLING = 12, (0.1, 0.03, 0.01)
# relative to the spread: a path must be better by that much, so that rounding makes no cycle
SLACK = 1e-12
# scores up to here have finite sums and differences in float64
LARGEST = 1e100


def balanced_assignment(scores_TE: Tensor) -> Tensor:
    """An expert for each token, int64 [T], no expert with more than ceil(T / E) tokens: exactly T /
    E where E divides T.

    The sum of the chosen scores is the largest possible (up to rounding). Where E does not divide
    T, tokens that are worth nothing to anybody fill up. NaN counts as 0, +Inf and -Inf as finite
    extremes: a whole spread above the largest and below the smallest finite score, so that the
    assignment is balanced whatever the scores are. Source of the problem: BASE layers (Lewis et
    al. 2021), which solves it by an auction to within epsilon a token.
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
    """Prices [E] at which experts are about equally wanted: log-sum-exp demand, scaled at falling
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
    """The price at which exactly `each` tokens prefer e, where no two are equal."""
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
        _move(value_NE, owner_N, cost_EE, path, min(int(excess_E[path[0]]),
                                                    -int(excess_E[path[-1]])))
        for e in path:
            cost_EE[e] = _costs(value_NE, owner_N, e)
    return owner_N


def _costs(value_NE: Tensor, owner_N: Tensor, e: int) -> Tensor:
    """What the cheapest move of one of e's tokens to each expert costs, [E]; inf: it has none."""
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
        dist_E, parent_E = torch.where(better_E, through_E,
                                       dist_E), torch.where(better_E, best_E, parent_E)
    at = int(torch.where(excess_E < 0, dist_E, float("inf")).argmin())
    path = [at]
    for _ in range(len(excess_E)):
        if int(parent_E[path[-1]]) < 0:
            return path[::-1]
        path.append(int(parent_E[path[-1]]))
    # rounding made a cycle of negative cost: move directly, at its price, so that loads get level
    return [int(excess_E.argmax()), at]


def _move(value_NE: Tensor, owner_N: Tensor, cost_EE: Tensor, path: list[int], most: int) -> None:
    """Along each step of the path move the cheapest tokens, as many as every step has at its least
    cost, at most `most`.
    """
    steps = []
    for source, target in zip(path, path[1:], strict=False):
        mine_M = (owner_N == source).nonzero()[:, 0]
        cost_M = value_NE[mine_M, source] - value_NE[mine_M, target]
        steps.append((mine_M[cost_M <= cost_EE[source, target]], target))
        most = min(most, len(steps[-1][0]))
    for tokens_M, target in steps:
        owner_N[tokens_M[:most]] = target
