"""Several routers in one layer, one of which decides a call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.local import LocalComm
from moe_plugin.config.router import RouterConfig
from moe_plugin.records import HostContext, Routing, TokenInfo
from moe_plugin.routing.contract import RouterModule, needs_of
from moe_plugin.routing.router_selection import SelectionCall, router_selections


class RouterSelector(RouterModule):
    """Routers of which one decides a call: the one that `TokenInfo.router_index` names, else the one
    that `router.selection` chooses.

    All micro-batches of an optimizer step take the same one, and a recomputation takes the one of
    its first pass. The choice follows from settings, the layer's number and the steps that are over
    (`finish_step`), which all ranks share; these steps are saved with the weights, so that a run
    that goes on from a checkpoint goes on in the sequence. Parameters of the routers that did not
    decide get a gradient of zero, so that data-parallel wrappers that wait for every parameter do
    not wait for ever.

    Attributes: `layer`: number of this MoE layer in its model, from 0; None: not known. `steps`:
    optimizer steps that are over.

    Args:
        routers: in the order of `router.name`. config: its section `router`; None: the first
            decides.
        comm: ranks that hold the experts; with more than one, building is collective.
        host: what the host knows of the layer; the routers are built with it, too.
    Raises:
        ValueError: an unknown rule; ranks whose settings differ.
    """

    def __init__(self, routers: Sequence[nn.Module], config: RouterConfig | None = None,
                 *, comm: Comm | None = None, host: HostContext = HostContext(),
                 device: Any = None) -> None:
        super().__init__(host)
        self.routers = nn.ModuleList(routers)
        self.config = config or RouterConfig(name=",".join(type(router).__name__ for router in routers))
        self.rule = router_selections.get(self.config.selection.rule)
        self.layer = host.layer_number
        self.needs = frozenset().union(*(needs_of(router) for router in routers))
        self.steps = 0  # the buffer's value, here without asking a device
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=device))
        _check_agreement(self.config, comm if comm is not None else LocalComm())

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """As the chosen router. `ValueError`: there is no router of that index."""
        if torch.compiler.is_compiling():
            index = self._choose(info)
        # recorded with the router's choice: replayed elsewhere, under another step number, it must
        # be the same router's
        else:
            index = int(self.replayed(lambda: torch.tensor(self._choose(info))))
        router = self.routers[index]
        routing = router(x_TD, mask_T, top_k, info)
        weights_TK = routing.weights_TK
        if self.training and torch.is_grad_enabled():
            idle = [
                p for other in self.routers if other is not router for p in other.parameters()
                if p.requires_grad
            ]
            weights_TK = _WithIdle.apply(weights_TK, *idle) if idle else weights_TK
        return replace(routing, weights_TK=weights_TK, router=self.config.names[index])

    def _choose(self, info: TokenInfo | None) -> int:
        count = len(self.routers)
        if info is not None and info.router_index is not None:
            index, who = info.router_index, "router_index"
        else:
            index, who = self.rule(
                SelectionCall(count, self.steps, self.layer, self.training,
                         self.config.selection)), f"selection {self.config.selection.rule!r}: index"
        if not 0 <= index < count:
            raise ValueError(
                f"{who}={index} is out of bounds: must be in 0..{count - 1}; router.name lists "
                f"{count}"
            )
        return index

    def finish_step(self) -> None:
        """One optimizer step further; the routers themselves are told by
        `moe_plugin.routing.finish_step`.
        """
        self.steps += 1
        self.step.fill_(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        saved = state_dict.get(f"{prefix}step")
        if saved is not None and not saved.is_meta:
            self.steps = int(saved)


class _WithIdle(torch.autograd.Function):
    """Gate weights as they are; parameters that had no part in them get a gradient of zero (not 0 *
    value, which may be NaN).
    """

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, *idle: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in idle]
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, ...]:
        return (grad_TK, *(torch.zeros(shape, dtype=dtype, device=device)
                           for shape, dtype, device in ctx.like))


def number_layers(model: nn.Module) -> int:
    """Number the lists of routers in a model from 0 in the order of its modules, for
    `router.selection.rule`; returns how many there are.
    """
    found = [module for module in model.modules() if isinstance(module, RouterSelector)]
    for index, gates in enumerate(found):
        gates.layer = index
    return len(found)


def _check_agreement(config: RouterConfig, comm: Comm) -> None:
    """Ranks that take different routers would wait in different collectives."""
    if comm.size == 1:
        return
    text = repr((config.names, config.selection))
    mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
    high, low = comm.all_reduce(torch.tensor([mark, -mark], dtype=torch.int64, device=comm.device),
                                "max").tolist()
    if high != -low:
        raise ValueError(
            f"router.name and router.selection differ between the {comm.size} ranks that share "
            f"experts; rank {comm.rank} has {text}: "
            "give all ranks the same settings, the seed too")
