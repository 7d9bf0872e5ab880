"""The registry of routers, and functions that build and check the router of a layer.

For each layer, the routers named in the layer's settings are built. The routings returned by
user-defined routers are checked, because some mistakes would produce wrong outputs without an
error. Examples of such mistakes are indices of experts that do not exist, and weights whose shape
is broadcast. A warning is logged if neither the router nor any loss keeps the experts balanced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig
from moe_plugin.config.declared import may_be_read, readers_of
from moe_plugin.config.options import check
from moe_plugin.records import Routing
from moe_plugin.routing.call import check_range
from moe_plugin.routing.contract import RouterModule, TopKSchedule, balances_by_itself
from moe_plugin.routing.losses import losses
from moe_plugin.routing.several_routers import RouterSelector
from moe_plugin.utils.messages import first_process, warn_once
from moe_plugin.utils.registry import Registry


class Unlinked:
    """A placeholder for the routing of a layer that has not been linked with its neighboring
    layers. Calling the placeholder raises an error.

    setting: name of the setting that requires linked layers.
    """

    def __init__(self, setting: str) -> None:
        self.setting = setting

    @classmethod
    def of(cls, config: MoEConfig) -> Unlinked | None:
        """Return a placeholder if the settings require linked layers, and None otherwise."""
        if config.router.pre_gate:
            return cls("router.pre_gate=1")
        return cls("router.predict=True") if config.router.predict else None

    def __call__(self, *_: object) -> NoReturn:
        """Raise a `ValueError` that explains how to link the layers."""
        raise ValueError(f"The setting {self.setting} requires linked layers. Call "
                         "moe_plugin.routing.pregate.link(model) after building the model, or "
                         "remove the setting.")


@dataclass(frozen=True)
class RoutingCheck:
    """A forward hook that raises a `ValueError` if a router does not return a valid `Routing`.

    `check_range` reports indices of experts that do not exist.

    Attributes:
        experts: number of experts, E.
    """

    experts: int

    def __call__(self, router: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 routing: Routing) -> None:
        """Check the routing returned by a router."""
        who = f"router {type(router).__name__}"
        if not isinstance(routing, Routing):
            raise ValueError(f"The {who} returned an object of type {type(routing).__name__}. It "
                             "must return a moe_plugin.records.Routing.")
        # The first parameter of a user-defined router may have any name.
        x_TD = args[0] if args else next(iter(kwargs.values()))
        tokens, ids_TK = x_TD.shape[0], routing.ids_TK
        if ids_TK.dim() != 2 or ids_TK.shape[0] != tokens or ids_TK.dtype != torch.int64:
            raise _refused(who, "ids_TK", ids_TK, f"int64 of shape ({tokens}, k), -1 for padding")
        weights_TK = routing.weights_TK
        if weights_TK.shape != ids_TK.shape or not weights_TK.is_floating_point():
            raise _refused(who, "weights_TK", weights_TK,
                           f"float of shape {tuple(ids_TK.shape)}, as ids_TK")
        for name in ("priority_T", "passthrough_T"):
            x_T = getattr(routing, name)
            if x_T is not None and tuple(x_T.shape) != (tokens,):
                raise _refused(who, name, x_T, f"of shape {(tokens,)}, or None")
        check_range(ids_TK, -1, self.experts - 1,
                    f"The {who} returned ids_TK with experts {{}}..{{}}. They must be in "
                    f"0..{self.experts - 1}, or -1 for no expert. Build the router for "
                    f"num_experts={self.experts}.")


def _refused(who: str, name: str, value: Tensor, wanted: str) -> ValueError:
    return ValueError(f"The {who} returned {name} with shape {tuple(value.shape)} and dtype "
                      f"{value.dtype}. It must be {wanted}.")


def check_results(router: nn.Module, experts: int) -> None:
    """If a router is user-defined, register a hook that checks the routings it returns.

    Routers of this package are not checked. Combined routers are checked separately.
    """
    check = RoutingCheck(experts)
    for part in getattr(router, "routers", []) if _of_package(router) else [router]:
        # A router that several layers share gets the hook only once.
        if not _of_package(part) and check not in part._forward_hooks.values():
            part.register_forward_hook(check, with_kwargs=True)


def _of_package(router: nn.Module) -> bool:
    return type(router).__module__.startswith(f"{__name__.split('.')[0]}.")


def check_losses(router: nn.Module, weights: Mapping[str, float]) -> None:
    """Raise a `ValueError` if a loss is neither registered nor computed by the router.

    weights: mapping from the name of each loss to its weight.
    """
    own: frozenset[str] = getattr(router, "own_losses", frozenset())
    for name, weight in weights.items():
        if weight > 0 and name not in own:
            losses.get(name)


_REMEDY = ("most tokens will visit few experts. Use a balance loss, losses={'gshard': 0.01} "
           "(--moe-losses gshard=0.01; in Megatron also --moe-aux-loss-coeff 0.01), or a router "
           "that needs no balance loss, e.g. router.name=sigmoid_bias (--moe-router sigmoid_bias)")


def warn_unbalanced(why: str, remedy: str = _REMEDY) -> None:
    """Warn once per message that neither a router nor a loss keeps the experts balanced."""
    warn_once(__name__, f"{why}: nothing keeps the experts balanced in training, and {remedy}")


def check_balance(router: nn.Module, config: MoEConfig, comm: Comm, host: HostContext) -> None:
    """Log a warning if a layer has neither a balance loss nor a router that balances the experts.

    The warning is logged only on rank 0, only for the first layer, and only if the host framework
    trains the model. Routers that do not derive from `RouterModule` are assumed to balance the
    experts.
    """
    speaks = host.training and comm.rank == 0 and host.layer_number in (None, 0) and (
        first_process() if host.batch_comm is None else host.batch_comm.rank == 0)
    if speaks and config.router.force != "none":
        warn_once(__name__, f"router.force={config.router.force} replaces the router's choice of "
                  "experts. Use this setting for benchmarks only, not to train a model.")
        return
    # If every token visits every expert, the load is even without any balancing.
    everywhere = config.router.experts_per_token >= config.num_experts
    if not speaks or everywhere or balances_by_itself(router):
        return
    if not has_balance_loss(config.losses):
        warn_unbalanced(f"router.name={config.router.name!r} with losses={dict(config.losses)!r}")


def has_balance_loss(weights: Mapping[str, float]) -> bool:
    """Return whether any of the given losses increases when the load is uneven. The losses are
    given as a mapping from name to weight.
    """
    for name, weight in weights.items():
        if weight > 0 and getattr(losses.find(name), "balances", True):
            return True
    return False


routers: Registry[Callable[..., nn.Module]] = Registry("router")


def build_router(config: MoEConfig, comm: Comm | None = None, *, host: HostContext = HostContext(),
                 dtype: torch.dtype | None = None, device: Any = None) -> nn.Module:
    """Build the configured router. If several routers are configured, build a `RouterSelector`.

    The function calls `factory(config, comm=, host=, dtype=, device=)` to build a router. The
    router is later called as `router(x_TD, mask_T, top_k, info)`.

    Args:
        config: configuration of the layer.
        comm: group of ranks that store the experts. Defaults to a group of this rank only.
        host: information about the layer from the host framework.
        dtype, device: dtype and device of the router's parameters.
    """
    config.router.check_read()
    where = {"comm": comm, "host": host, "dtype": dtype, "device": device}
    factories = [routers.get(name) for name in config.router.names]
    if len(factories) == 1:
        return factories[0](config, **where)
    # Each router gets only losses that it can compute, because it rejects all other losses.
    made = [factory(_with_own_losses(config, factory, factories), **where) for factory in factories]
    return RouterSelector(made, config.router, comm=comm, host=host, device=device)


def layer_router(config: MoEConfig, comm: Comm, router: nn.Module | None, host: HostContext,
                 **where: Any) -> nn.Module:
    """Return the router of a layer, which is the `router` argument, or the configured router if the
    argument is None.

    If the router is not part of this package, the routings it returns are checked in each call
    (`RoutingCheck`). If neither the router nor a loss keeps the experts balanced, a warning is
    logged once; see `check_balance`. The arguments in `where` are passed on to `build_router`.

    Raises:
        ValueError: If a loss is unknown, or if `build_router` rejects the settings.
    """
    if router is None:
        router = build_router(config, comm, host=host, **where)
    else:
        check_losses(router, config.losses)
    if config.router.top_k_at:
        check(any(isinstance(part, TopKSchedule) for part in router.modules()), "router.top_k_at",
              config.router.top_k_at, f"empty with router {type(router).__name__}, which ignores "
              "the setting", "leave it out, or derive the router from moe_plugin.routing.Router")
    check_results(router, config.num_experts)
    check_balance(router, config, comm, host)
    return router


def _with_own_losses(config: MoEConfig, factory: Callable[..., nn.Module],
                     factories: list[Callable[..., nn.Module]]) -> MoEConfig:
    """Return the settings without losses that only other routers in the list can compute.

    A loss that no router can compute is kept, so that building the router raises an error.
    """
    others = frozenset().union(*map(_own_losses, factories)) - _own_losses(factory)
    losses = {name: weight for name, weight in config.losses.items() if name not in others}
    return replace(config, losses=losses)


def _own_losses(factory: Callable[..., nn.Module]) -> frozenset[str]:
    if isinstance(factory, type) and issubclass(factory, RouterModule):
        return factory.own_losses
    return frozenset()


def only_read(settings: Mapping[str, Any], names: Collection[str], top_k: int) -> dict[str, Any]:
    """Remove the settings in the `router` section that none of the given routers reads.

    Host frameworks use this function if some of their own settings apply to every router.

    Args:
        settings: mapping from the dotted path of each setting to its value.
        names: names of the routers.
        top_k: number of experts per token.
    """
    def is_read(name: str, value: Any) -> bool:
        return may_be_read(names, readers_of(name, value)) and (
            name != "normalize" or value == "none" or top_k > 1)

    return {path: value for path, value in settings.items()
            if not path.startswith("router.") or is_read(path.removeprefix("router."), value)}
