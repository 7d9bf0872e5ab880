"""`MoELayer`, a Mixture-of-Experts feed-forward layer.

A call checks the input, routes the tokens and drops tokens that exceed the capacity. The call then
runs `moe_plugin.routed_experts.RoutedExperts`, which sends the rows, computes the experts and
combines their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm, default_comm
from moe_plugin.comm.placement import HostContext, Placement
from moe_plugin.comm.state import TrafficMeter
from moe_plugin.config import MoEConfig
from moe_plugin.config.named import layer_config, refuse_beside, refuse_timeout
from moe_plugin.dispatch import TokenEntry
from moe_plugin.experts import (
    LatentProjection,
    OverlappedWork,
    SharedExpert,
    add_residual,
    distributed_state,
    is_expert,
)
from moe_plugin.experts.base import mark_experts
from moe_plugin.experts.overwrites import DDPCheck
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.memory.experts.build import build_experts
from moe_plugin.output import MoEOutput
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import KeptRouting, Routing, TokenInfo, Tokens
from moe_plugin.routed_experts import RoutedExperts
from moe_plugin.routing import HasFinishStep, layer_router
from moe_plugin.routing.capacity import CapacityLimit
from moe_plugin.routing.contract import RouterModule, float32_state, watch_ddp
from moe_plugin.routing.pregate import LinkableLayer
from moe_plugin.routing.registry import Unlinked
from moe_plugin.tuning.placement import place_experts
from moe_plugin.utils.messages import short
from moe_plugin.utils.selective import dispatch_modes, has_policy, without_policies


class LayerState(HasFinishStep, LinkableLayer):
    """Base class of `MoELayer` that contains everything except the computation: saving, loading,
    copying, moving to another device, and the update at the end of a training step.

    Attributes:
        given: the settings that the caller passed.
        config: the settings after `auto` values have been replaced with concrete values.
        comm: the expert-parallel group.
        placement: describes which ranks store each expert.
        token_entry: checks the input tokens, flattens them to one axis, and restores the input's
            shape in the output.
        experts: the module that contains the parameters of this rank's experts, or an adapter that
            wraps it.
        routed_experts: selects the layout of a call and computes the experts.
        has_own_router: whether the caller passed a router module.
        route: function that chooses the experts of each token. With `router.pre_gate` or
            `router.predict`, `route` raises an error until `moe_plugin.routing.pregate.link`
            replaces it.
    """

    given: MoEConfig
    config: MoEConfig
    comm: Comm
    placement: Placement
    has_own_router: bool
    token_entry: TokenEntry
    experts: nn.Module
    routed_experts: RoutedExperts
    ddp_check: DDPCheck
    route: Callable[..., Routing]

    def follow_from_now_on(self) -> None:
        """Register the state dict hooks, and mark the parameters of the experts. If the settings
        require that MoE layers be linked, routing raises an error until this layer is linked. The
        constructor calls this method once, at its end.
        """
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        distributed_state.hook(self)
        self.follow_parameters()
        if (unlinked := Unlinked.of(self.config)) is not None:
            self.route = unlinked

    def follow_parameters(self) -> None:
        """Mark the current parameters as expert parameters or shared parameters.

        This method is called again whenever parameters may have been replaced: after copying the
        layer, after leaving the meta device, after `load_state_dict(assign=True)`, and after an
        adapter wraps the experts.
        """
        mark_experts(self.experts, self.comm.size)
        self.token_entry.sum_gradients(p for p in self.parameters() if not is_expert(p))

    def extra_repr(self) -> str:
        """Return the sizes of the layer in one line, for `print(model)`."""
        c, place = self.config, self.placement
        return (f"dim={c.model_dim}, hidden={c.hidden_dim}, experts={c.num_experts} "
                f"({place.local} here, {place.shards} shards), top_k={c.router.experts_per_token}, "
                f"dispatch={c.dispatch.name}, ranks={self.comm.size}")

    def _apply(self, *args: Any, **kwargs: Any) -> LayerState:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.routed_experts.move_row_limit()
        self.follow_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        distributed_state.follow(self)
        self.follow_parameters()

    def get_extra_state(self) -> dict[str, Any]:
        """Return the extra state of a checkpoint: which experts this rank stores, the state of the
        layout tuner, and the names of tensors that remain in float32 when the checkpoint is cast.
        """
        return {**self.routed_experts.state(), distributed_state.FLOAT32: float32_state(self)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Load the extra state returned by `get_extra_state`. The state of the layout tuner may be
        missing.

        Raises:
            ValueError: the checkpoint contains the experts of a different rank.
        """
        self.routed_experts.load_state(state)

    def finish_step(self) -> None:
        """Update replicated experts after an optimizer step.

        Called by `moe_plugin.routing.finish_step`.
        """
        self.routed_experts.finish_step()

    def forget(self) -> None:
        """Release the tensors that a failed forward pass stored for its backward pass.

        A host that continues training after a failed step, for example after running out of memory,
        must call this method while no backward pass is pending.
        """
        if self.link is not None:
            self.link.forget()
        later: LaterGrads | None = self.experts.later
        if later is not None:
            later.forget()


