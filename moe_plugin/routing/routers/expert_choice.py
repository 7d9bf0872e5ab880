"""Expert choice: experts pick tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import SEVERAL, Router


@routers.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Each expert takes the ceil(n k / E) of this rank's n real tokens with the highest scores.

    Scores are p = softmax over experts, which also weigh the choices. Balanced by construction; a
    token has between 0 and E experts, `top_k` on average. Of equal scores the earlier token wins.
    An expert sees all tokens of a call before it picks: do not use it where a token must not depend
    on later ones (a language model would generate with other choices than those of its training).
    Source: Zhou et al. 2022.
    """

    reads = SEVERAL
    any_number = True
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def select(self, call: RoutingCall) -> Tensor:
        """Up to E choices per token, the likeliest first; see `Router.select`."""
        probs_TE, real_T = call.scores_TE.detach(), call.real_T
        # the number of real tokens stays on the device: it is compared with the rank of each token
        order_TE = torch.sort(probs_TE.masked_fill(~real_T[:, None], -1.0), dim=0, descending=True,
                              stable=True).indices
        place_T1 = torch.arange(real_T.shape[0], device=real_T.device)[:, None]
        rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, place_T1.expand_as(order_TE))
        each = (real_T.sum() * call.k + self.num_experts - 1) // self.num_experts
        taken_TE = (rank_TE < each) & real_T[:, None]
        picked_TE = probs_TE.masked_fill(~taken_TE, -1.0)
        value_TE, ids_TE = torch.sort(picked_TE, dim=1, descending=True, stable=True)
        return ids_TE.masked_fill(value_TE < 0, -1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """p; see `Router.weigh`."""
        return call.scores_TE.gather(1, ids_TK.clamp(min=0))
