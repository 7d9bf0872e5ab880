"""Balance without a loss: a bias on each expert's score that only affects the choice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.replay import inside_backward
from moe_plugin.routing.routers.base import BY_SCORE
from moe_plugin.routing.routers.group_limited import GroupLimitedRouter


@routers.register("sigmoid_bias")
class SigmoidBiasRouter(GroupLimitedRouter):
    """The k largest s + b, s sigmoid scores; s alone is the weight; b moves against the load.

    After each step b_e += bias_rate * sign(mean load - load_e), load_e: choices of expert e by all
    data-parallel ranks since the last step; not where the router is frozen. With `router.groups`
    the choice is group-limited. Source: Wang et al. 2024 (auxiliary-loss-free balancing);
    DeepSeek-V3.

    The bias is a float32 buffer (`bias_E`, saved with the weights) for any dtype of the layer.
    A recomputation in backward does not count, a pass with replayed choices does; the one
    collective is in `finish_step`.
    """

    reads = BY_SCORE | {"groups", "group_top_k", "group_scores", "bias_rate"}
    groups_needed = False
    leaves_none = True
    score_name = "sigmoid"

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters, the biases and the counts; see `Router.build`."""
        super().build(dtype, device)
        self.balances = self.config.bias_rate > 0
        self.register_buffer("bias_E",
                             torch.zeros(self.num_experts, dtype=torch.float32, device=device))
        self.register_buffer("load_E",
                             torch.zeros(self.num_experts, dtype=torch.int64, device=device),
                             persistent=False)

    def select(self, call: RoutingCall) -> Tensor:
        """The k largest s + b; see `Router.select`."""
        return call.choose(bias_E=self.bias_E, **self.limits(call.k))

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Count the choices of a step; see `Router.after_choice`."""
        if self.training and not inside_backward():
            self.note_adapter()
            self.load_E = self.load_E + call.own_load_KE.sum(0)
        return call.ids_TK

    def finish_step(self) -> None:
        """Move the biases by the load of all ranks and restart the counts. Collective."""
        super().finish_step()
        load_E = self.batch_comm.all_reduce(self.load_E).double()
        if not self.frozen:
            step_E = self.config.bias_rate * torch.sign(load_E.mean() - load_E)
            self.bias_E = self.bias_E + step_E.to(self.bias_E.dtype)
        self.load_E = torch.zeros_like(self.load_E)