def _loaded(layer: LayerState, incompatible: object) -> None:
    layer.follow_parameters()
    layer.ddp_check.begin(layer.experts)


@dataclass(frozen=True)
class GivenParts:
    """The checked arguments of `MoELayer`.

    Attributes:
        config: the complete settings, including settings passed as keyword arguments.
        comm: the expert-parallel group.
        router: the router module that the caller passed. None if the router is built from the
            settings.
        experts: the function `factory(global_index) -> module` that the caller passed. None if the
            experts are built from the settings.
    """

    config: MoEConfig
    comm: Comm
    router: nn.Module | None
    experts: Callable[[int], nn.Module] | None


def given_parts(config: MoEConfig | int, comm: Comm | None,
                router: nn.Module | str | Mapping[str, Any] | None,
                experts: Callable[[int], nn.Module] | Mapping[str, Any] | None,
                settings: Mapping[str, Any]) -> GivenParts:
    """Check the arguments of `MoELayer` and convert them to `GivenParts`.

    Raises:
        ValueError: an argument has a wrong type, two settings contradict each other, or a setting
            would have no effect.
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
    # an argument of an unexpected type would otherwise be ignored silently
    if comm is not None and not isinstance(comm, Comm):
        raise ValueError(f"comm={short(comm)} is a {type(comm).__name__}; must be a Comm, such as "
                         "TorchComm(group). Pass the number of experts as num_experts=...")
    if not isinstance(router, nn.Module | str | Mapping | None):
        raise ValueError(f"router={short(router)} is a {type(router).__name__}; must be a name, a "
                         "dict of settings or a router module. To use your own class by name, "
                         "register it with moe_plugin.routing.routers.register(name)")
    if experts is not None and not callable(experts) and not isinstance(experts, Mapping):
        raise ValueError(f"experts={short(experts)} is a {type(experts).__name__}; must be a dict "
                         "of settings or a function that takes an expert's global index and "
                         "returns a module, for example lambda index: modules[index]")


class MoELayer(LayerState):
    """A Mixture-of-Experts feed-forward layer whose experts are spread over the ranks of a process
    group.

    Each expert parameter has the attribute `expert = True`. After the backward pass, the gradient
    of an expert parameter is the sum over the tokens of all ranks in `comm`. The gradient of any
    other parameter covers only the tokens of this rank. The host framework, or
    `moe_plugin.training.gradients.sync`, reduces and scales the gradients of all parameters.

    Args:
        config: a `MoEConfig` that sets `model_dim`. Alternatively, pass the width of a token as an
            int and the other settings as keyword arguments
            (`moe_plugin.config.named.named_config`).
        comm: the expert-parallel group. Defaults to the default process group, or to this rank
            alone if torch.distributed is not initialized.
        host: information that the host framework provides about this layer.
        router: a router module that replaces the configured router
            (`moe_plugin.routing.RouterModule`), the name of a router, or a dict of router settings.
        experts: a function `factory(global_index) -> module` that builds custom experts, or a dict
            of expert settings.
        dtype: the dtype of the parameters. Defaults to torch's default dtype.
        device: the device of the parameters. Defaults to torch's default device.
    Raises:
        ValueError: the settings, the process group and the modules are not compatible. The message
            contains the invalid value, the bound and a remedy. Every rank raises this error if
            ranks have different settings or versions.
    """

    def __init__(self, config: MoEConfig | int, comm: Comm | None = None, *,
                 host: HostContext = HostContext(),
                 router: nn.Module | str | Mapping[str, Any] | None = None,
                 experts: Callable[[int], nn.Module] | Mapping[str, Any] | None = None,
                 dtype: torch.dtype | None = None, device: Any = None, **settings: Any) -> None:
        super().__init__()
        parts = given_parts(config, comm, router, experts, settings)
        self.given, self.comm = parts.config, parts.comm
        self.has_own_router = parts.router is not None
        where = {"dtype": dtype, "device": device}
        # Collective: the ranks compare their settings before anything is allocated, so that a
        # difference raises the same error on all ranks.
        config, place, sharing = place_experts(parts.config, self.comm, parts.router, parts.experts,
                                               host=host, **where)
        self.config, self.placement = config, place
        self.token_entry = TokenEntry(config.model_dim, sharing)
        # The router is built before the experts, because both draw from torch's generator: another
        # order would change the initial values for a given seed.
        self.router = layer_router(config, place.comm, parts.router, host.when_split(sharing),
                                   **where)
        self.experts = build_experts(config, place, host, parts.experts, **where)
        self.routed_experts = RoutedExperts(config, place, self.experts, host)
        self.routed_experts.self_balanced = (not isinstance(self.router, RouterModule)
                                      or self.router.balances)
        self.capacity = CapacityLimit(config, self.routed_experts.load_comm,
                                      self.routed_experts.fixed_slots, host.own_capacity)
        self.shared_expert = SharedExpert.of(config, **where)
        self.latent = LatentProjection.of(config, **where)
        self.ddp_check = DDPCheck(self.placement.comm, self.routed_experts.experts)
        watch_ddp()
        self.follow_from_now_on()

    def forward(self, x: Tensor, token_mask: Tensor | None = None, *, info: TokenInfo | None = None,
                top_k: int | None = None, choice: LayoutChoice | None = None,
                overlapped: Callable[[], object] | None = None) -> MoEOutput:
        """Compute the layer's output for each token, from the routed experts and the shared expert.

        Args:
            x: the tokens of this rank, [..., D]. Each rank may have a different number of tokens,
                including zero.
            token_mask: bool [...], True for tokens that are not padding. Padding tokens are not
                routed, and their output is zero. By default no token is padding.
            info: additional information about the tokens, such as token ids, if the router requires
                it (`router.needs`).
            top_k: number of experts per token in this call. Defaults to the number in the settings.
            choice: the layout of this call. All ranks must pass the same layout. Defaults to the
                layout chosen by the settings or by the tuner.
            overlapped: a function without arguments that does not need the experts' outputs. The
                layer calls it before the experts compute. With `experts.shared_overlap`, it runs
                while rows are being sent to their experts.
        Returns: the output [..., D] in the dtype of `x`, the unweighted losses by name, and
        statistics.
        Raises:
            ValueError: a tensor has a wrong shape or dtype.
            CommError: a collective failed or timed out. The message contains the rank, the name of
                the collective and the sizes.
        """
        # here and not by the decorator `hidden_from_policies`, which adds a call to each call
        if not torch.compiler.is_compiling() and dispatch_modes() and has_policy():
            with without_policies():
                return MoELayer.forward(self, x, token_mask, info=info, top_k=top_k, choice=choice,
                                        overlapped=overlapped)
        built = self.routed_experts.experts  # `self.experts` may be an adapter that wraps them
        if built.reduced or not self.ddp_check.passed:
            self.ddp_check(built, self)
        if self.token_entry.sharing is not None and not torch.compiler.is_compiling():
            self.follow_parameters()  # parameters may have become trainable since the last call
        traffic = TrafficMeter(self.comm.counters) if self.comm.size > 1 else None
        tokens = self.token_entry.enter(x, token_mask, info, built.dtype)
        routing = self.route(tokens, top_k)
        # without a capacity nothing can be dropped, and `CapacityLimit` is not called at all
        kept = (KeptRouting(routing, None, None, routing) if self.capacity.never
                else self.capacity(routing, self.training))
        layout, kept = self.routed_experts.select(kept, choice, self.training)
        # the shared expert runs inside `run`, so that it can overlap with the exchange of the rows
        alongside = (None if self.shared_expert is None and overlapped is None
                     else OverlappedWork(self.shared_expert, tokens, overlapped))
        x_TD = tokens.x_TD if self.latent is None else self.latent.enter(tokens)
        y_TD, rows = self.routed_experts.run(self.experts, layout, x_TD, kept, alongside)
        if self.latent is not None:
            y_TD = self.latent.leave(y_TD, tokens)
        if alongside is not None or routing.passthrough_T is not None:
            shared_TD = None if alongside is None else alongside.shared_TD()
            y_TD = add_residual(y_TD, tokens, routing, shared_TD)
        result = self.token_entry.leave(y_TD, routing.losses, tokens)
        return MoEOutput(*result, self.routed_experts.stats(layout, kept, rows, traffic))

    def route(self, tokens: Tokens, top_k: int | None) -> Routing:
        """Run the router on the tokens of a call. `pregate.link` may replace a layer's `route`
        method.
        """
        routing: Routing = self.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)
        return routing


def layers_in(*models: nn.Module) -> list[MoELayer]:
    """Return the MoE layers of several models, in the order of the modules."""
    return [layer for model in models for layer in named_layers_in(model).values()]


def named_layers_in(model: nn.Module) -> dict[str, MoELayer]:
    """Return the MoE layers of a model by name, in the order of the modules. A layer that occurs
    several times is returned only once.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
