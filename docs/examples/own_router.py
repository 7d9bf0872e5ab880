"""A router of one's own, registered under a name and used like the provided ones.

    python own_router.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin import MoELayer, weighted_loss
from moe_plugin.routing import Router, RoutingCall, routers


@routers.register("sharpened")
class SharpenedRouter(Router):
    """Softmax of twice the logits; a token visits its best expert twice as much as the others."""

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Logits [T, E], in float32."""
        return 2 * super().scores(x_TD, call)

    def select(self, call: RoutingCall) -> Tensor:
        """Experts, int64 [T, K], -1: none. A recomputation in backward repeats the choice."""
        return call.scores_TE.topk(call.k).indices

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Weights [T, K], differentiable."""
        weights_TK = call.scores_TE.gather(1, ids_TK)
        return torch.cat([weights_TK[:, :1], weights_TK[:, 1:] / 2], dim=1)

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """The choices that remain: second ones of little weight go."""
        return call.ids_TK.masked_fill(weights_TK < 0.01, -1)


torch.manual_seed(0)
layer = MoELayer(16, num_experts=8, router="sharpened")
out = layer(torch.randn(128, 16))
loss = out.output.square().mean() + weighted_loss(out.losses, layer.config.losses)
loss.backward()
assert layer.router.weight_ED.grad.abs().sum() > 0
print(f"own_router: {out.stats.as_dict()}")
