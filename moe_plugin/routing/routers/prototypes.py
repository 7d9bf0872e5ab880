"""The kTop1 router, which chooses one expert from each of k prototypes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels import route, route_by_steps
from moe_plugin.kernels.router import Routed, Rule
from moe_plugin.kernels.scores import SOFTMAX
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import SEVERAL
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("ktop1")
class PrototypeRouter(Router):
    """A router that divides the experts into k prototypes of E/k consecutive experts and chooses
    the best expert of each prototype.

    A softmax is computed within each prototype. The weights are the probabilities computed by the
    softmax, which are not divided by their sum. Each loss is computed separately for each
    prototype, as for a router with E/k experts, and averaged over the
    prototypes. Source: M6-T (Yang et al., 2021).

    The one-pass kernel treats each prototype of a token as a separate row with E/k logits. The
    kernel sums the importance over all rows, but the losses need the importance of each prototype.
    If a loss reads the importance, it is therefore summed separately for each prototype.
    """

    reads = SEVERAL
    leaves_none = True
    score_name = "softmax"

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters and check the number of prototypes; see `Router.build`."""
        super().build(dtype, device)
        for k in self.config.several_k:
            self._check(k)

    def _check(self, k: int) -> None:
        experts = self.num_experts
        if experts % k:
            raise ValueError(
                f"router.top_k={k} is not a divisor of num_experts={experts}, as router ktop1 "
                f"requires. Use {max(d for d in range(1, k + 1) if experts % d == 0)}.")

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        self._check(call.k)
        return super().scores(x_TD, call)

    def select(self, call: RoutingCall) -> Tensor:
        """For each prototype i, choose its best expert as choice i; see `Router.select`."""
        return self._pass(call, None)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the probability of each choice within its prototype; see `Router.weigh`."""
        if call.routed is None:
            self._pass(call, ids_TK)
        assert call.routed is not None
        call.leaves_none = True
        # The priority is the largest score. A replayed choice need not have the largest score, so
        # that its weight cannot serve as priority.
        if self.config.batch_prioritized:
            call.scores_TE = F.softmax(_by_prototype(call), dim=1).view_as(call.logits_TE)
        return call.routed.weights_TK

    def _pass(self, call: RoutingCall, chosen_TK: Tensor | None) -> Tensor:
        """Run the kernel, set `call.routed`, and return the choices. The number of rows is N = T *
        k, and the rows of a token are consecutive. The number of experts per prototype is P = E /
        k.
        """
        logits_NP, k = _by_prototype(call), call.k
        first_K = torch.arange(k, device=logits_NP.device) * logits_NP.shape[1]
        mask_N = None if call.mask_T is None else call.mask_T.repeat_interleave(k)
        rule = Rule(1, False, SOFTMAX, z=call.reads_z)
        chosen_N1 = None if chosen_TK is None else (chosen_TK - first_K).reshape(-1, 1)
        if call.one_pass:
            rows = route(logits_NP, mask_N, rule, chosen_N1)
        else:
            scores_NP = F.softmax(logits_NP, dim=1)
            rows = route_by_steps(logits_NP, scores_NP, scores_NP, mask_N, rule, chosen_N1)
        ids_TK = rows.ids_TK.view(-1, k) + first_K if chosen_TK is None else chosen_TK
        call.routed = self._of_tokens(rows, logits_NP, ids_TK, call.mask_T)
        return ids_TK

    def _of_tokens(self, rows: Routed, logits_NP: Tensor, chosen_TK: Tensor,
                   mask_T: Tensor | None) -> Routed:
        """Convert the kernel's output for rows to an output for tokens.

        The scores of a token are the scores within each prototype, multiplied by 1/k.
        """
        tokens, k = chosen_TK.shape
        real = tokens if mask_T is None else mask_T.sum(dtype=rows.p_log_p.dtype)
        importance_E = logits_NP.new_zeros(self.num_experts)  # stays 0 if no loss reads it
        if not {"z"}.issuperset(self.losses):
            scores_TE = F.softmax(logits_NP, dim=1).view(tokens, self.num_experts)
            scores_TE = scores_TE if mask_T is None else scores_TE * mask_T[:, None]
            importance_E = scores_TE.sum(0) / k
        # the sum of (p / k) log(p / k)
        p_log_p = rows.p_log_p / k - real * math.log(k)
        return Routed(chosen_TK, rows.weights_TK.view(tokens, k), importance_E, rows.z, p_log_p)

    def losses_of(self, call: RoutingCall) -> dict[str, Tensor]:
        """Return each loss, averaged over the prototypes."""
        if not self.losses:
            return {}
        parts: list[dict[str, Tensor]] = []
        for i in range(call.k):
            part = _part(call, i)
            parts.append(super().losses_of(part))
            call._count = part._count  # all prototypes have the same tokens: count them once
        return {name: sum((part[name] for part in parts), value * 0) / call.k
                for name, value in parts[0].items()}


def _by_prototype(call: RoutingCall) -> Tensor:
    """Return the logits [N, P], where each row belongs to one prototype of one token."""
    return call.logits_TE.reshape(-1, call.experts // call.k)


def _part(call: RoutingCall, index: int) -> RoutingCall:
    """Return a prototype as a call of a router with E/k experts, to compute its losses."""
    k, width = call.k, call.experts // call.k
    columns = slice(index * width, (index + 1) * width)
    load_E, penalty_E, routed = call.step_load_E, call.penalty_E, call.routed
    assert routed is not None
    part = RoutingCall(
        call.logits_TE[:, columns], call.ids_TK[:, index:index + 1] - index * width, call.mask_T,
        info=call.info, score=SOFTMAX, noise=call.noise, comm=call.comm, leaves_none=True,
        clean_TE=None if call.clean_TE is None else call.clean_TE[:, columns],
        penalty_E=None if penalty_E is None else penalty_E[columns] / penalty_E[columns].mean(),
        step_load_E=None if load_E is None else F.pad(load_E[columns], (0, 1)),
        # All parts get the same z, because only their mean is used.
        routed=replace(routed, importance_E=routed.importance_E[columns] * k,
                       z=None if routed.z is None else routed.z / k))
    part._count, part._load_KE = call._count, call.own_load_KE[index:index + 1, columns]
    return part
