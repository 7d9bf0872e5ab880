"""What links cost, and how many tokens should use each (TA-MoE, Chen et al. 2022).

The shares of ranks are computed in `planner.link_shares`; here they become shares and penalties of
experts.
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
    """Share c_ij of rank i's tokens for rank j, float64 [W, W]; rows and columns sum to 1.

    (1 / beta_ij) / sum_j (1 / beta_ij) if its columns are equal: then it is the optimum of TA-MoE's
    linear program. Otherwise the slowest link takes at most 1 % longer than at the optimum: see
    `planner.link_shares`.

    Args:
        beta_WW: cost of a byte from rank i to rank j, float.
    Raises:
        ValueError: costs that are not positive, or not a square matrix.
    """
    if beta_WW.dim() != 2:
        raise ValueError(f"link costs of shape {tuple(beta_WW.shape)} do not fit: must be a square "
                         "matrix of positive numbers, the diagonal included")
    from moe_plugin.planner.link_shares import optimal_shares  # numpy, which others do not need

    return torch.from_numpy(optimal_shares(beta_WW.tolist()).shares_WW.copy())


def expert_shares(beta_WW: Tensor, rank: int, experts: int, shards: int | None = None) -> Tensor:
    """Share c_e of a rank's choices that should go to each expert, float64 [E]; sums to 1.

    Args:
        beta_WW: see `target_shares`.
        rank: whose choices.
        experts: E.
        shards: ranks that an expert is cut over, which pool their shares; None: W / E, at least 1.
    """
    row_W = target_shares(beta_WW)[rank]
    run_G = row_W.view(-1, shards or max(1, row_W.numel() // experts)).sum(1)
    each = experts // run_G.numel()
    return (run_G / each).repeat_interleave(each)


def penalties(shares_E: Tensor, blend: float) -> Tensor:
    """Penalties q = blend * (1 / c) / mean(1 / c) + 1 - blend of shares c, [E]; mean 1."""
    inverse_E = 1 / shares_E
    return blend * inverse_E / inverse_E.mean() + 1 - blend


def own_shares(config: MoEConfig, comm: Comm) -> Tensor:
    """`expert_shares` of this rank by the settings `router.links`, float64 [E]."""
    return expert_shares(link_costs(config, comm), comm.rank, config.num_experts,
                         config.parallel.shards)


def link_penalties(config: MoEConfig, comm: Comm) -> Tensor:
    """`penalties` of this rank by the settings `router.links`, float32 [E]."""
    return penalties(own_shares(config, comm), config.router.links.blend).float()


def calibrated_costs(path: str) -> tuple[float, float]:
    """Seconds per byte (within a node, between nodes) by a cluster file.

    Raises:
        ValueError: one of them is missing in the file.
    """
    cluster = load_cluster(path)
    ranks = cluster.ranks_per_node
    near, far = cluster.intra.beta_s, cluster.inter.beta_s * ranks / min(cluster.nics, ranks)
    if not (near > 0 and far > 0):
        raise ValueError(
            f"cluster file {short(path)} has intra.beta_s={near}, inter.beta_s={far}: both must be "
            "> 0 for a router that weighs links; calibrate with more sizes, or name the costs in "
            "router.links.costs")
    return near, far


def link_costs(config: MoEConfig, comm: Comm) -> Tensor:
    """Cost of a byte from rank i to rank j, float64 [W, W]: from a file, or by the topology.

    Without `router.links.costs`, a byte within a node and between nodes costs what the cluster file
    (`comm.cluster`) says, with the network cards shared by the ranks of a node; without that file,
    1 and `router.links.far`.

    Raises:
        ValueError: a file that cannot be read, or costs of another number of ranks.
    """
    links = config.router.links
    if links.costs is None:
        path = config.comm.cluster
        near, far = (1.0, links.far) if path is None else calibrated_costs(path)
        node_W = torch.tensor(comm.topology.node_of)
        return torch.where(node_W[:, None] == node_W, torch.tensor(near, dtype=torch.float64),
                           torch.tensor(far, dtype=torch.float64))
    remedy = "give a YAML or JSON list of lists of numbers"
    rows = read_yaml(links.costs, "router.links.costs", remedy, kind=list)
    try:
        beta_WW = torch.tensor(rows, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"router.links.costs={short(links.costs)} cannot be read: "
                         f"{short(error)}; {remedy}") from error
    if beta_WW.shape != (comm.size, comm.size):
        raise ValueError(
            f"router.links.costs={short(links.costs)} has shape {tuple(beta_WW.shape)}: must be "
            f"{comm.size} x {comm.size}, the expert-parallel ranks; give one row per rank")
    return beta_WW


def near_experts(comm: Comm, experts: int, shards: int | None = None) -> Tensor:
    """Whether each expert is on this rank's node, bool [E]; all its shards must be.

    Args:
        comm: ranks that hold the experts.
        experts: E.
        shards: see `expert_shares`.
    """
    here = torch.tensor([comm.topology.same_node(comm.rank, rank) for rank in range(comm.size)])
    here_G = here.view(-1, shards or max(1, comm.size // experts)).all(1)
    return here_G.repeat_interleave(experts // here_G.numel())


def expert_nodes(comm: Comm, experts: int, shards: int | None = None) -> Tensor:
    """Whether each expert, or a shard of it, is on each node, bool [E, N].

    Args:
        comm: ranks that hold the experts.
        experts: E.
        shards: see `expert_shares`.
    """
    node_W = torch.tensor(comm.topology.node_of)
    on_WN = node_W[:, None] == torch.arange(int(node_W.max()) + 1)
    on_GN = on_WN.view(-1, shards or max(1, comm.size // experts), on_WN.shape[1]).any(1)
    return on_GN.repeat_interleave(experts // on_GN.shape[0], 0)


def prefer_visited(scores_TE: Tensor, k: int, nodes_EN: Tensor, own: int, bias: float) -> Tensor:
    """The k best experts of each token, one after the other, int64 [T, K]. Those that are on no
    other nodes than its row goes to anyway have `bias` more: nodes of its choices before, and the
    one that it is on.

    Args:
        scores_TE: float.
        nodes_EN: see `expert_nodes`.
        own: the node that the tokens are on.
        bias: in units of a score; 0 gives the k largest, ties to the lower index.
    """
    apart_NE = nodes_EN.T.to(scores_TE.dtype)
    new_TN = torch.ones_like(scores_TE[:, :1]).repeat(1, apart_NE.shape[0])
    new_TN[:, own] = 0
    chosen, left_TE = [], scores_TE
    for _ in range(k):
        best_T1 = top_k_stable(left_TE + bias * (new_TN @ apart_NE == 0), 1)
        chosen.append(best_T1)
        left_TE = left_TE.scatter(1, best_T1, float("-inf"))
        new_TN = new_TN * ~nodes_EN[best_T1[:, 0]]
    return torch.cat(chosen, 1)
