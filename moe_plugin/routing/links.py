"""The costs of links, and the fraction of tokens per link (TA-MoE, Chen et al., 2022, section 4.1).

`optimal_shares` computes the optimal distribution of tokens over all pairs of ranks. There are W
ranks, and beta_ij is the cost of sending one byte from rank i to rank j. If each rank i sends the
fraction c_ij of its tokens to rank j, the exchange takes the time `M = max_ij beta_ij c_ij`. A
linear program minimizes M. In this program, each row and each column of c sums to 1, because each
rank sends all of its tokens and all ranks compute the same number of rows.

By the max-flow min-cut theorem, the minimum of M is the maximum of

    (|S| + |T| - W) / sum_{i in S, j in T} 1 / beta_ij

over all sets S of senders and T of receivers. The reason is that at least the amount
`|S| + |T| - W`, in units of one rank's tokens, must be sent from S to T. `optimal_shares` searches
for the cut at which this maximum is reached, and for shares with which the exchange takes hardly
longer. At the exact optimum, some shares are zero. A router cannot learn a share of zero, because
its penalty `1 / c` would be infinite. Therefore the exchange may take up to 1 % longer than the
optimum (`SLACK`). Among all shares within this limit, the function returns the shares that are
closest to being proportional to `1 / beta_ij`.

The other functions convert the fractions for ranks to fractions and penalties for experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.kernels import top_k_stable
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import read_yaml

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


def target_shares(beta_WW: Tensor) -> Tensor:
    """Return the fractions `c_ij` of rank i's tokens that should be sent to rank j, float64 [W, W].

    Each row and each column sums to 1. The matrix `(1 / beta_ij) / sum_j (1 / beta_ij)` is returned
    if its columns have equal sums, because it is then the optimum of TA-MoE's linear program. If
    the columns have different sums, the slowest link needs at most 1 % more time than at the
    optimum; see the module docstring.

    Args:
        beta_WW: float tensor [W, W]. Element [i, j] is the cost per byte from rank i to rank j.
    Raises:
        ValueError: If the costs are not positive or do not form a square matrix.
    """
    if beta_WW.dim() != 2:
        raise ValueError(f"The link costs have shape {tuple(beta_WW.shape)}, but must be a square "
                         "matrix of positive numbers, including the diagonal.")
    return torch.from_numpy(optimal_shares(beta_WW.tolist()).shares_WW.copy())


def expert_shares(beta_WW: Tensor, rank: int, experts: int, shards: int | None = None) -> Tensor:
    """Return the fraction `c_e` of a rank's choices that each expert should receive, float64 [E].
    The fractions sum to 1.

    Args:
        beta_WW: see `target_shares`.
        rank: index of the rank that chooses the experts.
        experts: number of experts, E.
        shards: number of ranks over which each expert is split. The fractions of all ranks that
            share an expert are added. Defaults to max(W / E, 1).
    """
    row_W = target_shares(beta_WW)[rank]
    run_G = row_W.view(-1, shards or max(1, row_W.numel() // experts)).sum(1)
    experts_per_run = experts // run_G.numel()
    return (run_G / experts_per_run).repeat_interleave(experts_per_run)


def penalties(shares_E: Tensor, blend: float) -> Tensor:
    """Return the penalties [E] for fractions c, `q = blend * (1 / c) / mean(1 / c) + 1 - blend`.
    The mean of all penalties is 1.
    """
    inverse_E = 1 / shares_E
    return blend * inverse_E / inverse_E.mean() + 1 - blend


def own_shares(config: MoEConfig, comm: Comm) -> Tensor:
    """Return `expert_shares` for this rank and the `router.links` settings, float64 [E]."""
    return expert_shares(link_costs(config, comm), comm.rank, config.num_experts,
                         config.parallel.shards)


def link_penalties(config: MoEConfig, comm: Comm) -> Tensor:
    """Return `penalties` for this rank and the `router.links` settings, float32 [E]."""
    return penalties(own_shares(config, comm), config.router.links.blend).float()


def calibrated_costs(path: str) -> tuple[float, float]:
    """Read the transfer time per byte in seconds, within and between nodes, from a cluster file.

    Raises:
        ValueError: If the file does not contain both times.
    """
    cluster = load_cluster(path)
    ranks = cluster.ranks_per_node
    # Ranks of a node share its network cards, but a rank never uses more than one card.
    near, far = cluster.intra.beta_s, cluster.inter.beta_s * ranks / min(cluster.nics, ranks)
    if not (near > 0 and far > 0):
        raise ValueError(
            f"The cluster file {short(path)} has intra.beta_s={near} and inter.beta_s={far}. Both "
            "must be > 0 for a router that uses link costs. Calibrate with more sizes, or set "
            "router.links.costs.")
    return near, far


def link_costs(config: MoEConfig, comm: Comm) -> Tensor:
    """Return the cost per byte of sending data from rank i to rank j, float64 [W, W].

    The costs are read from the file given by `router.links.costs`. If `router.links.costs` is not
    set, the cluster file (`comm.cluster`) provides one cost within nodes and one cost between
    nodes. The ranks of a node share the node's network cards. If neither setting is set, the cost
    is 1 within nodes and `router.links.far` between nodes.

    Raises:
        ValueError: If the file cannot be read or contains costs for a different number of ranks.
    """
    links = config.router.links
    if links.costs is None:
        path = config.comm.cluster
        near, far = (1.0, links.far) if path is None else calibrated_costs(path)
        node_W = torch.tensor(comm.topology.node_of)
        return torch.where(node_W[:, None] == node_W, torch.tensor(near, dtype=torch.float64),
                           torch.tensor(far, dtype=torch.float64))
    remedy = "use a YAML or JSON list of lists of numbers"
    rows = read_yaml(links.costs, "router.links.costs", remedy, kind=list)
    try:
        beta_WW = torch.tensor(rows, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"router.links.costs={short(links.costs)} cannot be read: "
                         f"{short(error)}; {remedy}") from error
    if beta_WW.shape != (comm.size, comm.size):
        raise ValueError(
            f"router.links.costs={short(links.costs)} has shape {tuple(beta_WW.shape)}, but "
            f"{comm.size} expert-parallel ranks need shape ({comm.size}, {comm.size}). Write one "
            "row and one column per rank.")
    return beta_WW


def near_experts(comm: Comm, experts: int, shards: int | None = None) -> Tensor:
    """Return a bool tensor [E], True for experts whose shards are all on this rank's node.

    Args:
        comm: group of ranks that store the experts.
        experts: number of experts, E.
        shards: see `expert_shares`.
    """
    near_W = torch.tensor([comm.topology.same_node(comm.rank, rank) for rank in range(comm.size)])
    near_G = near_W.view(-1, shards or max(1, comm.size // experts)).all(1)
    return near_G.repeat_interleave(experts // near_G.numel())


def expert_nodes(comm: Comm, experts: int, shards: int | None = None) -> Tensor:
    """Return a bool tensor [E, N]. Element [e, n] is True if node n stores a shard of expert e.

    Args:
        comm: group of the ranks that store the experts.
        experts: number of experts, E.
        shards: see `expert_shares`.
    """
    node_W = torch.tensor(comm.topology.node_of)
    on_WN = node_W[:, None] == torch.arange(int(node_W.max()) + 1)
    on_GN = on_WN.view(-1, shards or max(1, comm.size // experts), on_WN.shape[1]).any(1)
    return on_GN.repeat_interleave(experts // on_GN.shape[0], 0)


def prefer_visited(scores_TE: Tensor, k: int, nodes_EN: Tensor, own: int, bias: float) -> Tensor:
    """Choose k experts per token, one after another, with a preference for experts on nodes that
    already receive the token.

    For the next choice, the preferred nodes are the token's own node and the nodes of the experts
    chosen so far. If an expert is entirely on preferred nodes, `bias` is added to its score.

    Args:
        scores_TE: scores, float.
        k: number of experts per token.
        nodes_EN: see `expert_nodes`.
        own: node index of the tokens.
        bias: bonus added to the score of an expert, in the same unit as the scores. If the bias is
            0, the k largest scores are chosen. Among equal scores, the lower index is chosen.

    Returns: int64 [T, K], the chosen experts.
    """
    apart_NE = nodes_EN.T.to(scores_TE.dtype)
    new_TN = torch.ones_like(scores_TE[:, :1]).repeat(1, apart_NE.shape[0])
    new_TN[:, own] = 0
    chosen, left_TE = [], scores_TE
    # The product counts the nodes of each expert that the token does not visit yet.
    for _ in range(k):
        best_T1 = top_k_stable(left_TE + bias * (new_TN @ apart_NE == 0), 1)
        chosen.append(best_T1)
        left_TE = left_TE.scatter(1, best_T1, float("-inf"))
        new_TN = new_TN * ~nodes_EN[best_T1[:, 0]]
    return torch.cat(chosen, 1)
