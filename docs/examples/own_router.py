"""Register your own router under a name, and use it like the provided routers.

    python own_router.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin import MoELayer, weighted_loss
from moe_plugin.routing import Router, RoutingCall, routers


@routers.register("sharpened")
class SharpenedRouter(Router):
    """A router with softmax of twice the logits and half the weight for all but the best expert."""

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return the logits, float32 [T, E]."""
        return 2 * super().scores(x_TD, call)

    def select(self, call: RoutingCall) -> Tensor:
        """Return the experts, int64 [T, K]. A recomputation in backward repeats the choice."""
        return call.scores_TE.topk(call.k).indices

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the differentiable weights [T, K]."""
        weights_TK = call.scores_TE.gather(1, ids_TK)
        return torch.cat([weights_TK[:, :1], weights_TK[:, 1:] / 2], dim=1)

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Return the experts without choices of small weight, which become -1 (no expert)."""
        return call.ids_TK.masked_fill(weights_TK < 0.01, -1)


torch.manual_seed(0)
layer = MoELayer(16, num_experts=8, router="sharpened")
out = layer(torch.randn(128, 16))
loss = out.output.square().mean() + weighted_loss(out.losses, layer.config.losses)
loss.backward()
assert layer.router.weight_ED.grad.abs().sum() > 0
print(f"own_router: {out.stats.as_dict()}")
