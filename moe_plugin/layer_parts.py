"""What a layer is given to be built from, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_plugin.comm import Comm, default_comm
from moe_plugin.config import MoEConfig
from moe_plugin.config.named import layer_config, refuse_beside, refuse_timeout
from moe_plugin.utils.messages import short


@dataclass(frozen=True)
class GivenParts:
    """Arguments of `MoELayer`.

    Attributes:
        config: all settings, those that were passed by name among them.
        comm: the expert-parallel group.
        router, experts: the user's own; None: as configured.
    """

    config: MoEConfig
    comm: Comm
    router: nn.Module | None
    experts: Callable[[int], nn.Module] | None


def given_parts(config: MoEConfig | int, comm: Comm | None,
                router: nn.Module | str | Mapping[str, Any] | None,
                experts: Callable[[int], nn.Module] | Mapping[str, Any] | None,
                settings: Mapping[str, Any]) -> GivenParts:
    """The arguments of a layer, each in the one form in which it is read; see `MoELayer`.

    Raises:
        ValueError: types or settings that do not fit, or that nothing would read.
    """
    _check_given(comm, router, experts)
    config = layer_config(config, settings, router=router, experts=experts)
    refuse_timeout(comm, settings)
    own_router = router if isinstance(router, nn.Module) else None
    own_experts = experts if callable(experts) else None
    refuse_beside(config, router=own_router is not None, experts=own_experts is not None)
    comm = comm if comm is not None else default_comm(config.comm.timeout_s)
    return GivenParts(config, comm, own_router, own_experts)


def _check_given(comm: Any, router: Any, experts: Any) -> None:
    """What is of none of the types that these arguments take would be left out silently."""
    if comm is not None and not isinstance(comm, Comm):
        raise ValueError(f"comm={short(comm)} is a {type(comm).__name__}; must be a Comm, such as "
                         "TorchComm(group); give the number of experts as num_experts=...")
    if not isinstance(router, nn.Module | str | Mapping | None):
        raise ValueError(f"router={short(router)} is a {type(router).__name__}; must be a name, a "
                         "dict of settings or a built module; register a class of yours with "
                         "moe_plugin.routing.routers.register(name)")
    if experts is not None and not callable(experts) and not isinstance(experts, Mapping):
        raise ValueError(f"experts={short(experts)} is a {type(experts).__name__}; must be a dict "
                         "of settings or a function of the expert's global index that returns a "
                         "module, e.g. lambda index: modules[index]")
