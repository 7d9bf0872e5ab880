"""Routers that users bring: what they return is checked, because a layer would use some of it
wrongly without a word (an expert that does not exist, weights that broadcast).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.records import Routing
from moe_plugin.routing.losses import losses
from moe_plugin.routing.token_values import check_range


@dataclass(frozen=True)
class RoutingCheck:
    """A forward hook: `ValueError` unless a router's result has the form of a `Routing`.

    Ids of experts that do not exist are found on a CPU only: a GPU would be waited for.

    Attributes:
        experts: E.
    """

    experts: int

    def __call__(self, router: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any],
                 routing: Routing) -> None:
        """See the class."""
        who = f"router {type(router).__name__}"
        if not isinstance(routing, Routing):
            raise ValueError(f"{who} returned a {type(routing).__name__}: must be a "
                             "moe_plugin.records.Routing")
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
                    f"{who} returned ids_TK with experts {{}}..{{}}: must be in "
                    f"0..{self.experts - 1}, or -1 for no expert; build it for "
                    f"num_experts={self.experts}")


def _refused(who: str, name: str, found: Tensor, wanted: str) -> ValueError:
    return ValueError(f"{who} returned {name} of shape {tuple(found.shape)} and {found.dtype}: "
                      f"must be {wanted}")


def check_results(router: nn.Module, experts: int) -> None:
    """Check what a router, or each of several, returns from now on, unless it is of this package.
    """
    check = RoutingCheck(experts)
    for part in getattr(router, "routers", []) if _of_package(router) else [router]:
        if not _of_package(part) and check not in part._forward_hooks.values():
            part.register_forward_hook(check, with_kwargs=True)


def _of_package(router: nn.Module) -> bool:
    return type(router).__module__.startswith(f"{__name__.split('.')[0]}.")


def check_losses(router: nn.Module, weights: Mapping[str, float]) -> None:
    """`ValueError` for a loss, name to weight, that neither the registry nor the router knows."""
    own = getattr(router, "own_losses", frozenset())
    for name, weight in weights.items():
        if weight > 0 and name not in own:
            losses.get(name)
