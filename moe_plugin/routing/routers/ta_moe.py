"""TA-MoE router: experts behind slow links get fewer tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import slot_index
from moe_plugin.records import Routing
from moe_plugin.routing.links import own_shares
from moe_plugin.routing.losses import LossInputs
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.topk import TopKRouter


@routers.register("ta_moe")
class TAMoERouter(TopKRouter):
    """Top-k with at most ceil(pair_capacity * k S c_ie) choices of rank i for expert e.

    c_ie: topology-aware shares by the link costs (`router.links`), S: real tokens of this rank.
    Choices beyond a capacity are dropped (first choices get slots first, then by token);
    `pair_capacity: 0` drops none. Give the loss `ta_moe` a weight, which makes the router learn the
    shares; that loss works with every router. Source: TA-MoE (Chen et al. 2022).
    """

    one_pass = True
    needs_mask = True

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and this rank's shares by expert."""
        super().build(dtype, device)
        shares_E = own_shares(self.layer_config, self.comm)
        self.register_buffer("shares_E", shares_E.to(device), persistent=False)

    def finish(self, inputs: LossInputs, ids_TK: Tensor, weights_TK: Tensor, priority_T: Tensor,
               passthrough_T: Tensor | None = None) -> Routing:
        """As `Router.finish`, without the choices beyond a pairwise capacity."""
        factor = self.config.links.pair_capacity
        if factor:
            ids_TK = ids_TK.masked_fill(~inputs.mask_T[:, None], -1)
            choices = ids_TK.shape[1] * inputs.mask_T.sum()
            most_E = (factor * choices * self.shares_E).sub(1e-9).ceil()
            over_TK = slot_index(ids_TK, self.num_experts) >= most_E[ids_TK.clamp(min=0)]
            ids_TK = ids_TK.masked_fill(over_TK, -1)
        return super().finish(inputs, ids_TK, weights_TK, priority_T, passthrough_T)
