"""`MoELayer`: route, plan, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm import Comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.comm.state import TrafficMeter
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import TokenEntry
from moe_plugin.experts import LatentProjection, OverlappedWork, SharedExpert, add_residual
from moe_plugin.experts.ddp_check import DDPCheck
from moe_plugin.layer_parts import given_parts
from moe_plugin.layer_state import LayerState
from moe_plugin.memory.experts.build import build_experts
from moe_plugin.output import MoEOutput
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import KeptRouting, Routing, TokenInfo, Tokens
from moe_plugin.routing import layer_router
from moe_plugin.routing.capacity import CapacityLimit
from moe_plugin.routing.contract import RouterModule
from moe_plugin.tuning.layout_selector import LayoutSelector
from moe_plugin.tuning.layouts import through_experts
from moe_plugin.tuning.placement import place_experts


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
        self.tokens = TokenEntry(config.model_dim, sharing)
        self.router = layer_router(config, place.comm, own.router, host.when_split(sharing),
                                   **where)
        self.experts = build_experts(config, place, host, own.experts, **where)
        self.layouts = LayoutSelector(config, place, self.experts, host)
        self.layouts.self_balanced = (not isinstance(self.router, RouterModule)
                                      or self.router.balances)
        self.capacity = CapacityLimit(config, self.layouts.load_comm, self.layouts.fixed_slots,
                                      host.own_capacity)
        self.shared_expert = SharedExpert.of(config, **where)
        self.latent = LatentProjection.of(config, **where)
        self.ddp_check = DDPCheck(self.placement.comm, self.layouts.experts, self.router)
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
        built = self.layouts.experts  # another module may stand in their place (adapters)
        check = self.ddp_check
        # a graph must not depend on what the first call outside of it changes
        if built.reduced or not (
                check.alone and torch.compiler.is_compiling() or check.passed):
            check(built, self)
        if self.tokens.sharing is not None and not torch.compiler.is_compiling():
            self.follow_parameters()  # some may be trainable since the last call
        traffic = TrafficMeter(self.comm.counters) if self.comm.size > 1 else None
        tokens = self.tokens.enter(x, token_mask, info, built.dtype)
        routing = self.route(tokens, top_k)
        kept = (KeptRouting(routing, None, None, routing) if self.capacity.never
                else self.capacity(routing, self.training))
        layout, kept = self.layouts.select(kept, choice, self.training)
        alongside = (None if self.shared_expert is None and overlapped is None
                     else OverlappedWork(self.shared_expert, tokens, overlapped))
        x_TD = tokens.x_TD if self.latent is None else self.latent.enter(tokens)
        # plan, dispatch, experts, combine
        y_TD, rows = through_experts(self.experts, layout, x_TD, kept, alongside)
        if self.latent is not None:
            y_TD = self.latent.leave(y_TD, tokens)
        if alongside is not None or routing.passthrough_T is not None:
            shared_TD = None if alongside is None else alongside.shared_TD()
            y_TD = add_residual(y_TD, tokens, routing, shared_TD)
        result = self.tokens.leave(y_TD, routing.losses, tokens)  # S1 gathers the outputs
        return MoEOutput(*result, self.layouts.stats(layout, kept, rows, traffic))

    def route(self, tokens: Tokens, top_k: int | None) -> Routing:
        """The experts of each token. `moe_plugin.routing.pregate.link` may put another in its place."""
        routing: Routing = self.router(tokens.x_TD, tokens.mask_T, top_k, tokens.info)
        return routing


def layers_in(*models: nn.Module) -> list[MoELayer]:
    """The MoE layers of models, in order."""
    return [layer for model in models for layer in named_layers_in(model).values()]


def named_layers_in(model: nn.Module) -> dict[str, MoELayer]:
    """The MoE layers of a model by name, in order; a layer that it has twice: once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
