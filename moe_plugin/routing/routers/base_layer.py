"""BASE router: every expert gets the same number of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.dtensors import fill_
from moe_plugin.kernels import top_k_stable
from moe_plugin.routing.assignment import balanced_assignment
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.initial_values import keep_init
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import SCORED, Router


@routers.register("base")
class BASERouter(Router):
    """Balanced assignment of largest total x . c_e: every expert gets the same number of tokens.

    The output is a * expert(x) + (1 - a) * x with a = sigmoid(x . c_e). In training each rank sends
    its tokens to random ranks, so that no assignment problem consists of similar neighbouring
    tokens only. Every rank assigns the tokens it received, the same number to each expert, and
    returns the answers. Sent are the scores [E] of a token, and one number back, not the token
    itself: its output does not depend on where it was assigned. This takes two exchanges, and one
    of sizes, in every training call. Outside training each token takes its nearest expert,
    unbalanced, as in the original. Centroids c_e start orthogonal with gain 0.1. Source: BASE
    layers (Lewis et al. 2021).
    """

    reads = SCORED
    fixed_k = 1
    balances = True
    own_losses = frozenset()
    score_name = "softmax"

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the centroids; a host's own initialisation keeps them (`keep_init`)."""
        super().build(dtype, device)
        keep_init(self.weight_ED)

    def reset_parameters(self) -> None:
        """Make the centroids orthogonal, with gain 0.1."""
        whole_ED = torch.empty(self.weight_ED.shape, dtype=torch.float32)
        fill_(self.weight_ED, nn.init.orthogonal_(whole_ED, gain=0.1))

    def select(self, call: RoutingCall) -> Tensor:
        """One expert per token; see `Router.select`."""
        logits_TE, real_T = call.logits_TE.detach(), call.real_T
        if not self.training:
            return top_k_stable(logits_TE, 1)
        chosen_T = torch.zeros(real_T.shape, dtype=torch.int64, device=real_T.device)
        chosen_T[real_T] = spread_and_assign(logits_TE[real_T], self.comm)
        return chosen_T[:, None]

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """a, and the weight of the token itself; see `Router.weigh`."""
        alpha_T1 = torch.sigmoid(call.logits_TE.gather(1, ids_TK))
        call.passthrough_T = 1 - alpha_T1[:, 0]
        return alpha_T1


def spread_and_assign(scores_TE: Tensor, comm: Comm) -> Tensor:
    """Experts of this rank's tokens, int64 [T], from balanced problems of randomly spread tokens.

    Collective. The shuffled tokens of rank i go to ranks i, i + 1, ... round robin, so the numbers
    that ranks receive differ by at most the number of ranks.

    Args:
        scores_TE: float. comm: ranks that share the tokens.
    """
    tokens, size = scores_TE.shape[0], comm.size
    order_T = torch.randperm(tokens, device=scores_TE.device)
    send = [tokens // size + ((peer - comm.rank) % size < tokens % size) for peer in range(size)]
    counts_W = comm.hosts.all_gather(torch.tensor([tokens])).tolist()
    recv = [
        count // size + ((comm.rank - peer) % size < count % size)
        for peer, count in enumerate(counts_W)
    ]
    got_NE = comm.all_to_all(scores_TE[order_T].contiguous(), send, recv)
    assigned_N = balanced_assignment(got_NE)
    back_T = comm.all_to_all(assigned_N, recv, send)
    return torch.empty_like(back_T).index_copy_(0, order_T, back_T)
