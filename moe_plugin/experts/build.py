"""Building the experts of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from moe_plugin.config import MoEConfig
from moe_plugin.experts.base import Experts, expert_kinds
from moe_plugin.experts.custom import CustomExperts
from moe_plugin.records import HostContext, Placement


def build_experts(config: MoEConfig, place: Placement, host: HostContext,
                  factory: Callable[[int], nn.Module] | None, **where: Any) -> Experts:
    """The experts of this rank, of the configured kind.

    Args:
        factory: `factory(global_index) -> module`: custom experts instead; None: as configured.
        where: dtype and device of the parameters.
    """
    if factory is not None:
        return CustomExperts(factory, place)
    return expert_kinds.get(config.experts.kind)(config, place, host=host, **where)
