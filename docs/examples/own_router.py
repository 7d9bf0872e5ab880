"""A router of one's own, registered under a name and used like the provided ones.

    python own_router.py
"""

from __future__ import annotations

import torch

from moe_plugin import MoELayer, Routing, weighted_loss
from moe_plugin.records import TokenInfo
from moe_plugin.routing import Router, routers


@routers.register("sharpened")
class SharpenedRouter(Router):
    """Softmax of twice the logits, weights renormalized over the chosen experts."""

    def route(self, x_TD: torch.Tensor, mask_T: torch.Tensor | None, k: int,
              info: TokenInfo) -> Routing:
        """See `Router.route`."""
        clean_TE, logits_TE = self.logits(x_TD)     # float32, with router.noise in training
        probs_TE = (2 * logits_TE).softmax(1)
        # `replayed`: a recomputation in backward repeats the choice
        ids_TK = self.replayed(lambda: probs_TE.topk(k).indices)
        weights_TK = probs_TE.gather(1, ids_TK)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        inputs = self.loss_inputs(ids_TK, mask_T, info, logits_TE=logits_TE, probs_TE=probs_TE)
        return self.finish(inputs, ids_TK, weights_TK, probs_TE.detach().amax(1))


torch.manual_seed(0)
layer = MoELayer(16, num_experts=8, router="sharpened")
out = layer(torch.randn(128, 16))
loss = out.output.square().mean() + weighted_loss(out.losses, layer.config.losses)
loss.backward()
assert layer.router.weight_ED.grad.abs().sum() > 0
print(f"own_router: {out.stats.as_dict()}")
