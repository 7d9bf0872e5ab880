"""Functions that create the experts of one rank on the device, in host memory or in a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.config import MoEConfig
from moe_plugin.experts import FFNExperts, build_device_experts, expert_kinds
from moe_plugin.experts.base import Experts
from moe_plugin.memory.experts.stored import StoredExperts


def build_experts(config: MoEConfig, place: Placement, host: HostContext,
                  factory: Callable[[int], nn.Module] | None, **where: Any) -> Experts:
    """Build this rank's experts in the storage selected by `experts.store`.

    Args:
        config: configuration of the layer.
        place: placement that determines which experts are stored on this rank.
        host: information from the host framework.
        factory, where: arguments passed on to `build_device_experts`.
    Raises:
        ValueError: If the settings contradict each other or do not match the file of the experts.
    """
    if config.experts.store == "device":
        return build_device_experts(config, place, host, factory, **where)
    _check(config, place, factory)
    return StoredExperts(config, place, host=host, **where)


def _check(config: MoEConfig, place: Placement,
           factory: Callable[[int], nn.Module] | None) -> None:
    parallel, ranks = config.parallel, place.comm.size
    known = factory is not None or issubclass(expert_kinds.get(config.experts.kind), FFNExperts)
    for name, value, bad, remedy in (
            ("custom experts", True, factory is not None, "experts of a registered kind"),
            ("experts.kind", config.experts.kind, not known, "ffn or gated_ffn"),
            ("parallel.r", parallel.r, ranks > 1 and parallel.r not in (None, place.shards),
             place.shards),
            ("parallel.spill", parallel.spill,
             ranks > 1 and parallel.spill not in (None, "never"), "never"),
            ("dispatch.stash_mib", config.dispatch.stash_mib,
             ranks > 1 and config.dispatch.stash_mib > 0, 0)):
        if bad:
            raise ValueError(f"experts.store={config.experts.store} cannot be used with "
                             f"{name}={value}: use {remedy}, or experts.store=device")
