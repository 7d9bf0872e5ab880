"""TA-MoE router: experts behind slow links get fewer tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import slot_index
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.links import own_shares
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import WITH_POLICY
from moe_plugin.routing.routers.topk import TopKRouter


@routers.register("ta_moe")
class TAMoERouter(TopKRouter):
    """Top-k with at most ceil(pair_capacity * k S c_ie) choices of rank i for expert e.

    c_ie: topology-aware shares by the link costs (`router.links`), S: real tokens of this rank.
    Choices beyond a capacity are dropped (first choices get slots first, then by token);
    `pair_capacity: 0` drops none. Give the loss `ta_moe` a weight, which makes the router learn the
    shares; that loss works with every router. Source: TA-MoE (Chen et al. 2022).
    """

    reads = WITH_POLICY

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and this rank's shares by expert."""
        super().build(dtype, device)
        shares_E = own_shares(self.layer_config, self.comm)
        self.register_buffer("shares_E", shares_E.to(device), persistent=False)

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Without the choices beyond a pairwise capacity; see `Router.after_choice`."""
        ids_TK, factor = super().after_choice(call, weights_TK), self.config.links.pair_capacity
        if factor:
            real_T = call.real_T
            ids_TK = ids_TK.masked_fill(~real_T[:, None], -1)
            most_E = (factor * ids_TK.shape[1] * real_T.sum() * self.shares_E).sub(1e-9).ceil()
            over_TK = slot_index(ids_TK, self.num_experts) >= most_E[ids_TK.clamp(min=0)]
            ids_TK = ids_TK.masked_fill(over_TK, -1)
        return ids_TK
