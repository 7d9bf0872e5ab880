"""Compute the optimal distribution of tokens over all pairs of ranks for arbitrary link costs
(TA-MoE).

The method is described in section 4.1 of the TA-MoE paper (Chen et al., 2022). There are W ranks,
and beta_ij is the cost of sending one byte from rank i to rank j. If each rank i sends the fraction
c_ij of its tokens to rank j, the exchange takes the time `M = max_ij beta_ij c_ij`. A linear
program minimizes M. In this program, each row and each column of c sums to 1, because each rank
sends all of its tokens and all ranks compute the same number of rows.

By the max-flow min-cut theorem, the minimum of M is the maximum of

    (|S| + |T| - W) / sum_{i in S, j in T} 1 / beta_ij

over all sets S of senders and T of receivers. The reason is that at least the amount
`|S| + |T| - W`, in units of one rank's tokens, must be sent from S to T. `optimal_shares` searches
for the cut at which this maximum is reached, and for shares with which the exchange takes hardly
longer. At the exact optimum, some shares are zero. A router cannot learn a share of zero, because
its penalty `1 / c` would be infinite. Therefore the exchange may take up to 1 % longer than the
optimum (`SLACK`). Among all shares within this limit, the function returns the shares that are
closest to being proportional to `1 / beta_ij`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
SLACK = 0.01  # relative excess over the optimum that the shares may have
EXACT = 1e-9  # tolerance of row sums and of the optimum
ROUNDS, SEARCHES = 100, 200


@dataclass(frozen=True)
class LinkShares:
    """Result of `optimal_shares`.

    Attributes:
        shares_WW: float64 matrix of the shares c_ij > 0. Each row sums to 1, and each column sums
            to 1 except for rounding errors.
        optimum: smallest possible value of `max_ij beta_ij c_ij`, in the unit of beta.
    """

    shares_WW: Matrix
    optimum: float


def optimal_shares(costs: Sequence[Sequence[float]]) -> LinkShares:
    """Return shares for which the exchange takes at most 1 % longer than the optimum.

    Args:
        costs: matrix of costs beta_ij > 0. beta_ij is the cost of sending one byte from rank i to
            rank j. The diagonal must also be given.

    Raises:
        ValueError: If the costs are not a square matrix of finite numbers > 0, or if they differ by
            so many orders of magnitude that the search does not converge.
    """
    return _solve(tuple(map(tuple, costs)))


@lru_cache(maxsize=8)  # every layer of a model requests the same shares
def _solve(costs: tuple[tuple[float, ...], ...]) -> LinkShares:
    beta_WW = np.array(costs, dtype=np.float64) if len({*map(len, costs)}) == 1 else np.zeros(0)
    if beta_WW.shape != (len(costs),) * 2 or not (np.isfinite(beta_WW) & (beta_WW > 0)).all():
        raise ValueError(f"link costs with {len(costs)} rows must be a square matrix of finite "
                         "numbers > 0, including the diagonal. Provide one row per rank")
    unit = float(np.exp(np.log(beta_WW).mean()))
    inverse_WW = unit / beta_WW
    # the bound of the trivial cuts: one row with all columns, or one column with all rows
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
        bound = _best_cut(inverse_WW, rows_W, columns_W)
        if bound > optimum * (1 + EXACT):
            optimum, columns_W = bound, np.ones(len(costs))
    raise ValueError(f"link costs from {beta_WW.min():g} to {beta_WW.max():g} differ too much for "
                     "the search to converge. Raise the smallest costs, such as the cost from a "
                     "rank to itself")


def _scales(inverse_WW: Matrix, other_W: Matrix, most: float) -> Matrix:
    """Return the factors u_i of the rows, [W], for which `sum_j min(most, u_i other_j) inverse_ij`
    is 1.

    The method is Sinkhorn scaling with an upper bound on each entry: rows and columns are scaled
    alternately. The scaling converges to the feasible shares that are closest to `inverse_WW` in
    relative entropy. In each row, the entries with the largest `other_j` are set to the upper
    bound, but as few of them as possible.
    """
    order_W = np.argsort(-other_W)
    sorted_W, by_order_WW = other_W[order_W], inverse_WW[:, order_W]
    at_bound_WW = most * (np.cumsum(by_order_WW, 1) - by_order_WW)
    below_WW = np.cumsum((by_order_WW * sorted_W)[:, ::-1], 1)[:, ::-1]
    factors_WW = (1 - at_bound_WW) / below_WW
    fits_WW = factors_WW * sorted_W <= most * (1 + 1e-15)
    factors_W = factors_WW[np.arange(len(order_W)), fits_WW.argmax(1)]
    # if a row does not sum to 1 even with all entries at the bound, its factor grows without limit
    return np.where(fits_WW.any(1) & (factors_W > 0), factors_W, 1e300)


def _best_cut(inverse_WW: Matrix, rows_W: Matrix, columns_W: Matrix) -> float:
    """Return the largest lower bound that follows from any cut between ranks with large factors and
    ranks with small factors.

    If no shares are possible for a value of `most`, the factors on the two sides of the violated
    cut diverge.
    """
    order = np.ix_(np.argsort(-rows_W), np.argsort(-columns_W))
    sums_WW = np.cumsum(np.cumsum(inverse_WW[order], 0), 1)
    number = np.arange(1, len(rows_W) + 1)
    return float(((number[:, None] + number - len(rows_W)) / sums_WW).max())
