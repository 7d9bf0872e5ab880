"""Routers by name, and how a layer builds the one (or several) that its settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.registry import Registry

routers: Registry[Callable[..., nn.Module]] = Registry("router")


def build_router(config: MoEConfig, comm: Comm | None = None, *, dtype: torch.dtype | None = None, device: Any = None) -> nn.Module:
    """The configured router, or a `Gates` of several.

    A router is made by `factory(config, comm=, dtype=, device=)` and called as `router(x_TD, mask_T, top_k)`, with a `TokenInfo` as fourth
    argument where the call has one. comm: ranks that hold the experts; None: this rank alone.
    """
    from moe_plugin.routing.gates import Gates

    where = {"comm": comm, "dtype": dtype, "device": device}
    made = [routers.get(name)(config, **where) for name in config.router.names]
    return made[0] if len(made) == 1 else Gates(made)
