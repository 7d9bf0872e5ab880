"""Costs of links, and the fraction of tokens to send over each link (TA-MoE, Chen et al., 2022).

`planner.link_shares` computes the fractions of tokens for ranks. This module converts these
fractions to fractions and penalties for experts.
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
    """Return the fraction `c_ij` of rank i's tokens that should be sent to rank j, float64 [W, W].

    Each row and each column sums to 1. If the columns of `(1 / beta_ij) / sum_j (1 / beta_ij)` have
    equal sums, this matrix is the optimum of TA-MoE's linear program and is returned. Otherwise the
    time of the slowest link is at most 1 % longer than at the optimum; see `planner.link_shares`.

    Args:
        beta_WW: cost per byte of sending from rank i to rank j, as a float tensor [W, W].
    Raises:
        ValueError: If the costs are not positive, or are not a square matrix.
    """
    if beta_WW.dim() != 2:
        raise ValueError(f"The link costs have shape {tuple(beta_WW.shape)}, but must be a square "
                         "matrix of positive numbers, including the diagonal.")
    # imported late, because only routers that weigh links need numpy
    from moe_plugin.planner.link_shares import optimal_shares

    return torch.from_numpy(optimal_shares(beta_WW.tolist()).shares_WW.copy())


def expert_shares(beta_WW: Tensor, rank: int, experts: int, shards: int | None = None) -> Tensor:
    """Return the fraction `c_e` of a rank's choices that should be made for each expert, float64
    [E]. The fractions sum to 1.

    Args:
        beta_WW: see `target_shares`.
        rank: index of the rank that makes the choices.
        experts: number of experts, E.
        shards: number of ranks that share one expert. The fractions of these ranks are added. The
            default is the larger of W / E and 1.
    """
    row_W = target_shares(beta_WW)[rank]
    run_G = row_W.view(-1, shards or max(1, row_W.numel() // experts)).sum(1)
    experts_per_run = experts // run_G.numel()
    return (run_G / experts_per_run).repeat_interleave(experts_per_run)


def penalties(shares_E: Tensor, blend: float) -> Tensor:
    """Return the penalties [E] for the fractions c: `q = blend * (1 / c) / mean(1 / c) + 1 -
    blend`. The mean of the penalties is 1.
    """
    inverse_E = 1 / shares_E
    return blend * inverse_E / inverse_E.mean() + 1 - blend


def own_shares(config: MoEConfig, comm: Comm) -> Tensor:
    """Return the float64 result [E] of `expert_shares` for this rank and the settings
    `router.links`.
    """
    return expert_shares(link_costs(config, comm), comm.rank, config.num_experts,
                         config.parallel.shards)


def link_penalties(config: MoEConfig, comm: Comm) -> Tensor:
    """Return the float32 result [E] of `penalties` for this rank and the settings `router.links`.
    """
    return penalties(own_shares(config, comm), config.router.links.blend).float()


def calibrated_costs(path: str) -> tuple[float, float]:
    """Read the time in seconds per byte within a node and between nodes from a cluster file.

    Raises:
        ValueError: If one of the two values is missing in the file.
    """
    cluster = load_cluster(path)
    ranks = cluster.ranks_per_node
    # Ranks of a node share its network cards, but a rank never uses more than one card.
    near, far = cluster.intra.beta_s, cluster.inter.beta_s * ranks / min(cluster.nics, ranks)
    if not (near > 0 and far > 0):
        raise ValueError(
            f"The cluster file {short(path)} has intra.beta_s={near} and inter.beta_s={far}. Both "
            "must be > 0 for a router that weighs links. Calibrate with more sizes, or set "
            "router.links.costs.")
    return near, far


def link_costs(config: MoEConfig, comm: Comm) -> Tensor:
    """Return the cost per byte of sending from rank i to rank j, float64 [W, W].

    The costs are read from the file `router.links.costs`. If this file is not set, the cluster file
    (`comm.cluster`) provides one cost within a node and one between nodes. The ranks of a node
    share the network cards of the node. If neither file is set, the costs are 1 within a node and
    `router.links.far` between nodes.

    Raises:
        ValueError: If the file cannot be read, or if it has costs for a different number of ranks.
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
    """Return a bool tensor [E] that is true for each expert whose shards are all on this rank's
    node.

    Args:
        comm: group of the ranks that store the experts.
        experts: number of experts, E.
        shards: see `expert_shares`.
    """
    near_W = torch.tensor([comm.topology.same_node(comm.rank, rank) for rank in range(comm.size)])
    near_G = near_W.view(-1, shards or max(1, comm.size // experts)).all(1)
    return near_G.repeat_interleave(experts // near_G.numel())


def expert_nodes(comm: Comm, experts: int, shards: int | None = None) -> Tensor:
    """Return a bool tensor [E, N] that is true if a node stores the expert or one of its shards.

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
    """Choose k experts per token one by one, and prefer nodes to which the token is already sent.

    These nodes are the token's own node and the nodes of its earlier choices. If all nodes that
    store an expert are among them, `bias` is added to the score of the expert.

    Args:
        scores_TE: scores, float.
        k: number of experts per token.
        nodes_EN: see `expert_nodes`.
        own: index of the node on which the tokens are.
        bias: bonus that is added to a score, in the unit of the scores. If the bias is 0, the k
            largest scores are chosen, and ties go to the lower index.

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
