"""A layer, its links and its processors as numbers for the planner; links and processors from the
files of the settings, else typical ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    # gloo between two processes of one machine, as `moe-plugin calibrate` finds it
    "intra": Link(alpha_s=200e-6, beta_s=1 / 1e9), "inter": Link(alpha_s=200e-6, beta_s=1 / 100e6)
}
# Ranks of one machine without a GPU: what it costs them to meet, and a byte in and out of a buffer
# for rows on their way. Fitted to whole training steps (docs/benchmarks/data/predicted.md)
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
    sizes = list(map(len, comm.topology.nodes)) if comm.size > 1 else [1]
    known = comm.state.get(Calibration).cluster
    if known is not None:
        return known.with_nodes(sizes)
    gpu = device.type == "cuda"
    links = _GPU_LINKS if gpu else _CPU_LINKS
    together = not gpu and len(sizes) == 1  # between nodes the links' own times are longer
    return Cluster(name="default", nics=max(sizes) if gpu else 1, **links,
                   phase_s=_CPU_MEETING_S if together else 0.0,
                   copy_s=_CPU_COPY_S if together else 0.0).with_nodes(sizes)


def default_device(config: MoEConfig, device: torch.device) -> Device:
    """The device file of the settings, or a typical processor of this kind."""
    if config.tuner.device:
        return load_device(config.tuner.device)
    return _GPU if device.type == "cuda" else _CPU


def count_visits(routing: Routing, place: Placement, copies: Sequence[int]) -> list[float]:
    """Ranks and nodes that the tokens of this rank visit, by choice, one after the other for each
    r of `copies`; 0 where there is no choice. The host waits for it.
    """
    if not copies:
        return []
    node_W = to_device([*place.comm.topology.node_of, -1], routing.ids_TK.device)
    found = [(routing.ids_TK >= 0).sum()]
    for r in copies:
        at = replace(place, copies=r)
        rank_TK = torch.div(expand(at, routing, None)[0], at.local, rounding_mode="floor")
        found += [first_of_each(rank_TK).sum(), first_of_each(node_W[rank_TK]).sum()]
    choices, *visits = torch.stack(found).tolist()
    return [visited / max(1, choices) for visited in visits]


def as_visits(by_choice: Sequence[float], copies: Sequence[int], choices: int) -> Visits | None:
    """Of a token with so many choices; None: there is none. by_choice: see `count_visits`."""
    rows = zip(copies, by_choice[::2], by_choice[1::2], strict=True)
    return {r: OnceRows(ranks * choices, nodes * choices, r * choices)
            for r, ranks, nodes in rows} if any(by_choice) else None


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
                      latent_dim=config.experts.latent_dim, hidden_dim=config.hidden_dim,
                      experts=config.num_experts,
                      top_k=config.router.experts_per_token,
                      gated=config.experts.kind == "gated_ffn",
                      element_bytes=probe.element_size(), shards=place.shards, skew=skew,
                      guests=config.parallel.guests, limits=_limits(config),
                      visits=visits)


def _limits(config: MoEConfig) -> Limits:
    router, reads = config.router, [routers.get(name).reads for name in config.router.names]
    if not router.groups or any("groups" not in names for names in reads):
        return Limits()
    return Limits(router.groups, max(
        router.group_top_k if "group_top_k" in names else 1 for names in reads))
