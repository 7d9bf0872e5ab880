"""Routers that take the cost of links into account.

One router assigns fewer tokens to experts that are reached through slow links. The other router
limits the fraction of choices that are sent to other nodes. With `router.links.visited`, both
routers prefer experts on nodes to which the token's row is already sent (`links.prefer_visited`).
This reduces the number of rows sent between nodes if a row is sent once to each node
(`dispatch.send`).
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

ROUNDS = 4  # attempts to find another expert for choices beyond a capacity


def _note_nodes(router: Router, device: Any) -> None:
    """Set `own_node`, and set `nodes_EN` if `router.links.visited` is used (otherwise to None)."""
    comm, links = router.comm, router.config.links
    nodes_EN = None
    if links.visited and len(set(comm.topology.node_of)) > 1:
        nodes_EN = expert_nodes(comm, router.num_experts,
                                router.layer_config.parallel.shards).to(device)
    router.register_buffer("nodes_EN", nodes_EN, persistent=False)
    router.own_node = comm.topology.node_of[comm.rank]


def _near_visited(router: Router, call: RoutingCall) -> Tensor:
    # Detached, so that a first pass saves the same tensors for backward as its recomputation, which
    # repeats the choice without these operations.
    scores_TE = call.score.scores(call.logits_TE.detach())
    return prefer_visited(scores_TE, call.k, router.nodes_EN, router.own_node,
                          router.config.links.visited)


@routers.register("ta_moe")
class TAMoERouter(TopKRouter):
    """A top-k router in which rank i makes at most `ceil(pair_capacity * k S c_ie)` choices of
    expert e.

    Here `c_ie` are the topology-aware fractions of tokens for the link costs (`router.links`), and
    S is the number of real tokens of this rank. Choices beyond the capacity are dropped. Slots are
    assigned to first choices first, and then to earlier tokens. With `pair_capacity: 0` no choice
    is dropped. With `overflow: next`, choices beyond the capacity are first moved to the token's
    next best expert with free capacity.

    To make the router learn these fractions, set a weight for the loss `ta_moe`. This loss works
    with every router. If all ranks have the same router and similar tokens, no loss can make the
    router prefer different experts on each rank. In this case, the choices match these fractions
    only with `overflow: next`. Source: TA-MoE (Chen et al., 2022).
    """

    reads = WITH_POLICY
    leaves_none = True

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and the fractions of this rank's tokens for each expert."""
        super().build(dtype, device)
        shares_E = own_shares(self.layer_config, self.comm)
        self.register_buffer("shares_E", shares_E.to(device), persistent=False)
        check(not self.config.links.visited or self.config.second_expert_policy != "sampling",
              "router.links.visited", self.config.links.visited,
              "0 with router.second_expert_policy=sampling, which draws the second expert",
              "use the policy all or random")
        _note_nodes(self, device)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose k experts, and prefer nodes to which the token is already sent; see
        `Router.select`.
        """
        chosen_TK = (super().select(call) if self.nodes_EN is None
                     else call.choose(_near_visited(self, call)))
        if self.config.links.overflow == "drop":
            return chosen_TK
        return call.choose(with_room(call.score.scores(call.logits_TE.detach()), chosen_TK,
                                      call.real_T, self._most(call)))

    def _most(self, call: RoutingCall) -> Tensor:
        """Return the largest number of choices that this rank may make for each expert, float [E].
        """
        choices = self.config.links.pair_capacity * call.k * call.real_T.sum()
        # Without 1e-9, a rounding error such as 3.0000000001 would be rounded up to 4.
        return (choices * self.shares_E).sub(1e-9).ceil()

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Drop the choices beyond the capacity of the pair of a rank and an expert; see
        `Router.after_choice`.
        """
        ids_TK = super().after_choice(call, weights_TK)
        # Padding gets -1 first, so that it uses no slots.
        if self.config.links.pair_capacity:
            ids_TK = ids_TK.masked_fill(~call.real_T[:, None], -1)
            over_TK = slot_index(ids_TK, self.num_experts) >= self._most(call)[ids_TK.clamp(min=0)]
            ids_TK = ids_TK.masked_fill(over_TK, -1)
        return ids_TK


def with_room(scores_TE: Tensor, chosen_TK: Tensor, real_T: Tensor, most_E: Tensor) -> Tensor:
    """Move choices so that as few as possible exceed `most_E`, and return the new choices [T, K].

    In each round, every choice beyond the capacity of an expert is moved to the best of the token's
    other experts that have free capacity. If an expert then has too many choices, some of them are
    moved again in the next round. Choices that cannot be moved after the last round still exceed
    the capacity.
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
    """A top-k router in which at most `floor(quota * choices)` of this rank's choices leave its
    node.

    The choices with the highest scores may leave the node. If scores are equal, the choice of the
    earlier token has priority. Every other choice that would leave is replaced with the token's
    best unchosen expert on the node, or dropped if there is no such expert. The group's topology
    (`comm.topology`) determines which experts are on the node. If there is a single node, this
    router equals topk. Source: FastMoE (He et al., 2021), topology-aware gate.

    The one-pass kernel is used only if there is a single node. If there are several nodes, the
    choice compares the scores of different tokens and may be -1. This requires all scores. The
    step-by-step computation already has these scores, whereas the kernel would have to compute them
    again.
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
        """Choose the k best experts such that few choices leave the node; see `Router.select`."""
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
        """Mark the choices that may leave the node: those with the highest scores, up to the
        quota."""
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
