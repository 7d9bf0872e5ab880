"""Descriptions of layers, links and processors for the planner.

The settings may specify files that describe links and processors. Otherwise, typical values are
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch.base import expand
from moe_plugin.dispatch.bundles import first_of_each
from moe_plugin.planner.cluster import Cluster, Device, Link, load_device
from moe_plugin.planner.layer_cost import LayerShape
from moe_plugin.planner.once import Limits, OnceRows, Visits
from moe_plugin.records import Routing
from moe_plugin.routing.registry import routers
from moe_plugin.utils.machine import to_device

_GPU_LINKS = {
    "intra": Link(alpha_s=5e-6, beta_s=1 / 200e9), "inter": Link(alpha_s=10e-6, beta_s=1 / 20e9)
}
_CPU_LINKS = {
    # gloo between two processes of one machine, as measured by `moe-plugin calibrate`
    "intra": Link(alpha_s=200e-6, beta_s=1 / 1e9), "inter": Link(alpha_s=200e-6, beta_s=1 / 100e6)
}
# Costs of ranks on one machine without a GPU: waiting for each other, and copying a byte into and
# out of a send buffer. Fitted to whole training steps (docs/benchmarks/data/predicted.md).
_CPU_MEETING_S, _CPU_COPY_S = 0.4e-3, 2e-10
_GPU = Device(name="default", flops=200e12, half_rows=256, memory_bytes_s=1.5e12, launch_s=1e-5,
              memory_bytes=40e9)
_CPU = Device(name="default", flops=5e10, half_rows=16, memory_bytes_s=8e9, launch_s=3e-5,
              memory_bytes=8e9)


@dataclass
class Calibration:
    """The calibrated cluster that `prepare_group.prepare` stores in the state of a group.

    cluster: cluster from the file that the settings specify, or None if they specify no file.
    """

    cluster: Cluster | None = None


def default_cluster(comm: Comm, device: torch.device) -> Cluster:
    """Return the calibrated cluster of a group, or a cluster with the group's nodes and typical
    links.

    The group must be prepared, because its topology determines the nodes.
    """
    sizes = list(map(len, comm.topology.nodes)) if comm.size > 1 else [1]
    known = comm.state.get(Calibration).cluster
    if known is not None:
        return known.with_nodes(sizes)
    gpu = device.type == "cuda"
    links: dict[str, Any] = _GPU_LINKS if gpu else _CPU_LINKS
    together = not gpu and len(sizes) == 1  # between nodes, the links dominate these costs
    return Cluster(name="default", nics=max(sizes) if gpu else 1, **links,
                   phase_s=_CPU_MEETING_S if together else 0.0,
                   copy_s=_CPU_COPY_S if together else 0.0).with_nodes(sizes)


def default_device(config: MoEConfig, device: torch.device) -> Device:
    """Return the device from the file that the settings specify, or a typical device."""
    if config.tuner.device:
        return load_device(config.tuner.device)
    return _GPU if device.type == "cuda" else _CPU


def count_visits(routing: Routing, place: Placement, copies: Sequence[int]) -> list[float]:
    """Count the ranks and the nodes that this rank's tokens are sent to, and return these counts
    per selected expert.

    For each r in `copies`, the result contains the number of ranks and then the number of nodes. If
    no token has selected an expert, all numbers are 0. The host waits for the device.
    """
    if not copies:
        return []
    node_W = to_device([*place.comm.topology.node_of, -1], routing.ids_TK.device)
    counts = [(routing.ids_TK >= 0).sum()]
    for r in copies:
        at = replace(place, copies=r)
        rank_TK = torch.div(expand(at, routing, None)[0], at.local, rounding_mode="floor")
        counts += [first_of_each(rank_TK).sum(), first_of_each(node_W[rank_TK]).sum()]
    choices, *visits = torch.stack(counts).tolist()
    return [visited / max(1, choices) for visited in visits]


def as_visits(by_choice: Sequence[float], copies: Sequence[int], choices: int) -> Visits | None:
    """Return the visits of a token that selects `choices` experts, or None if no visits were
    counted.

    by_choice: numbers of ranks and of nodes per selected expert; see `count_visits`.
    """
    rows = zip(copies, by_choice[::2], by_choice[1::2], strict=True)
    return {r: OnceRows(ranks * choices, nodes * choices, r * choices)
            for r, ranks, nodes in rows} if any(by_choice) else None


def layer_shape(config: MoEConfig, place: Placement, probe: Tensor, tokens: int,
                skew: float = 1.0, visits: Visits | None = None) -> LayerShape:
    """Describe a layer under a given load for the planner.

    Args:
        config: settings of the layer.
        place: placement that states which ranks store the layer's parameters.
        probe: a parameter of the layer, whose dtype determines the element size.
        tokens: maximum number of tokens on any rank.
        skew: maximum number of rows on any rank, divided by the mean over all ranks. Defaults to 1.
        visits: measured numbers of ranks and nodes to which each token is sent. Defaults to
            unknown.
    """
    return LayerShape(tokens=max(1, tokens), model_dim=config.model_dim,
                      latent_dim=config.experts.latent_dim, hidden_dim=config.hidden_dim,
                      experts=config.num_experts,
                      top_k=config.router.experts_per_token,
                      gated=config.experts.kind == "gated_ffn",
                      element_bytes=probe.element_size(), shards=place.shards, skew=skew,
                      guests=config.parallel.guests, limits=_limits(config),
                      visits=visits)


def _limits(config: MoEConfig) -> Limits:
    factories: list[Any] = [routers.get(name) for name in config.router.names]
    router, reads = config.router, [factory.reads for factory in factories]
    if not router.groups or any("groups" not in names for names in reads):
        return Limits()
    return Limits(router.groups, max(
        router.group_top_k if "group_top_k" in names else 1 for names in reads))
