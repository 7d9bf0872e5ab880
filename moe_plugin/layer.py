"""`MoELayer`: route, plan, dispatch, experts, combine."""

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
from moe_plugin.experts.ddp_check import DDPCheck
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.memory.experts.build import build_experts
from moe_plugin.output import MoEOutput
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import KeptRouting, Routing, TokenInfo, Tokens
from moe_plugin.routed_experts import RoutedExperts
from moe_plugin.routing import HasFinishStep, layer_router
from moe_plugin.routing.capacity import CapacityLimit
from moe_plugin.routing.contract import RouterModule, float32_state, keep_counts, router_counts
from moe_plugin.routing.pregate import LinkableLayer
from moe_plugin.routing.registry import Unlinked
from moe_plugin.tuning.placement import place_experts
from moe_plugin.utils.messages import short


class LayerState(HasFinishStep, LinkableLayer):
    """Base of `MoELayer`: it is saved, loaded, copied, moved; its steps end.

    Attributes:
        given, config: the settings as passed, and with what they leave open decided.
        comm, placement: the expert-parallel group, and where experts are.
        token_entry, experts, routed_experts: parts of the path.
        has_own_router: whether the router was passed.
        route: the experts of each token; what stands in its place without `pregate.link` raises.
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
        """Take notice of new parameters, and wait for `moe_plugin.routing.pregate.link` where
        settings ask for it; called once, at the end of building.
        """
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        distributed_state.hook(self)
        self.follow_parameters()
        if (unlinked := Unlinked.of(self.config)) is not None:
            self.route = unlinked

    def follow_parameters(self) -> None:
        """Parameters may be new: copies, those that left the meta device, assigned ones, and those
        of what stands in the experts' place.
        """
        mark_experts(self.experts, self.comm.size)
        self.token_entry.sum_gradients(p for p in self.parameters() if not is_expert(p))

    def extra_repr(self) -> str:
        """One line of sizes, for `print(model)`."""
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
        """Where the local experts come from, checked when loaded; what the tuner has learned; what
        stays in float32 when a checkpoint is cast.
        """
        return {**self.routed_experts.state(), distributed_state.FLOAT32: float32_state(self)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """`ValueError` if a checkpoint's experts are not this rank's. Tuner state is optional."""
        self.routed_experts.load_state(state)

    def finish_step(self) -> None:
        """See `moe_plugin.routing.finish_step`, which calls it."""
        self.routed_experts.finish_step()

    def forget(self) -> None:
        """Drop what a failed step left for a backward pass that never came. A host that goes on
        after such a step (out of memory) calls it when no backward pass is pending.
        """
        if self.link is not None:
            self.link.forget()
        later: LaterGrads | None = self.experts.later
        if later is not None:
            later.forget()


def _loaded(layer: LayerState, incompatible: object) -> None:
    layer.follow_parameters()
    layer.ddp_check.begin(layer.experts)


# What a layer is given to be built from, checked.
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


class MoELayer(LayerState):
    """A Mixture-of-Experts feed-forward layer over the ranks of one group.

    Expert parameters carry `expert = True`. After backward, an expert's gradient is the sum over
    the tokens of all ranks in `comm`, all others are this rank's part; the host (or
    `moe_plugin.training.gradients.sync`) reduces and scales.

    Args:
        config: see `MoEConfig`; `model_dim` must be set. Or the width of a token, with `settings`
            as `moe_plugin.config.named.named_config` takes them.
        comm: the expert-parallel group; None: the default group, or this rank alone without one.
        host: what the host knows of this layer.
        router: in place of the configured one, see `moe_plugin.routing.RouterModule`; or a setting.
        experts: `factory(global_index) -> module`, custom experts in place of the configured kind;
            or a setting.
        dtype, device: of the parameters.
    Raises:
        ValueError: config, group and names do not fit together; it names value, bound, remedy.
            Settings or versions differ between ranks; it names them on every rank.
    """

    def __init__(self, config: MoEConfig | int, comm: Comm | None = None, *,
                 host: HostContext = HostContext(),
                 router: nn.Module | str | Mapping[str, Any] | None = None,
                 experts: Callable[[int], nn.Module] | Mapping[str, Any] | None = None,
                 dtype: torch.dtype | None = None, device: Any = None, **settings: Any) -> None:
        super().__init__()
        own = given_parts(config, comm, router, experts, settings)
        self.given, self.comm, self.has_own_router = own.config, own.comm, own.router is not None
        where = {"dtype": dtype, "device": device}
        config, place, sharing = place_experts(own.config, self.comm, own.router, own.experts,
                                               host=host, **where)
        self.config, self.placement = config, place
        self.token_entry = TokenEntry(config.model_dim, sharing)
        self.router = layer_router(config, place.comm, own.router, host.when_split(sharing),
                                   **where)
        self.experts = build_experts(config, place, host, own.experts, **where)
        self.routed_experts = RoutedExperts(config, place, self.experts, host)
        self.routed_experts.self_balanced = (not isinstance(self.router, RouterModule)
                                      or self.router.balances)
        self.capacity = CapacityLimit(config, self.routed_experts.load_comm,
                                      self.routed_experts.fixed_slots, host.own_capacity)
        self.shared_expert = SharedExpert.of(config, **where)
        self.latent = LatentProjection.of(config, **where)
        self.ddp_check = DDPCheck(self.placement.comm, self.routed_experts.experts,
                                  keep_counts if router_counts(self.router) else None)
        self.follow_from_now_on()

    def forward(self, x: Tensor, token_mask: Tensor | None = None, *, info: TokenInfo | None = None,
                top_k: int | None = None, choice: LayoutChoice | None = None,
                overlapped: Callable[[], object] | None = None) -> MoEOutput:
        """Send every token through its experts.

        Args:
            x: [..., D] tokens of this rank; any number, also none, also different on each rank.
            token_mask: [...] bool, True = real token; padding is not routed and gives zeros.
            info: token ids, sequences, which of several routers; see `router.needs`.
            top_k: experts per token for this call; None: as configured.
            choice: layout of this call, the same on all ranks; None: as configured or tuned.
            overlapped: work that does not wait for the experts: done while rows travel to them
                where `experts.shared_overlap` is on, else before the experts compute.
        Returns: output [..., D] in x's dtype, raw losses by name, statistics.
        Raises:
            ValueError: shapes or dtypes that do not fit.
            CommError: a collective failed or timed out; it names rank, collective and sizes.
        """
        built = self.routed_experts.experts  # another module may stand in their place (adapters)
        check = self.ddp_check
        # a graph must not depend on what the first call outside of it changes
        if built.reduced or not (
                check.alone and torch.compiler.is_compiling() or check.passed):
            check(built, self)
        if self.token_entry.sharing is not None and not torch.compiler.is_compiling():
            self.follow_parameters()  # some may be trainable since the last call
        traffic = TrafficMeter(self.comm.counters) if self.comm.size > 1 else None
        tokens = self.token_entry.enter(x, token_mask, info, built.dtype)
        routing = self.route(tokens, top_k)
        kept = (KeptRouting(routing, None, None, routing) if self.capacity.never
                else self.capacity(routing, self.training))
        layout, kept = self.routed_experts.select(kept, choice, self.training)
        alongside = (None if self.shared_expert is None and overlapped is None
                     else OverlappedWork(self.shared_expert, tokens, overlapped))
        x_TD = tokens.x_TD if self.latent is None else self.latent.enter(tokens)
        # plan, dispatch, experts, combine
        y_TD, rows = self.routed_experts.run(self.experts, layout, x_TD, kept, alongside)
        if self.latent is not None:
            y_TD = self.latent.leave(y_TD, tokens)
        if alongside is not None or routing.passthrough_T is not None:
            shared_TD = None if alongside is None else alongside.shared_TD()
            y_TD = add_residual(y_TD, tokens, routing, shared_TD)
        result = self.token_entry.leave(y_TD, routing.losses, tokens)  # S1 gathers the outputs
        return MoEOutput(*result, self.routed_experts.stats(layout, kept, rows, traffic))

    def route(self, tokens: Tokens, top_k: int | None) -> Routing:
        """The experts of each token. `pregate.link` may put another method in its place."""
        routing: Routing = self.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)
        return routing


def layers_in(*models: nn.Module) -> list[MoELayer]:
    """The MoE layers of models, in order."""
    return [layer for model in models for layer in named_layers_in(model).values()]


def named_layers_in(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers of a model by name, in order; a layer that it has twice: once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
