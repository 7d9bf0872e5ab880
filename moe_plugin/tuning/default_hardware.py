"""A layer, its links and its processors as numbers for the planner; links and processors from the
files of the settings, else typical ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch.bundles import first_of_each
from moe_plugin.machine import to_device
from moe_plugin.planner.cluster import Cluster, Link
from moe_plugin.planner.device import Device, load_device
from moe_plugin.planner.layer_cost import LayerShape
from moe_plugin.planner.once import Visits, most_targets
from moe_plugin.records import Placement
from moe_plugin.routing.registry import routers

_GPU_LINKS = {
    "intra": Link(alpha_s=5e-6, beta_s=1 / 200e9), "inter": Link(alpha_s=10e-6, beta_s=1 / 20e9)
}
_CPU_LINKS = {
    # gloo between two processes of one machine, as `moe-plugin calibrate` finds it
    "intra": Link(alpha_s=200e-6, beta_s=1 / 1e9), "inter": Link(alpha_s=200e-6, beta_s=1 / 100e6)
}
# Ranks of one machine without a GPU: what it costs them to meet, and a byte in and out of a buffer
# for rows on their way. Fitted to whole training steps by `moe-plugin bench predicted`
_CPU_MEETING_S, _CPU_COPY_S = 0.4e-3, 2e-10
_GPU = Device(name="default", flops=200e12, half_rows=256, memory_bytes_s=1.5e12, launch_s=1e-5,
              memory_bytes=40e9)
_CPU = Device(name="default", flops=5e10, half_rows=16, memory_bytes_s=8e9, launch_s=3e-5,
              memory_bytes=8e9)


@dataclass
class Calibration:
    """What `prepare_group.prepare` keeps with a group; cluster: of its file, None without one."""

    cluster: Cluster | None = None


def default_cluster(comm: Comm, device: torch.device) -> Cluster:
    """The calibrated cluster in the shape of the group, or one with typical links.

    The group must be prepared: the shape is that of its topology.
    """
    nodes = len(comm.topology.nodes) if comm.size > 1 and comm.topology.uniform_nodes else 1
    known = comm.state.get(Calibration).cluster
    if known is not None:
        return known.resized(nodes, comm.size // nodes)
    gpu = device.type == "cuda"
    links = _GPU_LINKS if gpu else _CPU_LINKS
    together = not gpu and nodes == 1  # between nodes the links' own times are longer
    return Cluster(name="default", nodes=nodes, ranks_per_node=comm.size // nodes,
                   nics=comm.size // nodes if gpu else 1, **links,
                   phase_s=_CPU_MEETING_S if together else 0.0,
                   copy_s=_CPU_COPY_S if together else 0.0)


def default_device(config: MoEConfig, device: torch.device) -> Device:
    """The device file of the settings, or a typical processor of this kind."""
    if config.tuner.device:
        return load_device(config.tuner.device)
    return _GPU if device.type == "cuda" else _CPU


def count_visits(ids_TK: Tensor, place: Placement) -> Tensor:
    """(ranks, nodes) that tokens visit and their choices, summed over the tokens of this rank,
    int64 [3]; each choice on the first rank that has a shard of its expert.

    ids_TK: int64 experts, -1: none.
    """
    run_TK = torch.div(ids_TK, place.local, rounding_mode="floor")
    rank_TK = torch.where(ids_TK < 0, -1, run_TK * place.shards)
    node_W = to_device([*place.comm.topology.node_of, -1], ids_TK.device)
    return torch.stack([first_of_each(rank_TK).sum(), first_of_each(node_W[rank_TK]).sum(),
                        (ids_TK >= 0).sum()])


def as_visits(ranks: float, nodes: float, choices: float) -> Visits | None:
    """Of a token with so many choices; None: there is none. ranks, nodes: by choice."""
    return Visits(ranks * choices, nodes * choices, choices) if ranks else None


def layer_shape(config: MoEConfig, place: Placement, probe: Tensor, tokens: int,
                skew: float = 1.0, visits: Visits | None = None) -> LayerShape:
    """A layer under a load as the planner sees it.

    Args:
        probe: one of its parameters.
        tokens: of the rank with most.
        skew: rows of the fullest rank over the mean.
        visits: where tokens go, measured.
    """
    return LayerShape(tokens=max(1, tokens), model_dim=config.model_dim,
                      hidden_dim=config.hidden_dim, experts=config.num_experts,
                      top_k=config.router.experts_per_token,
                      gated=config.experts.kind == "gated_ffn",
                      element_bytes=probe.element_size(), shards=place.shards, skew=skew,
                      guests=config.parallel.guests, most_nodes=_most_nodes(config, place),
                      visits=visits)


def _most_nodes(config: MoEConfig, place: Placement) -> int | None:
    """Nodes on which a token's experts may be, where its router limits them; None: any."""
    router, reads = config.router, [routers.get(name).reads for name in config.router.names]
    if not router.groups or any("groups" not in names for names in reads):
        return None
    chosen = max(router.group_top_k if "group_top_k" in names else 1 for names in reads)
    return most_targets(len(place.comm.topology.nodes), router.groups, chosen)
