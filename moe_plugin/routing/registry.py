"""Routers by name, and how a layer builds the one (or several) that its settings name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.config import MoEConfig
from moe_plugin.config.router import may_be_read, readers_of
from moe_plugin.records import HostContext
from moe_plugin.registry import Registry
from moe_plugin.routing.balance import check_balance
from moe_plugin.routing.contract import RouterModule
from moe_plugin.routing.foreign import check_losses, check_results
from moe_plugin.routing.several_routers import RouterSelector

routers: Registry[Callable[..., nn.Module]] = Registry("router")


def build_router(config: MoEConfig, comm: Comm | None = None, *, host: HostContext = HostContext(),
                 dtype: torch.dtype | None = None, device: Any = None) -> nn.Module:
    """The configured router, or a `RouterSelector` of several.

    A router is made by `factory(config, comm=, host=, dtype=, device=)` and called as
    `router(x_TD, mask_T, top_k, info)`.

    Args:
        config: of the layer. comm: ranks that hold the experts; None: this rank alone.
        host: what the host knows of the layer.
        dtype, device: of the parameters.
    """
    config.router.check_read()
    where = {"comm": comm, "host": host, "dtype": dtype, "device": device}
    factories = [routers.get(name) for name in config.router.names]
    if len(factories) == 1:
        return factories[0](config, **where)
    made = [factory(_with_own_losses(config, factory, factories), **where) for factory in factories]
    return RouterSelector(made, config.router, comm=comm, host=host, device=device)


def layer_router(config: MoEConfig, comm: Comm, router: nn.Module | None, host: HostContext,
                 **where: Any) -> nn.Module:
    """The router of a layer: `router` where one is given, else the configured one.

    What a router of another package returns is checked in each call (`RoutingCheck`). Warns once
    where nothing keeps the experts balanced, see `check_balance`. where: see `build_router`.

    Raises:
        ValueError: a loss of an unknown name, or what `build_router` refuses.
    """
    if router is None:
        router = build_router(config, comm, host=host, **where)
    else:
        check_losses(router, config.losses)
    check_results(router, config.num_experts)
    check_balance(router, config, comm, host)
    return router


def _with_own_losses(config: MoEConfig, factory: Callable[..., nn.Module],
                     factories: list[Callable[..., nn.Module]]) -> MoEConfig:
    """Without the losses that only other routers of the list can compute. A loss that none of them
    can compute stays, and the router refuses it.
    """
    others = frozenset().union(*map(_own_losses, factories)) - _own_losses(factory)
    losses = {name: weight for name, weight in config.losses.items() if name not in others}
    return replace(config, losses=losses)


def _own_losses(factory: Callable[..., nn.Module]) -> frozenset[str]:
    declared = isinstance(factory, type) and issubclass(factory, RouterModule)
    return factory.own_losses if declared else frozenset()


def only_read(settings: Mapping[str, Any], names: Collection[str], top_k: int) -> dict[str, Any]:
    """Settings by dotted path without those of `router` that these routers do not read: for a host
    whose own settings are of any router.
    """
    def is_read(name: str, value: Any) -> bool:
        return may_be_read(names, readers_of(name, value)) and (
            name != "normalize" or value == "none" or top_k > 1)

    return {path: value for path, value in settings.items()
            if not path.startswith("router.") or is_read(path.removeprefix("router."), value)}
