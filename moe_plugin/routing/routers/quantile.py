"""A router whose biases are computed from quantiles of the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import BY_SCORE, FORCED, LINEAR
from moe_plugin.routing.counting import add_counts
from moe_plugin.routing.registry import routers
from moe_plugin.routing.routers.base import Router


@routers.register("quantile")
class QuantileRouter(Router):
    """A router that chooses the experts with the k largest values of l + b, where l are the logits
    and b are biases.

    The weights are the scores of the chosen experts without b. The biases b are computed from
    quantiles of l. Computing b is one step of a dual method that finds a balanced plan.

    For a training pass with n real tokens, `a_t` is the (k + 1)-th largest value of `l_te + b_e`
    over the experts of token t. `q_e` is the (floor(n k / E) + 1)-th largest value of `l_te - a_t`
    over the tokens. With `b_e = -q_e`, about n k / E tokens would prefer expert e to their best
    unchosen expert. After each step, `b_e` is set to `c b_e - (1 - c) q_e`, minus the mean of this
    expression over the experts. Here, c is the `quantile_ema` setting, and q is averaged over the
    passes of all data-parallel ranks that had tokens. The biases of a frozen router do not change.
    Source: `quantile_balancing` of Megatron-core 0.19 (`qb_dual_update`). Megatron's `qb_beta` is
    -b. In Megatron, the tokens of all ranks that share a sequence form one pass. Here, the tokens
    of each rank form a separate pass.

    Regardless of the layer's dtype, the bias is stored in the float32 buffer `bias_E`, which is
    saved with the weights. `moe_plugin.routing.counting.counts` decides which passes are counted.
    Passes with replayed choices are also counted. A pass is not counted if a logit of a real token
    is not finite. The router's only collective runs in `finish_step`.
    """

    reads = BY_SCORE | FORCED | LINEAR | {"quantile_ema"}
    leaves_none = True
    balances = True
    bias_E: Tensor
    passes_E: Tensor

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters, the biases and the sums; see `Router.build`."""
        super().build(dtype, device)
        zeros_E = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias_E", zeros_E)
        # sums of q over the passes of a step, and the number of passes (last element)
        self.register_buffer("passes_E", torch.cat([zeros_E, zeros_E[:1]]), persistent=False)

    def select(self, call: RoutingCall) -> Tensor:
        """Choose the experts with the k largest values of l + b; see `Router.select`."""
        return call.choose(top_k_stable(self._biased(call), call.k))

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Add the quantiles of this pass to the sums; see `Router.after_choice`."""
        if self.training and call.k < self.num_experts:
            self.note_adapter()
            if call.ids_TK.shape[0]:
                add_counts(self.passes_E, lambda: quantiles(
                    call.logits_TE.detach(), self._biased(call), call.real_T, call.k), True)
        return call.ids_TK

    def step_sums(self) -> list[Tensor]:
        """Return the sums of the quantiles; see `RouterModule.step_sums`."""
        return [self.passes_E]

    def _biased(self, call: RoutingCall) -> Tensor:
        return call.logits_TE.detach() + self.bias_E

    def finish_step(self) -> None:
        """Update the biases from the quantiles of all ranks, and reset the sums. Collective."""
        passes_E = self.step_comm.all_reduce(self.passes_E).double()
        if not self.frozen:
            keep, count = self.config.quantile_ema, passes_E[-1]
            mean_E = passes_E[:-1] / torch.where(count > 0, count, 1)
            new_E = keep * self.bias_E - (1 - keep) * mean_E
            # Without any pass the biases stay. The check runs on the device to avoid a wait.
            new_E = torch.where(count > 0, new_E - new_E.mean(), self.bias_E)
            self.bias_E.copy_(new_E)
        super().finish_step()


def quantiles(logits_TE: Tensor, biased_TE: Tensor, real_T: Tensor, k: int) -> Tensor:
    """Return a float32 tensor [E + 1]: the quantiles q of `QuantileRouter`, followed by 1.

    If there are no real tokens, or if a logit of a real token is not finite, all elements are 0.

    Args:
        logits_TE, biased_TE: logits l, and biased logits l + b.
        real_T: bool [T], True for tokens that are not padding. T must be at least 1.
        k: number of experts per token, which must be less than E.
    """
    tokens, experts = logits_TE.shape
    over_TE = logits_TE - biased_TE.topk(k + 1, dim=1).values[:, k:]
    over_TE = over_TE.masked_fill(~real_T[:, None], float("-inf"))
    # The number of real tokens stays on the device, so that the host does not wait for it.
    real = real_T.sum()
    rank_1E = (real * k // experts).clamp(max=tokens - 1).expand(1, experts)
    quantile_1E = torch.sort(over_TE, dim=0, descending=True).values.gather(0, rank_1E)
    # A single NaN would never leave the biases.
    finite = (biased_TE.isfinite() | ~real_T[:, None]).all()
    counts = (real > 0) & finite
    return torch.cat([torch.where(counts, quantile_1E[0], 0.0).float(), counts.float()[None]])
