"""`Router`, the base class of the provided routers, which computes a `Routing` from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm, LocalComm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig
from moe_plugin.config.options import check
from moe_plugin.kernels.activations import transformed
from moe_plugin.kernels.in_blocks import ScoreInPieces, product_in_blocks
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.scores import ScoreFunction, linear_scores, score_functions
from moe_plugin.records import CountedChoices, Routing, TokenInfo
from moe_plugin.routing.call import RoutingCall
from moe_plugin.routing.contract import BuffersKeepDtype, RouterModule, TopKSchedule
from moe_plugin.routing.counting import add_counts
from moe_plugin.routing.links import link_penalties
from moe_plugin.routing.losses import check_sequences, losses
from moe_plugin.routing.replay import runs_once
from moe_plugin.routing.rollouts import balanced
from moe_plugin.utils.machine import capturing
from moe_plugin.utils.tensors import at_least_float32, keep_float32, xavier_


class Router(BuffersKeepDtype, RouterModule):
    """Base class of the provided routers. By default, its four hooks choose the k highest scores.

    A subclass overrides some of the hooks `scores`, `select`, `weigh` and `after_choice`. A
    subclass with parameters or buffers other than `weight_ED` also overrides `build`. Regardless of
    the layer's dtype, routing is computed outside autocast in float32, or in float64 if the input
    is float64. With `router.fp32`, the parameters stay in at least float32 when the user or a host
    framework casts the model (`half()`, `to(dtype)`).

    Attributes:
        own_losses: names of the losses that this router can compute but some other routers cannot.
        only_noisy: names of the losses that are defined only if noise was added to the logits.
        adds_noise: True if `router.noise` is added to the logits.
        leaves_none: True if `select` always chooses k experts and never returns -1. A class that
            overrides `select` must redeclare `leaves_none`.
        multiplies_in_blocks: True if the router has no matmuls other than those in `Router.scores`.
        score: function that converts logits to scores.
        noise: standard deviation of the noise added to the logits in training.
        divides: True if weights are divided by their sum before choices are dropped.
        divides_one: True if weights are also divided when a token has only one choice.
        layer_config: configuration of the layer.
        config: section `router` of the layer's configuration.
        comm: group of ranks that store the experts.
        weight_ED: weight matrix of the linear map from tokens to logits, or None if there is none.
        logit_bias_E: learned bias of the logits (`router.bias`), or None.
        adapted: True if an adapter trains the router; see `note_adapter`.
        forced: optional callable that replaces `select`. The callable returns expert ids, int64 [T,
            K], or None to fall back to `select`. Its attribute `balances_best`, if it exists, sets
            the field of the same name of `RoutingCall`. See `moe_plugin.routing.rollouts`.
    """

    own_losses: frozenset[str] = frozenset({"load_importance", "tutel_load_importance"})
    only_noisy: frozenset[str] = own_losses | {"noisy_load"}
    adds_noise: bool = True
    leaves_none: bool = True
    adapted: bool = False
    multiplies_in_blocks: bool = True
    penalty_E: Tensor | None
    step_load_E: Tensor

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "select" in vars(cls) and "leaves_none" not in vars(cls):
            cls.leaves_none = False

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
        self.score: ScoreFunction = score_functions.get(self.score_name)()
        if config.batch_invariant:
            check(self.multiplies_in_blocks and "force" in (self.reads or ()), "batch_invariant",
                  True, f"False with {type(self).__name__}",
                  "the choice may depend on other tokens, so use router.name=topk")
            self.score = ScoreInPieces(self.score)
        self.noise = self.config.noise / self.num_experts if self.adds_noise else 0.0
        self.divides_one = self.config.normalize == "always"
        self.divides = self.config.normalize in ("auto", "before_drop", "always")
        self.forced: Callable[[RoutingCall], Tensor | None] | None = (
            balanced if self.config.force == "balance" else None)
        self.losses = {name: losses.get(name)
                       for name, weight in config.losses.items() if weight > 0}
        self._check_losses()
        needs = self.needs
        for loss in self.losses.values():
            needs = needs.union(getattr(loss, "needs", ()))
        self.needs = needs
        self.register_parameter("weight_ED", None)
        self.register_parameter("logit_bias_E", None)
        if self.config.fp32:
            dtype = at_least_float32(dtype or torch.get_default_dtype())
        if torch.empty(0, device=device).is_meta:
            with torch.device("cpu"):  # overrides an active `torch.device("meta")` context
                self._build(dtype, "cpu")
            # not the buffers, which could not be restored
            for name, parameter in self.named_parameters(recurse=False):
                setattr(self, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))
        else:
            self._build(dtype, device)
        self.reset_parameters()

    @property
    def score_name(self) -> str:
        return self.config.score

    @property
    def batch_comm(self) -> Comm:
        """Group of all data-parallel ranks, whose tokens together form the batch of a step."""
        return self.comm if self.host.batch_comm is None else self.host.batch_comm

    @property
    def step_comm(self) -> Comm:
        """Group of all ranks whose counts are summed at the end of a step."""
        return self.host.batch_comm or self.all_ranks or self.comm

    def _check_losses(self) -> None:
        for name in self.losses:
            if name in Router.only_noisy and name not in self.own_losses:
                raise ValueError(
                    f"losses.{name} cannot be used with {type(self).__name__}. Set its weight to "
                    "0. noisy_load requires router noisy_topk; load_importance and "
                    "tutel_load_importance require a router that adds router.noise.")

    @property
    def keeps_parameters(self) -> bool:  # type: ignore[override]
        return self.config.fp32

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        return super()._apply(keep_float32(fn) if self.keeps_parameters else fn, recurse)

    def _build(self, dtype: torch.dtype | None, device: Any) -> None:
        penalty_E = link_penalties(self.layer_config, self.comm) \
            if "ta_moe" in self.losses else None
        self.register_buffer("penalty_E", None if penalty_E is None else penalty_E.to(device),
                             persistent=False)
        self.register_buffer("step_load_E",
                             torch.zeros(self.num_experts + 1, dtype=torch.int64, device=device),
                             persistent=False)
        changes = self.config.top_k_at if self.fixed_k is None and self.reads_top_k else {}
        self.schedule = TopKSchedule(self.config.top_k, changes, device) if changes else None
        self.build(dtype, device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if self.schedule is None:  # the checkpoint may come from a run with a schedule
            state_dict.pop(f"{prefix}schedule.now", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create `weight_ED` and `logit_bias_E`. Subclasses may create additional tensors."""
        self.weight_ED = nn.Parameter(
            torch.empty(self.num_experts, self.model_dim, dtype=dtype, device=device))
        if self.config.bias:
            self.logit_bias_E = nn.Parameter(
                torch.empty(self.num_experts, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Initialize the parameters. A subclass with other parameters overrides this method."""
        if self.weight_ED is not None:
            xavier_(self.weight_ED)
        if self.logit_bias_E is not None:
            nn.init.zeros_(self.logit_bias_E)

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """Route tokens. The arguments are those of `RouterModule.forward`.

        Raises:
            ValueError: If `top_k` is not in 1..E or differs from the router's fixed number, or if
                required token information is missing or invalid.
        """
        k = self.top_k if top_k is None else self._checked(top_k)
        call = RoutingCall(
            mask_T=mask_T, k=k,
            info=info or TokenInfo(), noise=self.noise if self.training else 0.0,
            score=self.score, divides=self.divides and (k > 1 or self.divides_one),
            added=self.config.normalize_add, least=self.config.normalize_min,
            one_pass=self.one_pass(),
            reads_z="z" in self.losses, leaves_none=self.leaves_none,
            replays_whole=type(self).leaves_none,
            balances_best=getattr(self.forced, "balances_best", False),
            comm=self.host.loss_comm, penalty_E=self.penalty_E)
        if self.needs:
            self._check_info(call.info, x_TD.shape[0])
        if mask_T is not None:  # padding may be NaN, and NaN * 0 would spoil the sums over tokens
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        if self.training and (self.config.input_jitter or self.config.input_dropout):
            x_TD = self._disturbed(x_TD)
        if not torch.is_autocast_enabled(x_TD.device.type):
            return self.route(x_TD, call)
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.route(x_TD, call)

    def route(self, x_TD: Tensor, call: RoutingCall) -> Routing:
        """Call the four hooks in order. x_TD: tokens after jitter and dropout. Padding tokens are
        0.
        """
        call.logits_TE = self.scores(x_TD, call)
        choices = self.num_experts if self.any_number else call.k
        select = self.select if self.forced is None else self._forced
        if torch.compiler.is_compiling() or runs_once(self.training):
            call.ids_TK = select(call)
        else:
            call.ids_TK = self.replayed(lambda: select(call), shape=(x_TD.shape[0], choices))
        weights_TK = self.weigh(call, call.ids_TK)
        # Recorded, because a recomputation must use the load of the first pass.
        if "global_batch" in self.losses:
            call.step_load_E = self.replayed(
                lambda: self._count_step(call),
                "load of the step" if self.training else "load of the call",
                tuple(self.step_load_E.shape))
        return self._finish(call, self.after_choice(call, weights_TK), weights_TK)

    def _forced(self, call: RoutingCall) -> Tensor:
        assert self.forced is not None
        ids_TK = self.forced(call)
        if ids_TK is None:
            return self.select(call)
        if call.routed is not None and call.routed.ids_TK is ids_TK:
            return ids_TK  # chosen by `select`, which `forced` called
        return call.choose(ids_TK)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Hook that returns the logits [T, E] in float32 or float64. The default implementation
        uses `weight_ED` and `router.noise`.

        If the scores are not the score function applied to the logits, the hook must also set
        `call.scores_TE`.

        Args:
            x_TD: tokens of any floating-point dtype.
            call: data of the call. The fields `mask_T`, `k`, `info` and `noise` are already set.
        """
        if self.layer_config.batch_invariant:
            dtype = accumulate_dtype(x_TD.dtype)
            logits_TE = product_in_blocks(x_TD.to(dtype), self.weight_ED.to(dtype).T)
        else:
            logits_TE = linear_scores(x_TD, self.weight_ED)
        if self.logit_bias_E is not None:
            logits_TE = logits_TE + self.logit_bias_E
        return self.noisy(logits_TE, call) if call.noise else logits_TE

    def select(self, call: RoutingCall) -> Tensor:
        """Hook that returns the chosen experts, int64 [T, K]. A value of -1 means that the choice
        has no expert. The default implementation chooses the k largest scores. Among equal scores,
        it chooses the expert with the lower index. Recomputations and replays reuse earlier choices
        without calling this hook.
        """
        return call.choose()

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Hook that returns the weights [T, K] of the chosen experts. The weights require
        gradients. The default implementation returns the scores of the chosen experts. If
        `router.normalize` requires it, the scores are divided by their sum.
        """
        return call.weights_of(ids_TK)

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Hook that returns the final choices, int64 [T, K], and may drop some of `call.ids_TK`.

        weights_TK: weights returned by `weigh`.
        """
        return call.ids_TK

    @property
    def top_k(self) -> int:
        """Default number of experts per token, for calls that do not pass `top_k`."""
        if self.schedule is not None:
            check(not capturing(self.schedule.now.device), "router.top_k_at", self.config.top_k_at,
                  "empty in a CUDA graph, which repeats one number of experts",
                  "leave it out, or do not capture the layer")
            return self.schedule.k
        return self.config.top_k if self.fixed_k is None else self.fixed_k

    def _checked(self, top_k: int) -> int:
        if self.fixed_k is not None and top_k != self.fixed_k:
            raise ValueError(f"top_k={top_k} cannot be used with {type(self).__name__}, which "
                             f"always chooses {self.fixed_k}. Pass None, or use router topk.")
        if not 1 <= top_k <= self.num_experts:
            raise ValueError(f"top_k={top_k} is out of range. It must be between 1 and "
                             f"num_experts={self.num_experts}.")
        return top_k

    def _check_info(self, info: TokenInfo, tokens: int) -> None:
        if "token_ids" in self.needs and info.token_ids_T is None:
            raise ValueError(
                f"Router {type(self).__name__} needs the vocabulary index of each token, but "
                "token_ids_T=None. Pass info=TokenInfo(token_ids_T=...) to the layer.")
        if "sequences" in self.needs:
            check_sequences(info, tokens)

    def noisy(self, clean_TE: Tensor, call: RoutingCall) -> Tensor:
        if not call.noise:
            return clean_TE
        call.clean_TE = clean_TE
        return clean_TE + torch.randn_like(clean_TE) * call.noise

    def _disturbed(self, x_TD: Tensor) -> Tensor:
        """Apply dropout to `x_TD`, and multiply it by random numbers from U[1-j, 1+j], in at least
        float32.

        Both operations use the device's default random generator. For the recomputation, an
        activation checkpoint restores the state of the random generator. On ranks with the same
        tokens, the generator has the same state.
        Source: Switch Transformers (Fedus et al., 2021), the exploration strategies "input dropout"
        and "input jitter".
        """
        jitter, dropout = self.config.input_jitter, self.config.input_dropout
        x_TD = x_TD.to(accumulate_dtype(x_TD.dtype))
        if dropout:
            x_TD = nn.functional.dropout(x_TD, dropout)
        return x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter) if jitter else x_TD

    def one_pass(self) -> bool:
        """Return whether a single kernel computes the choices, the weights and the sums."""
        # torch.compile fuses the single steps: topk with its losses compiles to about as many loops
        # as the kernel has (torch 2.13 on CPU).
        return "torch" in self.score.kernels and not torch.compiler.is_compiling() \
            and not transformed()

    def _count_step(self, call: RoutingCall) -> Tensor:
        rank_load_E = torch.cat([call.balanced_load_KE().sum(0), call.own_count()[None]])
        total_load_E = self.batch_comm.all_reduce(rank_load_E)
        added_E = add_counts(
            self.step_load_E, lambda: total_load_E, self.training,
            f"The loss global_batch of {type(self).__name__} cannot be recomputed, because the "
            "load of the first pass was not recorded. Use torch.utils.checkpoint.checkpoint, and "
            "with torch.compile call it inside the compiled function: "
            "torch.compile(lambda x: checkpoint(block, x)).")
        return total_load_E if added_E is None else added_E

    def _finish(self, call: RoutingCall, ids_TK: Tensor, weights_TK: Tensor) -> Routing:
        """Drop choices of padding tokens, scale weights, and compute losses and entropy."""
        mask_T, counted = call.mask_T, ids_TK is call.ids_TK
        priority_T, passthrough_T, chosen_TK = call.priority_T, call.passthrough_T, call.chosen_TK
        if self.config.batch_prioritized and priority_T is None:
            priority_T = call.scores_TE.detach().amax(1)
        if self.config.scaling != 1.0:
            weights_TK = weights_TK * self.config.scaling
            passthrough_T = None if passthrough_T is None else passthrough_T * self.config.scaling
        if mask_T is not None:
            ids_TK = ids_TK.masked_fill(~mask_T[:, None], -1)
            passthrough_T = None if passthrough_T is None else call.real(passthrough_T)
            chosen_TK = None if chosen_TK is None else chosen_TK.masked_fill(~mask_T[:, None], -1)
        complete = counted and call.leaves_none and mask_T is None
        if not complete:
            weights_TK = weights_TK * (ids_TK >= 0)
        return Routing(ids_TK=ids_TK, weights_TK=weights_TK, priority_T=priority_T,
                       losses=self.losses_of(call), entropy=call.entropy(),
                       tokens=call.own_count(), passthrough_T=passthrough_T, chosen_TK=chosen_TK,
                       counted=CountedChoices(ids_TK, call.own_load_KE, complete)
                       if counted else None)

    def losses_of(self, call: RoutingCall) -> dict[str, Tensor]:
        """Return the configured losses. Without noise, losses that need noise are omitted."""
        noisy = call.noise or call.deviation_TE is not None
        values = {}
        for name, loss in self.losses.items():
            if noisy or name not in self.only_noisy:
                values[name] = loss(call)
        return values

    @property
    def frozen(self) -> bool:
        """True if no parameter is trained. Frozen biases and temperatures do not change."""
        return not (self.adapted or any([p.requires_grad for p in self.parameters()]))

    def note_adapter(self) -> None:
        """Record whether an adapter trains `weight_ED`, which is visible only during a call."""
        if torch.is_grad_enabled():
            self.adapted = "parametrizations" in self._modules and self.weight_ED.requires_grad

    def finish_step(self) -> None:
        """Reset the counts; see `moe_plugin.routing.finish_step`."""
        self.forget_step()

    def forget_step(self) -> None:
        """Reset the counts used by `global_batch` and by `step_sums`."""
        for sums in (self.step_load_E, *self.step_sums()):
            sums.zero_()
