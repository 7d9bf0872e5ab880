"""GShard router: two experts per token, the second with a probability."""

from __future__ import annotations

from torch import Tensor

from moe_plugin.kernels.score_functions import shares
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import BY_SCORE
from moe_plugin.routing.routers.topk import TopKRouter


@routers.register("gshard")
class GShardRouter(TopKRouter):
    """The two likeliest experts, the second kept in training with probability min(1, 2 g2).

    g2 = p2 / (p1 + p2). The weights g are fixed before the second expert is dropped. Source: GShard
    (Lepikhin et al. 2020), algorithm 1.
    """

    reads = BY_SCORE | {"second_expert_policy=random"}
    fixed_k = 2
    second_expert_policy = "random"

    def second_share(self, weights_TK: Tensor) -> Tensor:
        """g2; see `TopKRouter.second_share`."""
        return shares(weights_TK)[:, 1]
