"""`LayerState`: what happens to an MoE layer between its calls."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_plugin.dispatch import TokenEntry
from moe_plugin.experts import distributed_state, is_expert
from moe_plugin.experts.marks import mark_experts
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.routing import HasFinishStep
from moe_plugin.routing.contract import FLOAT32, float32_state
from moe_plugin.routing.replay import OwnsReplayLogs
from moe_plugin.tuning.layout_selector import LayoutSelector


class LayerState(OwnsReplayLogs, HasFinishStep, nn.Module):
    """Base of `MoELayer`: it is saved, loaded, copied, moved; its steps end, its recordings go.

    Attributes:
        tokens, experts, layouts: see `MoELayer`.
        link: see `moe_plugin.pregate`; None: the layer knows no neighbours.
        reordered: how often experts changed places (`checkpoint.resize.reorder_experts`).
    """

    tokens: TokenEntry
    experts: nn.Module
    layouts: LayoutSelector
    link: Any = None
    reordered: int = 0

    def follow_from_now_on(self) -> None:
        """Take notice of new parameters; called once, at the end of building."""
        self.register_load_state_dict_post_hook(_loaded)  # type: ignore[no-untyped-call]
        distributed_state.hook(self)
        self.follow_parameters()

    def follow_parameters(self) -> None:
        """Parameters may be new: copies, those that left the meta device, assigned ones, and those
        of what stands in the experts' place.
        """
        mark_experts(self.experts)
        self.tokens.sum_gradients(p for p in self.parameters() if not is_expert(p))

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

    def forget_recordings(self) -> None:
        """See `moe_plugin.routing.replay.forget`."""
        if self.link is not None:
            self.link.forget()
        later: LaterGrads | None = self.experts.later
        if later is not None:
            later.forget()
        self.layouts.forget_recordings()


def _loaded(layer: LayerState, incompatible: object) -> None:
    layer.follow_parameters()
