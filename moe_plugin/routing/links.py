"""What links cost, and how many tokens should go over each (TA-MoE, Chen et al. 2022).

W ranks of the expert-parallel group, beta_WW: cost of a byte from rank i to rank j. If rank i sends
c_ij of its tokens to rank j, the exchange takes max_ij beta_ij c_ij. Least for c_ij proportional to
1 / beta_ij in each row, where rows and columns then both sum alike (symmetric topologies); columns
must, because each rank computes the same number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.planner.cluster import load_cluster
from moe_plugin.yaml_file import read_yaml

ROUNDS = 1000


def target_shares(beta_WW: Tensor) -> Tensor:
    """c_WW, float64: share of rank i's tokens that should go to rank j; all rows and columns sum to
    1.

    (1 / beta_ij) / sum_j (1 / beta_ij) where that has equal columns: then it is the optimum of
    TA-MoE's linear program. Otherwise rows and columns are scaled in turn until both sum to 1,
    which is feasible, but not the optimum.

    Raises: ValueError: costs that are not positive, or no square matrix.
    """
    if beta_WW.dim() != 2 or beta_WW.shape[0] != beta_WW.shape[1] or not (
            beta_WW > 0).all() or not beta_WW.isfinite().all():
        raise ValueError(
            f"link costs of shape {tuple(beta_WW.shape)} do not fit: must be a square matrix of "
            "positive numbers, the diagonal included"
        )
    shares_WW = 1 / beta_WW.double()
    for _ in range(ROUNDS):
        shares_WW = shares_WW / shares_WW.sum(1, keepdim=True)
        if (shares_WW.sum(0) - 1).abs().max() < 1e-12:
            break
        shares_WW = shares_WW / shares_WW.sum(0, keepdim=True)
    return shares_WW / shares_WW.sum(1, keepdim=True)


def expert_shares(beta_WW: Tensor, rank: int, experts: int, shards: int | None = None) -> Tensor:
    """c_E, float64, sums to 1: share of this rank's choices that should go to each expert.

    Experts of a rank share its part alike. Where experts are cut over several ranks (`shards`;
    None: W / E, at least 1) they get what these get together.
    """
    row_W = target_shares(beta_WW)[rank]
    run_G = row_W.view(-1, shards or max(1, row_W.numel() // experts)).sum(1)
    each = experts // run_G.numel()
    return (run_G / each).repeat_interleave(each)


def penalties(shares_E: Tensor, blend: float) -> Tensor:
    """q_E = blend * (1 / c_E) / mean(1 / c_E) + 1 - blend; mean 1."""
    inverse_E = 1 / shares_E
    return blend * inverse_E / inverse_E.mean() + 1 - blend


def link_penalties(config: MoEConfig, comm: Comm) -> Tensor:
    """`penalties` of this rank by the settings `router.links`, float32 [E]."""
    shares_E = expert_shares(link_costs(config, comm), comm.rank, config.num_experts,
                             config.parallel.shards)
    return penalties(shares_E, config.router.links.blend).float()


def calibrated_costs(path: str) -> tuple[float, float]:
    """Seconds a byte (on a node, to another node) by a cluster file; `ValueError` where it has none
    for one of them.
    """
    cluster = load_cluster(path)
    near, far = cluster.intra.beta_s, cluster.inter.beta_s * cluster.ranks_per_node / min(
        cluster.nics, cluster.ranks_per_node)
    if not (near > 0 and far > 0):
        raise ValueError(
            f"cluster file {path!r} has intra.beta_s={near}, inter.beta_s={far}: both must be > 0 "
            "for a router that weighs links; calibrate "
            "with more sizes, or name the costs in router.links.costs")
    return near, far


def link_costs(config: MoEConfig, comm: Comm) -> Tensor:
    """beta_WW, float64: from the file that settings name, else by the nodes of the group's
    topology.

    On a node and between nodes a byte costs what `comm.cluster` was calibrated to, the ranks of a
    node sharing its cards; without such a file 1 and `far`.
    Raises: ValueError: a file that cannot be read, or costs of another number of ranks.
    """
    links = config.router.links
    if links.costs is None:
        near, far = (1.0, links.far) if config.comm.cluster is None else calibrated_costs(
            config.comm.cluster)
        node_W = torch.tensor(comm.topology.node_of)
        return torch.where(node_W[:, None] == node_W, torch.tensor(near, dtype=torch.float64),
                           torch.tensor(far, dtype=torch.float64))
    remedy = "give a YAML or JSON list of lists of numbers"
    rows = read_yaml(links.costs, "router.links.costs", remedy, kind=list)
    try:
        beta_WW = torch.tensor(rows, dtype=torch.float64)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"router.links.costs={links.costs!r} cannot be read: {error}; {remedy}") from error
    if beta_WW.shape != (comm.size, comm.size):
        raise ValueError(
            f"router.links.costs={links.costs!r} has shape {tuple(beta_WW.shape)}: must be "
            f"{comm.size} x {comm.size}, "
            "the expert-parallel ranks; give one row a rank")
    return beta_WW


def near_experts(comm: Comm, experts: int, shards: int | None = None) -> Tensor:
    """bool [E]: experts on this rank's node (an expert that is cut over nodes is on none but its
    own ranks' common one).
    """
    here = torch.tensor([comm.topology.same_node(comm.rank, rank) for rank in range(comm.size)])
    here_G = here.view(-1, shards or max(1, comm.size // experts)).all(1)
    return here_G.repeat_interleave(experts // here_G.numel())
