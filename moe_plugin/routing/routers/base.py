"""`Router`: what all routers share, from logits in float32 to the finished `Routing`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.local import LocalComm
from moe_plugin.config import MoEConfig
from moe_plugin.kernels import expert_load
from moe_plugin.records import HostContext, Routing, TokenInfo
from moe_plugin.routing.contract import RouterModule
from moe_plugin.routing.links import link_penalties
from moe_plugin.routing.losses import LossInputs, losses
from moe_plugin.routing.replay import inside_backward

NEEDS_OF_LOSSES = {"sequence": "sequences"}


class Router(RouterModule):
    """Base of all routers. A subclass gives `route`, and `make_parameters` where it has other
    parameters than `weight_ED`.

    Routing is computed in float32 whatever the layer's dtype and outside autocast (float64 for a
    float64 input).

    Attributes:
        fixed_k: experts a token where the router has no choice; None: `router.top_k`, which a call
            may override.
        only_noisy: losses that exist only where noise was added.
        comm: ranks that hold the experts.
    """

    fixed_k: int | None = None
    own_losses: frozenset[str] = frozenset({"load_importance"})
    only_noisy: frozenset[str] = frozenset({"load_importance", "noisy_load"})

    def __init__(self, config: MoEConfig, *, comm: Comm | None = None,
                 host: HostContext = HostContext(), dtype: torch.dtype | None = None,
                 device: Any = None) -> None:
        super().__init__(host)
        self.config, self.num_experts, self.model_dim = config.router, config.num_experts, config.model_dim
        self.comm: Comm = comm if comm is not None else LocalComm()
        self.loss_names = [name for name, weight in config.losses.items() if weight > 0]
        self._check_losses()
        self.needs = self.needs | {
            NEEDS_OF_LOSSES[name] for name in self.loss_names if name in NEEDS_OF_LOSSES
        }
        penalty_E = link_penalties(config, self.comm) if "ta_moe" in self.loss_names else None
        self.register_buffer("penalty_E", None if penalty_E is None else penalty_E.to(device),
                             persistent=False)
        self.register_buffer("step_load_E",
                             torch.zeros(config.num_experts + 1, dtype=torch.int64, device=device),
                             persistent=False)
        self.make_parameters(dtype, device)
        self.reset_parameters()

    @property
    def batch_comm(self) -> Comm:
        """All data-parallel ranks, whose tokens make up the batch of a step."""
        return self.comm if self.host.batch_comm is None else self.host.batch_comm

    def _check_losses(self) -> None:
        for name in self.loss_names:
            losses.get(name)
            if name in ("load_importance", "noisy_load") and name not in self.own_losses:
                raise ValueError(
                    f"losses.{name} cannot be used with this router ({type(self).__name__}): must "
                    "be 0; noisy_load belongs to router "
                    "noisy_topk, load_importance to routers that add router.noise")

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        # half() and bfloat16() are for parameters: biases that move by 0.001 would stand still
        kept = {
            name: buffer for name, buffer in self.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }
        super()._apply(fn, recurse)
        for name, before in kept.items():
            setattr(self, name, before.to(getattr(self, name).device))
        return self

    def make_parameters(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create the parameters; here one linear map without bias, `weight_ED`."""
        self.weight_ED = nn.Parameter(
            torch.empty(self.num_experts, self.model_dim, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Xavier uniform, as a linear map from D to E."""
        if hasattr(self, "weight_ED"):
            xavier_(self.weight_ED)

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """Route tokens.

        Args:
            x_TD: tokens, any float dtype.
            mask_T: bool, True = real token; None: all are real.
            top_k: experts a token for this call; None: the configured number.
            info: what else is known of the tokens; see `needs`.
        Raises:
            ValueError: top_k outside 1..E, or other than the router's fixed number; something of
                `needs` is missing.
        """
        k = self._number(top_k)
        info = info or TokenInfo()
        self._check_info(info)
        # padding may hold anything, also NaN, which no factor of 0 takes out of a sum
        if mask_T is not None:
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        real_T = mask_T if mask_T is not None else x_TD.new_ones(x_TD.shape[0], dtype=torch.bool)
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.route(x_TD, real_T, k, info)

    def route(self, x_TD: Tensor, mask_T: Tensor, k: int, info: TokenInfo) -> Routing:
        """Decide; the arguments are complete and checked."""
        raise NotImplementedError

    def _number(self, top_k: int | None) -> int:
        if self.fixed_k is not None:
            if top_k not in (None, self.fixed_k):
                raise ValueError(
                    f"top_k={top_k} is out of bounds: must be {self.fixed_k} with "
                    f"{type(self).__name__}; pass None or use router topk"
                )
            return self.fixed_k
        k = self.config.top_k if top_k is None else top_k
        if not 1 <= k <= self.num_experts:
            raise ValueError(
                f"top_k={k} is out of bounds: must be in 1..num_experts={self.num_experts}; pass "
                "another top_k"
            )
        return k

    def _check_info(self, info: TokenInfo) -> None:
        if "token_ids" in self.needs and info.token_ids_T is None:
            raise ValueError(
                f"token_ids_T=None does not fit {type(self).__name__}: must be the vocabulary "
                "index of each token; "
                "pass info=TokenInfo(token_ids_T=...) to the layer")
        if "sequences" in self.needs and info.sequence_T is None:
            raise ValueError(
                "sequence_T=None does not fit losses.sequence: must be the sequence of each token; "
                "pass info=TokenInfo(sequence_T=..., sequences=...) to the layer")

    def logits(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """(logits_TE without noise, with noise), in float32 or float64."""
        clean_TE = self.clean_logits(
            self.jittered(x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))))
        scale = self.noise_scale()
        return (clean_TE, clean_TE + torch.randn_like(clean_TE) * scale) if scale else (clean_TE,
                                                                                        clean_TE)

    def clean_logits(self, x_TD: Tensor) -> Tensor:
        """Score of each expert before noise; x_TD is float32 or float64."""
        return F.linear(x_TD, self.weight_ED.to(x_TD.dtype))

    def jittered(self, x_TD: Tensor) -> Tensor:
        """In training, x times U[1-j, 1+j]."""
        jitter = self.config.input_jitter if self.training else 0.0
        return x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter) if jitter else x_TD

    def noise_scale(self) -> float:
        """Standard deviation of the noise on the logits."""
        return self.config.noise / self.num_experts if self.training else 0.0

    def normalized(self, weights_TK: Tensor) -> Tensor:
        """Divided by their sum over the choices, where settings say so."""
        if weights_TK.shape[1] == 1 or self.config.normalize != "before_drop":
            return weights_TK
        return weights_TK / weights_TK.sum(
            1, keepdim=True).clamp(min=torch.finfo(weights_TK.dtype).eps)

    def loss_inputs(self, chosen_TK: Tensor, mask_T: Tensor, info: TokenInfo, *, logits_TE: Tensor,
             probs_TE: Tensor, clean_probs_TE: Tensor | None = None, **more: Any) -> LossInputs:
        """What the losses see of a call."""
        step_load_E = None
        # recorded, because a recomputation must see the same load
        if "global_batch" in self.loss_names:
            step_load_E = self.replayed(lambda: self._count_step(chosen_TK, mask_T))
        return LossInputs(logits_TE, probs_TE,
                          probs_TE if clean_probs_TE is None else clean_probs_TE, chosen_TK, mask_T,
                          self.noise_scale(), self.host.loss_comm, sequence_T=info.sequence_T,
                          sequences=info.sequences, penalty_E=self.penalty_E,
                          step_load_E=step_load_E, **more)

    def _count_step(self, chosen_TK: Tensor, mask_T: Tensor) -> Tensor:
        mine_E = torch.cat([expert_load(chosen_TK, self.num_experts, mask_T), mask_T.sum()[None]])
        all_E = self.batch_comm.all_reduce(mine_E)
        if not self.training:
            return all_E
        total_E = self.step_load_E + all_E
        if not inside_backward():
            self.step_load_E = total_E
        return total_E

    def finish(self, inputs: LossInputs, ids_TK: Tensor, weights_TK: Tensor, priority_T: Tensor,
               passthrough_T: Tensor | None = None) -> Routing:
        """The `Routing`: padding tokens go nowhere, weights are scaled, losses and entropy
        computed.
        """
        ids_TK = ids_TK.masked_fill(~inputs.mask_T[:, None], -1)
        return Routing(ids_TK=ids_TK, weights_TK=weights_TK * self.config.scaling * (ids_TK >= 0),
                       priority_T=priority_T, losses=self.losses_of(inputs), entropy=inputs.entropy(),
                       tokens=inputs.mask_T.sum(),
                       passthrough_T=None if passthrough_T is None else passthrough_T * inputs.mask_T,
                       )

    def losses_of(self, inputs: LossInputs) -> dict[str, Tensor]:
        """The configured losses of a call; those that are defined by a noise only where there is
        one.
        """
        noisy = inputs.noise or inputs.margin_TE is not None
        return {
            name: losses.get(name)(inputs) for name in self.loss_names
            if noisy or name not in self.only_noisy
        }

    def finish_step(self) -> None:
        """After an optimizer step, on all ranks; see `moe_plugin.routing.finish_step`."""
        self.step_load_E = torch.zeros_like(self.step_load_E)


def xavier_(weight_ED: Tensor) -> None:
    """Xavier uniform, drawn in float32."""
    bound = (6 / sum(weight_ED.shape)) ** 0.5
    with torch.no_grad():
        weight_ED.copy_(torch.empty(weight_ED.shape, dtype=torch.float32).uniform_(-bound, bound))


def first_choice_priority(scores_TE: Tensor) -> Tensor:
    """Priority under batch-prioritised capacity: the best score."""
    return scores_TE.detach().amax(1)
