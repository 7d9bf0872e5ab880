"""The costs of links, and the fraction of tokens per link (TA-MoE, Chen et al., 2022).

`planner.link_shares` computes the fraction of tokens for each rank. This module converts the
fractions for ranks to fractions and penalties for experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.kernels import top_k_stable
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.utils.messages import short
from moe_plugin.utils.yaml_file import read_yaml


def target_shares(beta_WW: Tensor) -> Tensor:
    """Return the fractions `c_ij` of rank i's tokens that should be sent to rank j, float64 [W, W].

    Each row and each column sums to 1. The matrix `(1 / beta_ij) / sum_j (1 / beta_ij)` is returned
    if its columns have equal sums, because it is then the optimum of TA-MoE's linear program. If
    the columns have different sums, the slowest link needs at most 1 % more time than at the
    optimum; see `planner.link_shares`.

    Args:
        beta_WW: float tensor [W, W]. Element [i, j] is the cost per byte from rank i to rank j.
    Raises:
        ValueError: If the costs are not positive or do not form a square matrix.
    """
    if beta_WW.dim() != 2:
        raise ValueError(f"The link costs have shape {tuple(beta_WW.shape)}, but must be a square "
                         "matrix of positive numbers, including the diagonal.")
    # imported late, because only routers that weigh links need numpy
    from moe_plugin.planner.link_shares import optimal_shares

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
