"""How many tokens each rank should send to each other rank, for any link costs (TA-MoE).

Source: Chen et al. 2022 (TA-MoE), section 4.1. W ranks; beta_ij is the cost of a byte from rank i
to rank j. If rank i sends the share c_ij of its tokens to rank j, the exchange takes M = max_ij
beta_ij c_ij. The linear program minimises M where all rows and columns of c sum to 1: each rank
sends all its tokens, and each rank computes the same number of rows.

By max-flow min-cut, the least M is the largest value, over all sets S of senders and T of
receivers, of

    (|S| + |T| - W) / sum_{i in S, j in T} 1 / beta_ij,

because at least |S| + |T| - W of the tokens of S must go to T. `optimal_shares` searches for this
cut, and for shares that come close to it. At the optimum itself some shares are zero: a router
could not learn them, and their penalty 1 / c would be infinite. Therefore shares may take 1 % more
(`SLACK`); of all such shares it returns those nearest to the closed form c_ij ~ 1 / beta_ij.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
SLACK = 0.01  # by how much the shares may exceed the optimum
EXACT = 1e-9  # of sums
ROUNDS, SEARCHES = 100, 200


@dataclass(frozen=True)
class LinkShares:
    """The result of `optimal_shares`.

    Attributes:
        shares_WW: c_ij > 0, float64; rows sum to 1, columns to 1 up to rounding.
        optimum: the least possible max_ij beta_ij c_ij, in units of beta.
    """

    shares_WW: Matrix
    optimum: float


def optimal_shares(costs: Sequence[Sequence[float]]) -> LinkShares:
    """Shares whose slowest link takes at most 1 % longer than the optimum of the linear program.

    Args:
        costs: beta_ij > 0, the cost of a byte from rank i to rank j, the diagonal included.
    Raises:
        ValueError: the costs are not a square matrix of finite numbers > 0, or differ by so many
            orders of magnitude that the search does not end.
    """
    return _solve(tuple(map(tuple, costs)))


@lru_cache(maxsize=8)  # every layer of a model asks for the same
def _solve(costs: tuple[tuple[float, ...], ...]) -> LinkShares:
    beta_WW = np.array(costs, dtype=np.float64) if len({*map(len, costs)}) == 1 else np.zeros(0)
    if beta_WW.shape != (len(costs),) * 2 or not (np.isfinite(beta_WW) & (beta_WW > 0)).all():
        raise ValueError(f"link costs of {len(costs)} rows do not fit: must be a square matrix of "
                         "finite numbers > 0, the diagonal included; give one row per rank")
    unit = float(np.exp(np.log(beta_WW).mean()))
    inverse_WW = unit / beta_WW
    # all of one row, or of one column
    optimum = max(1 / inverse_WW.sum(1).min(), 1 / inverse_WW.sum(0).min())
    columns_W = np.ones(len(costs))
    for _ in range(SEARCHES):
        most = optimum * (1 + SLACK)
        for _ in range(ROUNDS):
            rows_W = _scales(inverse_WW, columns_W, most)
            columns_W = _scales(inverse_WW.T, rows_W, most)
            shares_WW = np.minimum(most, np.outer(rows_W, columns_W)) * inverse_WW
            if abs(shares_WW.sum(1) - 1).max() < EXACT:
                return LinkShares(shares_WW / shares_WW.sum(1, keepdims=True), unit * optimum)
        found = _best_cut(inverse_WW, rows_W, columns_W)
        if found > optimum * (1 + EXACT):
            optimum, columns_W = found, np.ones(len(costs))
    raise ValueError(f"link costs from {beta_WW.min():g} to {beta_WW.max():g} differ too much to "
                     "be weighed: raise the smallest ones, such as those of a rank to itself")


def _scales(inverse_WW: Matrix, other_W: Matrix, most: float) -> Matrix:
    """The factor u_i of each row with sum_j min(most, u_i other_j) inverse_ij = 1, [W].

    Rows and columns scaled in turns (Sinkhorn), with a bound on each entry, tend to the feasible
    shares nearest to `inverse_WW` in relative entropy. In each row the bound is reached by the
    entries with the largest `other_j`: their number is the least that fits.
    """
    order_W = np.argsort(-other_W)
    sorted_W, by_order_WW = other_W[order_W], inverse_WW[:, order_W]
    at_bound_WW = most * (np.cumsum(by_order_WW, 1) - by_order_WW)
    below_WW = np.cumsum((by_order_WW * sorted_W)[:, ::-1], 1)[:, ::-1]
    factors_WW = (1 - at_bound_WW) / below_WW
    fits_WW = factors_WW * sorted_W <= most * (1 + 1e-15)
    factors_W = factors_WW[np.arange(len(order_W)), fits_WW.argmax(1)]
    # where even all entries at the bound are too few, the row cannot sum to 1
    return np.where(fits_WW.any(1) & (factors_W > 0), factors_W, 1e300)


def _best_cut(inverse_WW: Matrix, rows_W: Matrix, columns_W: Matrix) -> float:
    """The best bound by cuts between large and small factors, which grow apart where `most` is too
    small for any shares.
    """
    order = np.ix_(np.argsort(-rows_W), np.argsort(-columns_W))
    sums_WW = np.cumsum(np.cumsum(inverse_WW[order], 0), 1)
    number = np.arange(1, len(rows_W) + 1)
    return float(((number[:, None] + number - len(rows_W)) / sums_WW).max())
