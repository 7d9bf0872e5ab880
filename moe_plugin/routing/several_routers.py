"""Several routers in one layer, and rules that select one of the routers for each call.

A selection rule reads only data that is equal on all ranks, so all ranks select the same router.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.agreement import agree
from moe_plugin.comm.base import Comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config.router import RouterConfig, SelectionConfig
from moe_plugin.kernels.activations import transformed
from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.contract import (
    BuffersKeepDtype,
    RouterModule,
    balances_by_itself,
    changed_by_others,
    needs_of,
)
from moe_plugin.utils.registry import Registry


@dataclass(frozen=True)
class SelectionCall:
    """The data that a selection rule may use.

    Attributes:
        count: number of routers.
        step: number of completed optimizer steps.
        layer: index of this layer among the MoE layers of its model, counted from 0. None if
            unknown.
        training: True if the layer is in training mode.
        settings: the `router.selection` section of the settings.
    """

    count: int
    step: int
    layer: int | None
    training: bool
    settings: SelectionConfig

    @property
    def period(self) -> int:
        """Index of the current period of `every` steps, counted from 0."""
        return self.step // self.settings.every


SelectionRule = Callable[[SelectionCall], int]
router_selections: Registry[SelectionRule] = Registry("router_selection")


@router_selections.register("first")
def first(call: SelectionCall) -> int:
    """For every call, select the first router in the list."""
    return 0


@router_selections.register("layer")
def layer(call: SelectionCall) -> int:
    """For MoE layer n, select router n mod count, in training and in evaluation."""
    if call.layer is None:
        raise ValueError(
            "router.selection.rule=layer needs the number of this MoE layer in its model, but "
            "layer=None. Build the layer with HostContext(layer_number=...), or call "
            "moe_plugin.routing.number_layers(model) once.")
    return call.layer % call.count


@router_selections.register("cycle")
def cycle(call: SelectionCall) -> int:
    """Cycle through the routers, using each router for `every` optimizer steps.

    In evaluation, select the router with index `outside_training`.
    """
    return call.period % call.count if call.training else call.settings.outside_training


@router_selections.register("random")
def drawn(call: SelectionCall) -> int:
    """Draw a router at random, with equal probabilities, once every `every` optimizer steps. The
    drawn router depends only on the seed, the step and the layer.

    In evaluation, the router with index `outside_training` is selected.
    """
    if not call.training:
        return call.settings.outside_training
    # Seeded by text, because Python derives the same state from a text on every machine and in
    # every version since 3.2.
    return random.Random(f"{call.settings.seed} {call.period} {call.layer or 0}").randrange(
        call.count)


class RouterSelector(BuffersKeepDtype, RouterModule):
    """A module that contains several routers and selects one of them for each call.

    If `TokenInfo.router_index` is set, it selects the router. If `TokenInfo.router_index` is not
    set, the rule in `router.selection` selects the router. All micro-batches of an optimizer step
    use the same router. A recomputation uses the router of its first pass. The selection depends
    only on the settings, the index of the layer and the number of completed steps (`finish_step`),
    which are equal on all ranks. The number of completed steps is saved with the weights, so that a
    resumed run continues the sequence. Parameters of routers that were not selected receive a zero
    gradient. Without zero gradients, data-parallel wrappers that expect a gradient for every
    parameter would hang.

    Args:
        routers: routers in the order of their names in `router.name`.
        config: section `router` of the layer's configuration. Optional. By default, the first
            router routes every call.
        comm: group of ranks that store the experts. If the group has more than one rank, creating a
            `RouterSelector` is collective.
        host: information about the layer from the host framework. All routers are built with this
            information.
        device: device of the buffer that contains the number of steps.
    Attributes:
        layer: index of this layer among the MoE layers of its model, counted from 0. None if
            unknown. See `number_layers`.
        steps: number of completed optimizer steps.
    Raises:
        ValueError: If the rule is unknown, or if the settings differ between ranks.
    """

    step: Tensor

    def __init__(self, routers: Sequence[nn.Module], config: RouterConfig | None = None, *,
                 comm: Comm | None = None, host: HostContext = HostContext(),
                 device: Any = None) -> None:
        super().__init__(host)
        self.routers = nn.ModuleList(routers)
        self.config = config or RouterConfig(name=",".join(type(r).__name__ for r in routers))
        self.rule = router_selections.get(self.config.selection.rule)
        self.layer = host.layer_number
        self.needs = frozenset().union(*(needs_of(router) for router in routers))
        self.balances = all(map(balances_by_itself, routers))
        self.steps = 0  # the value of the buffer, without a read from the device
        where = torch.empty(0, device=device).device
        # Not on the meta device, where the number of steps would be lost.
        self.register_buffer("step", torch.zeros(
            1, dtype=torch.int64, device="cpu" if where.type == "meta" else where))
        self._version = self.step._version
        # Ranks that select different routers would wait in different collectives.
        if comm is not None:
            agree(comm, {"router.name": self.config.names,
                         **{f"router.selection.{name}": value
                            for name, value in asdict(self.config.selection).items()}})

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """Route tokens with the selected router; see `RouterModule.forward`.

        Raises:
            ValueError: If there is no router with the selected index.
        """
        if torch.compiler.is_compiling():
            index = self._choose(info)
        else:  # recorded on tapes too, so that a replay at another step uses the same router
            index = int(self.replayed(lambda: torch.tensor(self._choose(info)), "router"))
        router = self.routers[index]
        routing = router(x_TD, mask_T, top_k, info)
        weights_TK = routing.weights_TK
        # `torch.func` cannot transform this package's autograd functions, and returns gradients
        # for all parameters anyway.
        if self.training and torch.is_grad_enabled() and not transformed():
            idle = [
                p for other in self.routers if other is not router for p in other.parameters()
                if p.requires_grad
            ]
            weights_TK = _WithIdle.apply(weights_TK, *idle) if idle else weights_TK
        return replace(routing, weights_TK=weights_TK, router=self.config.names[index])

    def _choose(self, info: TokenInfo | None) -> int:
        count, settings = len(self.routers), self.config.selection
        self._follow_buffer()
        if info is not None and info.router_index is not None:
            index, source = info.router_index, "router_index"
        else:
            index = self.rule(SelectionCall(count, self.steps, self.layer, self.training, settings))
            source = f"selection {settings.rule!r}: index"
        if not 0 <= index < count:
            raise ValueError(f"Router index out of range: {source}={index}, but must be in "
                             f"0..{count - 1}, because router.name lists {count} routers.")
        return index

    def finish_step(self) -> None:
        """Count the step. `moe_plugin.routing.finish_step` calls each router separately."""
        self._follow_buffer()
        self.steps += 1
        self.step.fill_(self.steps)
        self._version = self.step._version

    def _follow_buffer(self) -> None:
        if changed_by_others(self.step, self._version):
            self._version, self.steps = self.step._version, int(self.step)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        saved = state_dict.get(f"{prefix}step")
        if saved is not None and not saved.is_meta:
            self.steps = int(saved)


class _WithIdle(torch.autograd.Function):
    """Return the gate weights unchanged, and give unused parameters a zero gradient.

    Adding `0 * value` to the weights instead would fail if the value is infinite or NaN, because
    the product is then NaN.
    """

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, *idle: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in idle]
        return weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, ...]:
        return (grad_TK, *(torch.zeros(shape, dtype=dtype, device=device)
                           for shape, dtype, device in ctx.like))


def number_layers(model: nn.Module, first: int = 0) -> int:
    """Assign an index to each router selector of a model, in the order of the model's modules.

    Call this function if a selection rule uses the index of the layer and
    `HostContext.layer_number` was not set.

    Args:
        model: any module.
        first: index of the first selector.
    Returns: Number of router selectors.
    """
    selectors = [module for module in model.modules() if isinstance(module, RouterSelector)]
    for number, selector in enumerate(selectors, first):
        selector.layer = number
    return len(selectors)
