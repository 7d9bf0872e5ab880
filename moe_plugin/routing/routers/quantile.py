"""A router whose biases come from quantiles of the logits, one dual step of a balanced plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import top_k_stable
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.registry import routers
from moe_plugin.routing.replay import counts
from moe_plugin.routing.routers.base import BY_SCORE, FORCED, LINEAR, Router


@routers.register("quantile")
class QuantileRouter(Router):
    """The k largest logits l + b; their scores without b are the weights; b from quantiles of l.

    A pass of n real tokens in training: a_t is the (k + 1)-th largest l_te + b_e of a token, q_e
    the (floor(n k / E) + 1)-th largest l_te - a_t of an expert, so that with b_e = -q_e about
    n k / E tokens would prefer e to what they leave. After a step b_e becomes
    c b_e - (1 - c) q_e, less its mean over the experts, with c = quantile_ema and q the mean over
    the passes of all data-parallel ranks that had tokens; not where the router is frozen.
    Source: `quantile_balancing` of Megatron-core 0.19 (`qb_dual_update`), whose qb_beta is -b;
    there the tokens of ranks that share a sequence are one pass, here each rank's are.

    The bias is a float32 buffer (`bias_E`, saved with the weights) for any dtype of the layer.
    Passes count as `moe_plugin.routing.replay.counts` says, those with replayed choices, too, but
    for one with a logit of a real token that is not finite. The one collective is in `finish_step`.
    """

    reads = BY_SCORE | FORCED | LINEAR | {"quantile_ema"}
    leaves_none = True
    balances = True

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters, the biases and the sums; see `Router.build`."""
        super().build(dtype, device)
        zeros_E = torch.zeros(self.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias_E", zeros_E)
        # sums of q over the passes of a step, and their number (last element)
        self.register_buffer("passes_E", torch.cat([zeros_E, zeros_E[:1]]), persistent=False)

    def select(self, call: RoutingCall) -> Tensor:
        """The k largest l + b; see `Router.select`."""
        return call.choose(top_k_stable(self._biased(call), call.k))

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Note the quantiles of a pass; see `Router.after_choice`."""
        if call.k < self.num_experts and counts(self.training):
            self.note_adapter()
            if call.ids_TK.shape[0]:
                self.passes_E.add_(quantiles(
                    call.logits_TE.detach(), self._biased(call), call.real_T, call.k))
        return call.ids_TK

    def step_sums(self) -> list[Tensor]:
        """The quantiles; see `RouterModule.step_sums`."""
        return [self.passes_E]

    def _biased(self, call: RoutingCall) -> Tensor:
        return call.logits_TE.detach() + self.bias_E

    def finish_step(self) -> None:
        """Move the biases by the quantiles of all ranks and restart. Collective."""
        passes_E = self.step_comm.all_reduce(self.passes_E).double()
        if not self.frozen:
            keep, count = self.config.quantile_ema, passes_E[-1]
            mean_E = passes_E[:-1] / torch.where(count > 0, count, 1)
            new_E = keep * self.bias_E - (1 - keep) * mean_E
            new_E = torch.where(count > 0, new_E - new_E.mean(), self.bias_E)
            self.bias_E.copy_(new_E)
        super().finish_step()


def quantiles(logits_TE: Tensor, biased_TE: Tensor, real_T: Tensor, k: int) -> Tensor:
    """q of `QuantileRouter` and 1, float32 [E + 1]; all 0 without a real token, or where a real one
    has a logit that is not finite.

    Args:
        logits_TE, biased_TE: l and l + b.
        real_T: bool, True = real token; T >= 1.
        k: below E.
    """
    tokens, experts = logits_TE.shape
    over_TE = logits_TE - biased_TE.topk(k + 1, dim=1).values[:, k:]
    over_TE = over_TE.masked_fill(~real_T[:, None], float("-inf"))
    # how many tokens are real stays on the device
    real = real_T.sum()
    place_1E = (real * k // experts).clamp(max=tokens - 1).expand(1, experts)
    found_1E = torch.sort(over_TE, dim=0, descending=True).values.gather(0, place_1E)
    # one NaN would stay in the biases for good
    finite = (biased_TE.isfinite() | ~real_T[:, None]).all()
    counts = (real > 0) & finite
    return torch.cat([torch.where(counts, found_1E[0], 0.0).float(), counts.float()[None]])
