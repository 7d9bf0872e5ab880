"""Routers that take link costs into account.

`TAMoERouter` assigns fewer tokens to experts that are reached over slow links.
`TopologyQuotaRouter` limits the fraction of choices that are sent to other nodes. With
`router.links.visited`, both routers prefer experts on nodes that already receive the token
(`links.prefer_visited`). The preference reduces the number of rows sent between nodes if a token is
sent only once to each node (`dispatch.send`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.config.options import check
from moe_plugin.kernels import slot_index, top_k_stable
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import BY_SCORE, WITH_POLICY
from moe_plugin.routing.links import expert_nodes, near_experts, own_shares, prefer_visited
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router
from moe_plugin.routing.routers.topk import TopKRouter

ROUNDS = 4  # attempts to find another expert for choices beyond a capacity


def _note_nodes(router: TAMoERouter | TopologyQuotaRouter, device: Any) -> None:
    """Set `own_node` and `nodes_EN`. `nodes_EN` is None unless `router.links.visited` is used."""
    comm, links = router.comm, router.config.links
    nodes_EN = None
    if links.visited and len(set(comm.topology.node_of)) > 1:
        nodes_EN = expert_nodes(comm, router.num_experts,
                                router.layer_config.parallel.shards).to(device)
    router.register_buffer("nodes_EN", nodes_EN, persistent=False)
    router.own_node = comm.topology.node_of[comm.rank]


def _near_visited(router: TAMoERouter | TopologyQuotaRouter, call: RoutingCall) -> Tensor:
    # Detached, so that a first pass saves the same tensors for backward as its recomputation, which
    # repeats the choice without these operations.
    assert router.nodes_EN is not None
    scores_TE = call.score.scores(call.logits_TE.detach())
    return prefer_visited(scores_TE, call.k, router.nodes_EN, router.own_node,
                          router.config.links.visited)


@routers.register("ta_moe")
class TAMoERouter(TopKRouter):
    """A top-k router in which rank i chooses expert e at most `ceil(pair_capacity * k S c_ie)`
    times.

    Here, `c_ie` is the topology-aware fraction of tokens computed from the link costs
    (`router.links`), and S is the number of real tokens on this rank. Choices that exceed the
    capacity of a (rank, expert) pair are dropped. First choices have priority over other choices,
    and earlier tokens over later tokens. With `pair_capacity: 0`, no choice is dropped. With
    `overflow: next`, choices that exceed the capacity are first moved to the token's next best
    expert with free capacity.

    To train the router towards the fractions `c_ie`, set a weight for the `ta_moe` loss. The
    `ta_moe` loss can be used with every router. If all ranks have the same router and similar
    tokens, no loss can train the router to prefer different experts on different ranks. On ranks
    with the same
    router and similar tokens, choices follow the fractions only with `overflow: next`. Source:
    TA-MoE (Chen et al., 2022).
    """

    reads = WITH_POLICY
    leaves_none = True
    nodes_EN: Tensor | None
    own_node: int
    shares_E: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED`, and compute the fraction of this rank's tokens for each expert."""
        super().build(dtype, device)
        shares_E = own_shares(self.layer_config, self.comm)
        self.register_buffer("shares_E", shares_E.to(device), persistent=False)
        check(not self.config.links.visited or self.config.second_expert_policy != "sampling",
              "router.links.visited", self.config.links.visited,
              "0 with router.second_expert_policy=sampling, which draws the second expert",
              "use the policy all or random")
        _note_nodes(self, device)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose k experts, preferring nodes that receive the token anyway; see `Router.select`."""
        chosen_TK = (super().select(call) if self.nodes_EN is None
                     else call.choose(_near_visited(self, call)))
        if self.config.links.overflow == "drop":
            return chosen_TK
        return call.choose(with_room(call.score.scores(call.logits_TE.detach()), chosen_TK,
                                      call.real_T, self._most(call)))

    def _most(self, call: RoutingCall) -> Tensor:
        """For each expert, return the largest number of choices that this rank may make, float [E].
        """
        choices = self.config.links.pair_capacity * call.k * call.real_T.sum()
        # Without 1e-9, a rounding error such as 3.0000000001 would be rounded up to 4.
        return (choices * self.shares_E).sub(1e-9).ceil()

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Drop the choices that exceed this rank's limit per expert; see `Router.after_choice`."""
        ids_TK = super().after_choice(call, weights_TK)
        # Padding gets -1 first, so that it uses no slots.
        if self.config.links.pair_capacity:
            ids_TK = ids_TK.masked_fill(~call.real_T[:, None], -1)
            over_TK = slot_index(ids_TK, self.num_experts) >= self._most(call)[ids_TK.clamp(min=0)]
            ids_TK = ids_TK.masked_fill(over_TK, -1)
        return ids_TK


