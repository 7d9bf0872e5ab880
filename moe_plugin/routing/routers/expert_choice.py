"""Expert choice: experts pick tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.records import Routing, TokenInfo
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router, first_choice_priority


@routers.register("expert_choice")
class ExpertChoiceRouter(Router):
    """Each expert takes the ceil(n k / E) of this rank's n real tokens with the highest scores.

    Scores are p = softmax over experts, which also weigh the choices. Balanced by construction; a
    token has between 0 and E experts, `top_k` on average. Of equal scores the earlier token wins.
    An expert sees all tokens of a call before it picks: do not use it where a token must not depend
    on later ones (a language model would generate with other choices than those of its training).
    Source: Zhou et al. 2022.
    """

    balances = True
    own_losses = frozenset()

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """Up to E choices per token, the likeliest first; see `Router.route`."""
        logits_TE, probs_TE, clean_TE = self.softmax_scores(x_TD)
        ids_TE = self.replayed(lambda: self._choose(probs_TE.detach(), mask_T, k),
                               shape=tuple(probs_TE.shape))
        weights_TE = probs_TE.gather(1, ids_TE.clamp(min=0)) * (ids_TE >= 0)
        inputs = self.loss_inputs(ids_TE, mask_T, info, logits_TE=logits_TE, probs_TE=probs_TE,
                                  clean_probs_TE=clean_TE)
        return self.finish(inputs, ids_TE, weights_TE, first_choice_priority(probs_TE))

    def _choose(self, probs_TE: Tensor, mask_T: Tensor, k: int) -> Tensor:
        tokens = mask_T.shape[0]
        # the number of real tokens stays on the device: it is compared with the rank of each token
        order_TE = torch.sort(probs_TE.masked_fill(~mask_T[:, None], -1.0), dim=0, descending=True,
                              stable=True).indices
        place_T1 = torch.arange(tokens, device=mask_T.device)[:, None]
        rank_TE = torch.empty_like(order_TE).scatter_(0, order_TE, place_T1.expand_as(order_TE))
        taken_TE = (rank_TE < (mask_T.sum() * k + self.num_experts - 1) //
                    self.num_experts) & mask_T[:, None]
        picked_TE = probs_TE.masked_fill(~taken_TE, -1.0)
        value_TE, ids_TE = torch.sort(picked_TE, dim=1, descending=True, stable=True)
        return ids_TE.masked_fill(value_TE < 0, -1)
