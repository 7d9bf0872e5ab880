"""Routers that know what links cost: experts behind slow links get fewer tokens, or a bounded share
of choices leaves the node. With `router.links.visited` both prefer experts on nodes that a token's
row goes to anyway (`links.prefer_visited`): fewer rows between nodes where a row is sent once to
each (`dispatch.send`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.config.options import check
from moe_plugin.kernels import slot_index, top_k_stable
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.links import expert_nodes, near_experts, own_shares, prefer_visited
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import BY_SCORE, WITH_POLICY, Router
from moe_plugin.routing.routers.topk import TopKRouter

ROUNDS = 4  # in which choices beyond a capacity look for another expert


def _note_nodes(router: Router, device: Any) -> None:
    """Where `router.links.visited` asks for it, `nodes_EN` and `own_node`, else None."""
    comm, links = router.comm, router.config.links
    nodes_EN = None
    if links.visited and len(set(comm.topology.node_of)) > 1:
        nodes_EN = expert_nodes(comm, router.num_experts,
                                router.layer_config.parallel.shards).to(device)
    router.register_buffer("nodes_EN", nodes_EN, persistent=False)
    router.own_node = comm.topology.node_of[comm.rank]


def _near_visited(router: Router, call: RoutingCall) -> Tensor:
    # without a graph: a recomputation, which repeats the choice, keeps as much for backward
    scores_TE = call.score.scores(call.logits_TE.detach())
    return prefer_visited(scores_TE, call.k, router.nodes_EN, router.own_node,
                          router.config.links.visited)


@routers.register("ta_moe")
class TAMoERouter(TopKRouter):
    """Top-k with at most ceil(pair_capacity * k S c_ie) choices of rank i for expert e.

    c_ie: topology-aware shares by the link costs (`router.links`), S: real tokens of this rank.
    Choices beyond a capacity are dropped (first choices get slots first, then by token);
    `pair_capacity: 0` drops none. With `overflow: next` they first go to the token's next best
    expert that has room. Give the loss `ta_moe` a weight, which makes the router learn the shares;
    that loss works with every router. Where all ranks have one router and tokens of the same kind,
    no loss can make it prefer other experts on each rank: there `overflow: next` alone brings the
    choices to the shares. Source: TA-MoE (Chen et al. 2022).
    """

    reads = WITH_POLICY
    leaves_none = True

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and this rank's shares by expert."""
        super().build(dtype, device)
        shares_E = own_shares(self.layer_config, self.comm)
        self.register_buffer("shares_E", shares_E.to(device), persistent=False)
        check(not self.config.links.visited or self.config.second_expert_policy != "sampling",
              "router.links.visited", self.config.links.visited,
              "0 with router.second_expert_policy=sampling, which draws the second expert",
              "use the policy all or random")
        _note_nodes(self, device)

    def select(self, call: RoutingCall) -> Tensor:
        """The k best, or those near nodes that are visited; see `Router.select`."""
        chosen_TK = (super().select(call) if self.nodes_EN is None
                     else call.choose(_near_visited(self, call)))
        if self.config.links.overflow == "drop":
            return chosen_TK
        return call.choose(with_room(call.score.scores(call.logits_TE.detach()), chosen_TK,
                                      call.real_T, self._most(call)))

    def _most(self, call: RoutingCall) -> Tensor:
        """Choices of this rank that each expert may have, float [E]."""
        choices = self.config.links.pair_capacity * call.k * call.real_T.sum()
        return (choices * self.shares_E).sub(1e-9).ceil()

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Without the choices beyond a pairwise capacity; see `Router.after_choice`."""
        ids_TK = super().after_choice(call, weights_TK)
        if self.config.links.pair_capacity:
            ids_TK = ids_TK.masked_fill(~call.real_T[:, None], -1)
            over_TK = slot_index(ids_TK, self.num_experts) >= self._most(call)[ids_TK.clamp(min=0)]
            ids_TK = ids_TK.masked_fill(over_TK, -1)
        return ids_TK


def with_room(scores_TE: Tensor, chosen_TK: Tensor, real_T: Tensor, most_E: Tensor) -> Tensor:
    """Choices of which as few as possible exceed `most_E`, int64 [T, K].

    Each round gives every choice beyond an expert's capacity to the token's best other expert that
    still has room. An expert may get too many in a round, which the next one moves on; those that
    the last one leaves exceed the capacity.
    """
    experts = scores_TE.shape[1]
    for _ in range(min(experts, ROUNDS)):
        ids_TK = chosen_TK.masked_fill(~real_T[:, None], -1)
        over_TK = slot_index(ids_TK, experts) >= most_E[chosen_TK]
        load_E = torch.zeros_like(most_E).index_add_(
            0, chosen_TK.flatten(), (ids_TK >= 0).flatten().to(most_E.dtype))
        free_TE = scores_TE.masked_fill(load_E >= most_E, float("-inf"))
        free_TE = free_TE.scatter(1, chosen_TK, float("-inf"))
        columns = []
        for old_T1, over_T1 in zip(chosen_TK.split(1, 1), over_TK.split(1, 1), strict=True):
            best_T1 = top_k_stable(free_TE, 1)
            moves_T1 = over_T1 & free_TE.gather(1, best_T1).isfinite()
            columns.append(torch.where(moves_T1, best_T1, old_T1))
            free_TE = free_TE.scatter(1, columns[-1], float("-inf"))
        chosen_TK = torch.cat(columns, 1)
    return chosen_TK


@routers.register("topology_quota")
class TopologyQuotaRouter(Router):
    """Top-k with at most floor(quota * choices) of this rank's choices leaving its node.

    The choices with the highest scores may leave (ties: the earlier token). Any other is replaced
    by the token's best expert on the node that it has not chosen yet, or dropped if none is left.
    The group's topology (`comm.topology`) says which experts are on the node; on one node this is
    router topk. Source: FastMoE (He et al. 2021), topology-aware gate.

    Routed in one pass on one node alone. Over several the choice compares the scores of different
    tokens and may leave one empty: it needs all scores, which the single steps share and a pass
    would compute again.
    """

    reads = BY_SCORE
    own_losses = frozenset()

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and the mask of experts on this rank's node."""
        super().build(dtype, device)
        near_E = near_experts(self.comm, self.num_experts, self.layer_config.parallel.shards)
        self.leaves_none = bool(near_E.all())
        self.register_buffer("near_E", near_E.to(device), persistent=False)
        _note_nodes(self, device)

    def select(self, call: RoutingCall) -> Tensor:
        """The k best, of which few leave the node; see `Router.select`."""
        if self.leaves_none:
            return call.choose()
        scores_TE, real_T = call.scores_TE.detach(), call.real_T
        chosen_TK = (top_k_stable(scores_TE, call.k) if self.nodes_EN is None
                     else _near_visited(self, call))
        leaves_TK = ~self.near_E[chosen_TK] & real_T[:, None]
        over_TK = leaves_TK & ~self._allowed(scores_TE.gather(1, chosen_TK), leaves_TK, real_T)
        return self._stay_on_node(scores_TE, chosen_TK, over_TK)

    def one_pass(self) -> bool:
        return self.leaves_none and super().one_pass()

    def _allowed(self, value_TK: Tensor, leaves_TK: Tensor, mask_T: Tensor) -> Tensor:
        """The best choices that leave the node, as many as the quota allows."""
        order_N = torch.argsort(
            torch.where(leaves_TK, value_TK, -1.0).reshape(-1), descending=True, stable=True)
        rank_N = torch.empty_like(order_N).index_copy_(
            0, order_N, torch.arange(order_N.numel(), device=order_N.device))
        quota = (mask_T.sum() * (self.config.links.quota * value_TK.shape[1])).floor()
        return (rank_N < quota).view_as(leaves_TK)

    def _stay_on_node(self, scores_TE: Tensor, chosen_TK: Tensor, over_TK: Tensor) -> Tensor:
        free_TE = self.near_E.expand_as(scores_TE).scatter(1, chosen_TK, False)
        kept = []
        for j in range(chosen_TK.shape[1]):
            near_T1 = top_k_stable(scores_TE.masked_fill(~free_TE, -1.0), 1)
            found_T1 = free_TE.gather(1, near_T1)
            over_T1 = over_TK[:, j : j + 1]
            kept.append(
                torch.where(over_T1, torch.where(found_T1, near_T1, -1), chosen_TK[:, j:j + 1]))
            free_TE = free_TE.scatter(1, near_T1, free_TE.gather(1, near_T1) & ~over_T1)
        return torch.cat(kept, 1)
