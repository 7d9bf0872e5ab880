"""The dense-to-sparse router. The router uses all experts at the beginning of training and only a
few experts at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import SEVERAL
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("dense_to_sparse")
class DenseToSparseRouter(Router):
    """A router that chooses all experts with `p >= threshold`, where
    `p = softmax((logits + Gumbel noise) / t)` and the temperature t decreases during training.

    A token always uses its best expert. The weight of each choice is p. The temperature t decreases
    geometrically from `sparsity.start` to `sparsity.end` over `sparsity.steps` optimizer steps. The
    number of completed steps is saved with the weights. In evaluation, no noise is added. Choices
    are
    sorted by decreasing p. `top_k` has no effect, because a token may have up to E choices. Source:
    the dense-to-sparse gate of EvoMoE (Nie et al., 2021).
    """

    reads = SEVERAL | {"sparsity"}
    reads_top_k = False
    any_number = True
    own_losses = frozenset()
    score_name = "softmax"
    step: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and the counter of steps."""
        super().build(dtype, device)
        self.fixed_k = self.num_experts
        self.register_buffer("step", torch.zeros(1, dtype=torch.int64, device=device))

    def temperature(self) -> Tensor:
        """Return the temperature `start * (end / start)^min(1, step / steps)`, float64 [1]."""
        rules = self.config.sparsity
        done = (self.step.double() / rules.steps).clamp(max=1.0)
        return rules.start * (rules.end / rules.start) ** done

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Return the logits, and set the scores p of all experts; see `Router.scores`."""
        logits_TE = noisy_TE = super().scores(x_TD, call)
        if self.training:
            self.note_adapter()
            # Recorded with the choice, because the weights depend on the noise.
            noisy_TE = logits_TE + self.replayed(
                lambda: -torch.empty_like(logits_TE).exponential_().log(), "noise",
                tuple(logits_TE.shape))
        call.scores_TE = F.softmax(noisy_TE / self.temperature().to(noisy_TE.dtype), dim=1)
        return logits_TE

    def select(self, call: RoutingCall) -> Tensor:
        """Return up to E choices per token; see `Router.select`."""
        sorted_TE, ids_TE = torch.sort(call.scores_TE.detach(), dim=1, descending=True, stable=True)
        skipped_TE = sorted_TE < self.config.sparsity.threshold
        # A token always keeps its best expert, even if its share is below the threshold.
        skipped_TE[:, 0] = False
        return ids_TE.masked_fill(skipped_TE, -1)

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Return the scores p; see `Router.weigh`."""
        return call.scores_TE.gather(1, ids_TK.clamp(min=0))

    def finish_step(self) -> None:
        """Count the step. If the router is frozen, its temperature does not change."""
        super().finish_step()
        if not self.frozen:
            self.step.add_(1)
