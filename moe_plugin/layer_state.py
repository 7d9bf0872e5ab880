"""`LayerState`: what happens to an MoE layer between its calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from moe_plugin.comm import Comm
from moe_plugin.comm.placement import Placement
from moe_plugin.config import MoEConfig
from moe_plugin.dispatch import TokenEntry
from moe_plugin.experts import distributed_state, is_expert
from moe_plugin.experts.ddp_check import DDPCheck
from moe_plugin.experts.marks import mark_experts
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.records import Routing
from moe_plugin.routing import HasFinishStep
from moe_plugin.routing.contract import FLOAT32, float32_state
from moe_plugin.routing.pregate import LinkableLayer
from moe_plugin.routing.registry import Unlinked
from moe_plugin.tuning.layout_selector import LayoutSelector


class LayerState(HasFinishStep, LinkableLayer):
    """Base of `MoELayer`: it is saved, loaded, copied, moved; its steps end.

    Attributes:
        given, config: the settings as passed, and with what they leave open decided.
        comm, placement: the expert-parallel group, and where experts are.
        tokens, experts, layouts: parts of the path.
        has_own_router: whether the router was passed.
        route: the experts of each token; what stands in its place without `pregate.link` raises.
    """

    given: MoEConfig
    config: MoEConfig
    comm: Comm
    placement: Placement
    has_own_router: bool
    tokens: TokenEntry
    experts: nn.Module
    layouts: LayoutSelector
    ddp_check: DDPCheck
    route: Callable[..., Routing]

    def follow_from_now_on(self) -> None:
        """Take notice of new parameters, and wait for `moe_plugin.routing.pregate.link` where settings ask
        for it; called once, at the end of building.
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
        self.tokens.sum_gradients(p for p in self.parameters() if not is_expert(p))

    def extra_repr(self) -> str:
        """One line of sizes, for `print(model)`."""
        c, place = self.config, self.placement
        return (f"dim={c.model_dim}, hidden={c.hidden_dim}, experts={c.num_experts} "
                f"({place.local} here, {place.shards} shards), top_k={c.router.experts_per_token}, "
                f"dispatch={c.dispatch.name}, ranks={self.comm.size}")

    def _apply(self, *args: Any, **kwargs: Any) -> LayerState:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.layouts.move_row_limit()
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
        return {**self.layouts.state(), FLOAT32: float32_state(self)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """`ValueError` if a checkpoint's experts are not this rank's. Tuner state is optional."""
        self.layouts.load_state(state)

    def finish_step(self) -> None:
        """See `moe_plugin.routing.finish_step`, which calls it."""
        self.layouts.finish_step()

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
