"""Building the experts of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_plugin.config import MoEConfig
from moe_plugin.experts.base import Experts, expert_kinds
from moe_plugin.experts.custom import CustomExperts
from moe_plugin.machine import memory_bytes
from moe_plugin.records import HostContext, Placement

_MATRICES = {"ffn": 2, "gated_ffn": 3}


def build_device_experts(config: MoEConfig, place: Placement, host: HostContext,
                  factory: Callable[[int], nn.Module] | None, **where: Any) -> Experts:
    """The experts of this rank, of the configured kind.

    Args:
        factory: `factory(global_index) -> module`: custom experts instead; None: as configured.
        where: dtype and device of the parameters.
    """
    if factory is not None:
        return CustomExperts(factory, place)
    return expert_kinds.get(config.experts.kind)(config, place, host=host, **where)


def check_memory(config: MoEConfig, place: Placement, factory: Callable[[int], nn.Module] | None,
                 dtype: torch.dtype | None, device: Any) -> None:
    """Check, before anything is allocated, that this rank's weights can fit its memory at all.

    Nothing is checked on the meta device, for experts that are not ours, and for those on disk.

    Args:
        factory: see `build_device_experts`.
        dtype, device: of the parameters, as for torch's modules.
    Raises:
        ValueError: they are larger than the whole memory.
    """
    store = config.experts.store
    like = torch.empty(0, dtype=dtype, device="cpu" if store == "host" else device)
    memory = memory_bytes(like.device)
    if (memory is None or store == "disk" or factory is not None
            or config.experts.kind not in _MATRICES):
        return
    width, matrices = config.model_dim, _MATRICES[config.experts.kind]
    elements = width * (config.num_experts + matrices * (
        place.local * (config.hidden_dim // place.shards) + config.experts.shared_hidden_dim))
    if elements * like.element_size() > memory:
        raise ValueError(
            f"num_experts={config.num_experts} with model_dim={width}, "
            f"hidden_dim={config.hidden_dim} needs {elements * like.element_size() / 2**30:.3g} "
            f"GiB for the weights of this rank: must be <= the {memory / 2**30:.3g} GiB of "
            f"{like.device}; use more ranks, or fewer or narrower experts")
