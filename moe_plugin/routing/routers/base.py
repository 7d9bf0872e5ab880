"""`Router`: what all routers share, from logits in float32 to the finished `Routing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.local import LocalComm
from moe_plugin.config import MoEConfig
from moe_plugin.config.options import check
from moe_plugin.dtensors import fill_
from moe_plugin.kernels.derivatives import transformed
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.scores import linear_scores
from moe_plugin.records import CountedChoices, HostContext, Routing, TokenInfo
from moe_plugin.routing.contract import BuffersKeepDtype, RouterModule
from moe_plugin.routing.links import link_penalties
from moe_plugin.routing.losses import FUSED, LossInputs, losses
from moe_plugin.routing.replay import inside_backward
from moe_plugin.routing.token_values import check_integers, check_range

NEEDS_OF_LOSSES = {"sequence": "sequences"}


class Router(BuffersKeepDtype, RouterModule):
    """Base of the provided routers: a subclass defines `route`.

    It also defines `build` if it has parameters or buffers other than `weight_ED`. Routing is
    computed in float32 for any dtype of the layer, outside autocast (in float64 for a float64
    input). With `router.fp32` parameters are at least float32, too: whatever lowers the model
    (`half()`, `to(dtype)`, a host) leaves them.

    Attributes:
        fixed_k: experts per token if the router has no choice; None: `router.top_k`, which a call
            may override.
        own_losses: losses that this router can compute and some others cannot.
        only_noisy: losses that exist only if noise was added.
        needs_mask: `route` gets a mask where all tokens are real, too; False: None there.
        one_pass: declares that `kernels.route` computes what this class would compute step by step;
            every class says so for itself, because a subclass may change a step.
        layer_config: settings of the layer.
        config: their section `router`.
        comm: ranks that hold the experts.
        weight_ED: the linear map from tokens to scores; None: the router has another one, or none.
        adapted: an adapter trains it, see `note_adapter`.
    """

    fixed_k: int | None = None
    own_losses: frozenset[str] = frozenset({"load_importance", "tutel_load_importance"})
    only_noisy: frozenset[str] = own_losses | {"noisy_load"}
    needs_mask: bool = True
    one_pass: bool = False
    adapted: bool = False

    def __init__(self, config: MoEConfig, *, comm: Comm | None = None,
                 host: HostContext = HostContext(), dtype: torch.dtype | None = None,
                 device: Any = None) -> None:
        super().__init__(host)
        self.layer_config, self.config = config, config.router
        self.num_experts, self.model_dim = config.num_experts, config.model_dim
        self.comm: Comm = comm if comm is not None else LocalComm()
        check(self.fixed_k is None or self.fixed_k <= self.num_experts, "num_experts",
              self.num_experts, f">= {self.fixed_k} with {type(self).__name__}",
              "raise num_experts, or use router.name=topk")
        self.loss_names = [name for name, weight in config.losses.items() if weight > 0]
        self._check_losses()
        self.needs = self.needs | {
            NEEDS_OF_LOSSES[name] for name in self.loss_names if name in NEEDS_OF_LOSSES
        }
        self.register_parameter("weight_ED", None)
        if self.config.fp32:
            dtype = _at_least_float32(dtype or torch.get_default_dtype())
        if torch.empty(0, device=device).is_meta:
            with torch.device("cpu"):  # also where `torch.device("meta")` is in force
                self._build(dtype, "cpu")
            self._parameters_to_meta()
        else:
            self._build(dtype, device)
        self.reset_parameters()

    @property
    def divides(self) -> bool:
        """Whether weights are divided by their sum before anything is dropped."""
        return self.config.normalize in ("auto", "before_drop")

    @property
    def batch_comm(self) -> Comm:
        """All data-parallel ranks, whose tokens make up the batch of a step."""
        return self.comm if self.host.batch_comm is None else self.host.batch_comm

    def _check_losses(self) -> None:
        for name in self.loss_names:
            losses.get(name)
            if name in Router.only_noisy and name not in self.own_losses:
                raise ValueError(
                    f"losses.{name} cannot be used with this router ({type(self).__name__}): must "
                    "be 0; noisy_load belongs to router noisy_topk, load_importance and "
                    "tutel_load_importance to routers that add router.noise")

    @property
    def keeps_parameters(self) -> bool:  # type: ignore[override]
        """See `BuffersKeepDtype`."""
        return self.config.fp32

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        return super()._apply(_keep_float32(fn) if self.keeps_parameters else fn, recurse)

    def _build(self, dtype: torch.dtype | None, device: Any) -> None:
        penalty_E = link_penalties(self.layer_config, self.comm) \
            if "ta_moe" in self.loss_names else None
        self.register_buffer("penalty_E", None if penalty_E is None else penalty_E.to(device),
                             persistent=False)
        self.register_buffer("step_load_E",
                             torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device),
                             persistent=False)
        self.build(dtype, device)

    def _parameters_to_meta(self) -> None:
        """Buffers stay: what they hold (costs of links, tables, biases) is not drawn again."""
        for name, parameter in self.named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create parameters and buffers, and check settings.

        Here: one linear map without bias, `weight_ED`.
        """
        self.weight_ED = nn.Parameter(
            torch.empty(self.num_experts, self.model_dim, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Draw `weight_ED` from the Xavier uniform distribution of a linear map from D to E."""
        if self.weight_ED is not None:
            xavier_(self.weight_ED)

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """Route tokens: check the call, then `route`; arguments as of `RouterModule.forward`.

        Raises:
            ValueError: top_k outside 1..E, or other than the router's fixed number; a part of
                `needs` is missing or does not fit.
        """
        k = self._number(top_k)
        info = info or TokenInfo()
        self._check_info(info, x_TD.shape[0])
        # padding may be NaN, which a factor of 0 does not remove from a sum
        if mask_T is not None:
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        elif self.needs_mask:
            mask_T = x_TD.new_ones(x_TD.shape[0], dtype=torch.bool)
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.route(x_TD, mask_T, k, info)

    def route(self, x_TD: Tensor, mask_T: Tensor | None, k: int, info: TokenInfo) -> Routing:
        """Decide. The arguments are those of `forward`, checked, and complete but for `needs_mask`.
        """
        raise NotImplementedError

    def _number(self, top_k: int | None) -> int:
        if self.fixed_k is not None:
            if top_k not in (None, self.fixed_k):
                raise ValueError(
                    f"top_k={top_k} is out of bounds: must be {self.fixed_k} with "
                    f"{type(self).__name__}; pass None or use router topk")
            return self.fixed_k
        k = self.config.top_k if top_k is None else top_k
        if not 1 <= k <= self.num_experts:
            raise ValueError(f"top_k={k} is out of bounds: must be in "
                             f"1..num_experts={self.num_experts}; pass another top_k")
        return k

    def _check_info(self, info: TokenInfo, tokens: int) -> None:
        if "token_ids" in self.needs and info.token_ids_T is None:
            raise ValueError(
                f"token_ids_T=None does not fit {type(self).__name__}: must be the vocabulary "
                "index of each token; pass info=TokenInfo(token_ids_T=...) to the layer")
        if "sequences" in self.needs:
            _check_sequences(info, tokens)

    def logits(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, E] without and with noise, in float32 or float64."""
        clean_TE = self.clean_logits(self.jittered(x_TD))
        scale = self.noise_scale()
        if not scale:
            return clean_TE, clean_TE
        return clean_TE, clean_TE + torch.randn_like(clean_TE) * scale

    def softmax_scores(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy logits, their softmax, and the softmax of the logits without noise, each [T, E]."""
        clean_TE, logits_TE = self.logits(x_TD)
        probs_TE = F.softmax(logits_TE, dim=1)
        return logits_TE, probs_TE, F.softmax(clean_TE, dim=1) if self.noise_scale() else probs_TE

    def clean_logits(self, x_TD: Tensor) -> Tensor:
        """Score of each expert before noise, [T, E], in float32 or float64; x_TD: of any dtype."""
        return linear_scores(x_TD, self.weight_ED)

    def jittered(self, x_TD: Tensor) -> Tensor:
        """In training, x_TD times U[1-j, 1+j], at least in float32; x_TD itself without jitter."""
        jitter = self.config.input_jitter if self.training else 0.0
        if not jitter:
            return x_TD
        x_TD = x_TD.to(accumulate_dtype(x_TD.dtype))
        return x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter)

    def noise_scale(self) -> float:
        """Standard deviation of the noise on the logits."""
        return self.config.noise / self.num_experts if self.training else 0.0

    def normalized(self, weights_TK: Tensor) -> Tensor:
        """Weights divided by their sum over the choices, where the router `divides`."""
        return shares(weights_TK) if weights_TK.shape[1] > 1 and self.divides else weights_TK

    def _fuses(self) -> bool:
        """Whether one kernel can do it all: losses need no score of a single token, and the class
        itself, not a base of it, declares that it changes none of the steps.
        """
        if not vars(type(self)).get("one_pass", False):
            return False
        noisy = self.noise_scale()
        for name in self.loss_names:
            if name not in FUSED and (noisy or name not in self.only_noisy):
                return False
        # torch.compile fuses single steps itself: topk with its losses becomes as many loops, give
        # or take one, as the pass does (torch 2.13 on CPU). And torch 2.6 cannot trace the pass,
        # whose autograd function calls `set_materialize_grads`
        return not torch.compiler.is_compiling() and not transformed()

    def loss_inputs(self, chosen_TK: Tensor, mask_T: Tensor | None, info: TokenInfo, *,
                    logits_TE: Tensor, probs_TE: Tensor, clean_probs_TE: Tensor | None = None,
                    **more: Any) -> LossInputs:
        """What the losses read of a call; see `LossInputs`.

        Args:
            chosen_TK: int64, chosen experts, -1: none.
            mask_T: bool, True = real token; None: all are.
            info: of the call.
            logits_TE, probs_TE: noisy logits, and scores whose rows sum to 1.
            clean_probs_TE: scores without noise; None: the same.
            more: other fields of `LossInputs`.
        """
        inputs = LossInputs(logits_TE, probs_TE,
                            probs_TE if clean_probs_TE is None else clean_probs_TE, chosen_TK,
                            mask_T, self.noise_scale(), self.host.loss_comm,
                            sequence_T=None if info.sequence_T is None else info.sequence_T.long(),
                            sequences=info.sequences,
                            penalty_E=self.penalty_E, **more)
        # recorded, because a recomputation must see the same load
        if "global_batch" in self.loss_names:
            inputs.step_load_E = self.replayed(
                lambda: self._count_step(inputs),
                "load of the step" if self.training else "load of the call",
                tuple(self.step_load_E.shape))
        return inputs

    def _count_step(self, inputs: LossInputs) -> Tensor:
        mine_E = torch.cat([inputs.own_load_KE.sum(0), inputs.own_count()[None]])
        all_E = self.batch_comm.all_reduce(mine_E)
        if not self.training:
            return all_E
        total_E = self.step_load_E + all_E
        if not inside_backward():
            self.step_load_E = total_E
        return total_E

    def finish(self, inputs: LossInputs, ids_TK: Tensor, weights_TK: Tensor,
               priority_T: Tensor | None, passthrough_T: Tensor | None = None) -> Routing:
        """The `Routing`: padding goes nowhere, weights are scaled, losses and entropy computed.

        Args:
            inputs: of the losses.
            ids_TK, weights_TK, priority_T, passthrough_T: see `Routing`.
        """
        mask_T, chosen = inputs.mask_T, ids_TK is inputs.ids_TK
        if self.config.scaling != 1.0:
            weights_TK = weights_TK * self.config.scaling
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T[:, None], -1)
        complete = chosen and inputs.complete
        if not complete:
            weights_TK = weights_TK * (ids_TK >= 0)
        return Routing(ids_TK=ids_TK, weights_TK=weights_TK, priority_T=priority_T,
                       losses=self.losses_of(inputs), entropy=inputs.entropy(),
                       tokens=inputs.own_count(),
                       passthrough_T=None if passthrough_T is None else inputs.real(passthrough_T),
                       counted=CountedChoices(ids_TK, inputs.own_load_KE, complete)
                       if chosen else None)

    def losses_of(self, inputs: LossInputs) -> dict[str, Tensor]:
        """The configured losses of a call; those that a noise defines only if there is one."""
        noisy = inputs.noise or inputs.margin_TE is not None
        found = {}
        for name in self.loss_names:
            if noisy or name not in self.only_noisy:
                found[name] = losses.get(name)(inputs)
        return found

    @property
    def frozen(self) -> bool:
        """Whether nothing of it is trained: then what it moves by itself (biases, temperatures)
        stays as well.
        """
        return not (self.adapted or any([p.requires_grad for p in self.parameters()]))

    def note_adapter(self) -> None:
        """Look whether an adapter trains `weight_ED`, which some (peft's) change inside of a call
        alone.
        """
        if torch.is_grad_enabled():
            self.adapted = "parametrizations" in self._modules and self.weight_ED.requires_grad

    def finish_step(self) -> None:
        """Restart the counts of `global_batch`; see `moe_plugin.routing.finish_step`."""
        self.step_load_E = torch.zeros_like(self.step_load_E)


def _check_sequences(info: TokenInfo, tokens: int) -> None:
    remedy = "pass info=TokenInfo(sequence_T=..., sequences=...) to the layer"
    sequence_T, count = info.sequence_T, info.sequences
    if sequence_T is None:
        raise ValueError("sequence_T=None does not fit losses.sequence: must be the sequence of "
                         f"each token; {remedy}")
    if count < min(1, tokens):
        raise ValueError(f"sequences={count} does not fit losses.sequence: must be their number, "
                         f">= 1; {remedy}")
    check_integers("sequence_T", sequence_T, tokens)
    check_range(sequence_T, 0, count - 1,
                "sequence_T has values {}..{}, which are out of bounds: must be in "
                f"0..sequences-1={count - 1}, padding's too; number the sequences from 0 and pass "
                "how many there are")


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _keep_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, for `Module._apply`, whose results are float32 where they would be of fewer bits."""

    def apply(tensor: Tensor) -> Tensor:
        made = fn(tensor)
        dtype = _at_least_float32(made.dtype)
        return made if made.dtype == dtype else tensor.to(made.device, dtype)

    return apply


def xavier_(weight_ED: Tensor) -> None:
    """Fill weight_ED from the Xavier uniform distribution, drawn in float32."""
    bound = (6 / sum(weight_ED.shape)) ** 0.5
    fill_(weight_ED, torch.empty(weight_ED.shape, dtype=torch.float32).uniform_(-bound, bound))


def shares(scores_TE: Tensor) -> Tensor:
    """Non-negative scores [T, E] (or [T, K]) divided by their sum over axis 1."""
    return scores_TE / scores_TE.sum(1, keepdim=True).clamp(min=torch.finfo(scores_TE.dtype).eps)


def first_choice_priority(scores_TE: Tensor) -> Tensor:
    """Priority [T] under batch-prioritised capacity: the best score of scores_TE."""
    return scores_TE.detach().amax(1)