def with_room(scores_TE: Tensor, chosen_TK: Tensor, real_T: Tensor, most_E: Tensor) -> Tensor:
    """Move choices so that as few as possible exceed `most_E`, and return the new choices [T, K].

    In each round, every choice that exceeds the capacity of its expert is moved to the best of the
    token's other experts that have free capacity. If an expert has too many choices after a round,
    some of them are moved again in the next round. After the last round, choices that could not be
    moved still exceed the capacity.
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
            # A token must not choose the same expert again in a later column.
            free_TE = free_TE.scatter(1, columns[-1], float("-inf"))
        chosen_TK = torch.cat(columns, 1)
    return chosen_TK


@routers.register("topology_quota")
class TopologyQuotaRouter(Router):
    """A top-k router with at most `floor(quota * choices)` of a rank's choices on other nodes.

    The choices with the highest scores may be sent to other nodes. Among choices with equal scores,
    the choice of the earlier token has priority. Any other choice on another node is replaced with
    the token's best unchosen expert on this rank's node. If no expert on this rank's node is free,
    the choice is dropped. The group's topology (`comm.topology`) determines which experts are on
    this rank's
    node. With a single node, this router is equivalent to the topk router. Source: FastMoE (He et
    al., 2021), the topology-aware gate.

    The one-pass kernel is used only if there is a single node. With several nodes, the router
    compares the scores of different tokens, and a choice may be -1. The router therefore needs the
    scores of all experts. Computing the routing in separate steps provides the scores of all
    experts, whereas the kernel would have to compute them again.
    """

    reads = BY_SCORE
    own_losses = frozenset()
    nodes_EN: Tensor | None
    own_node: int
    near_E: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and the mask of the experts on this rank's node."""
        super().build(dtype, device)
        near_E = near_experts(self.comm, self.num_experts, self.layer_config.parallel.shards)
        self.leaves_none = bool(near_E.all())
        self.register_buffer("near_E", near_E.to(device), persistent=False)
        _note_nodes(self, device)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the k best experts within the quota for other nodes; see `Router.select`."""
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
        """Mark the choices that may be sent to other nodes, which are the choices with the highest
        scores, up to the quota.
        """
        order_N = torch.argsort(
            torch.where(leaves_TK, value_TK, -1.0).reshape(-1), descending=True, stable=True)
        rank_N = torch.empty_like(order_N).index_copy_(
            0, order_N, torch.arange(order_N.numel(), device=order_N.device))
        # The quota stays on the device, because it depends on the number of real tokens.
        quota = (mask_T.sum() * (self.config.links.quota * value_TK.shape[1])).floor()
        return (rank_N < quota).view_as(leaves_TK)

    def _stay_on_node(self, scores_TE: Tensor, chosen_TK: Tensor, over_TK: Tensor) -> Tensor:
        free_TE = self.near_E.expand_as(scores_TE).scatter(1, chosen_TK, False)
        kept = []
        for j in range(chosen_TK.shape[1]):
            near_T1 = top_k_stable(scores_TE.masked_fill(~free_TE, -1.0), 1)
            is_free_T1 = free_TE.gather(1, near_T1)
            over_T1 = over_TK[:, j : j + 1]
            kept.append(
                torch.where(over_T1, torch.where(is_free_T1, near_T1, -1), chosen_TK[:, j:j + 1]))
            free_TE = free_TE.scatter(1, near_T1, free_TE.gather(1, near_T1) & ~over_T1)
        return torch.cat(kept, 1)
