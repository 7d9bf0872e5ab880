"""`Router`: what all routers share, from logits in float32 to the finished `Routing`."""

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
from moe_plugin.routing.call import RoutingCall, check_integers, check_range
from moe_plugin.routing.contract import BuffersKeepDtype, RouterModule, TopKSchedule
from moe_plugin.routing.links import link_penalties
from moe_plugin.routing.losses import losses
from moe_plugin.routing.replay import counts, runs_once
from moe_plugin.routing.rollouts import balanced
from moe_plugin.utils.dtensors import fill_
from moe_plugin.utils.machine import capturing, inside_backward

# settings (`RouterModule.reads`) of routers that score tokens, choose more than one expert of each,
# weigh by a score function, and may drop a second expert
SCORED = frozenset({"noise", "input_jitter", "input_dropout", "batch_prioritized"})
SEVERAL = SCORED | {"normalize=after_drop", "normalize_add", "normalize_min"}
BY_SCORE = SEVERAL | {"score", "normalize=before_drop", "normalize=always"}
LINEAR = frozenset({"bias"})  # whose logits are `Router.scores`
FORCED = frozenset({"force"})  # whose choice may be replaced by another of as many experts
WITH_POLICY = BY_SCORE | {"second_expert_policy", "second_expert_policy=random"}
NEEDS_OF_LOSSES = {"sequence": "sequences"}


class Router(BuffersKeepDtype, RouterModule):
    """Base of the provided routers: k experts of the largest scores, by four hooks.

    A subclass changes the hooks `scores`, `select`, `weigh`, `after_choice`, and `build` if it has
    parameters or buffers other than `weight_ED`. Routing is computed in float32 for any dtype of
    the layer, outside autocast (in float64 for a float64 input). With `router.fp32` parameters are
    at least float32, too: whatever lowers the model (`half()`, `to(dtype)`, a host) leaves them.

    Attributes:
        own_losses: losses that this router can compute and some others cannot.
        only_noisy: losses that exist only if noise was added.
        adds_noise: `router.noise` is added to the logits.
        leaves_none: declares that `select` gives each token k experts, none of them -1; a class
            with a `select` of its own that does not say so may leave choices empty.
        multiplies_in_blocks: all its matmuls are those of `Router.scores`.
        score: the score function.
        noise: standard deviation of the logits' noise in training.
        divides: weights are divided by their sum before anything is dropped.
        divides_one: that of a single choice, too.
        layer_config: settings of the layer.
        config: their section `router`.
        comm: ranks that hold the experts.
        weight_ED: the linear map from tokens to logits; None: the router has another one, or none.
        logit_bias_E: its learned bias (`router.bias`); None: it has none.
        adapted: an adapter trains it, see `note_adapter`.
        forced: gives the experts of each token, int64 [T, K], in place of `select`; or None, and
            `select` does. None: nothing does (see `moe_plugin.routing.rollouts`).
    """

    own_losses: frozenset[str] = frozenset({"load_importance", "tutel_load_importance"})
    only_noisy: frozenset[str] = own_losses | {"noisy_load"}
    adds_noise: bool = True
    leaves_none: bool = True
    adapted: bool = False
    multiplies_in_blocks: bool = True

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
                  "its choice may depend on other tokens: use router.name=topk")
            self.score = ScoreInPieces(self.score)
        self.noise = self.config.noise / self.num_experts if self.adds_noise else 0.0
        self.divides_one = self.config.normalize == "always"
        self.divides = self.config.normalize in ("auto", "before_drop", "always")
        self.forced: Callable[[RoutingCall], Tensor | None] | None = (
            balanced if self.config.force == "balance" else None)
        self.losses = {name: losses.get(name)
                       for name, weight in config.losses.items() if weight > 0}
        self._check_losses()
        self.needs = self.needs | {
            NEEDS_OF_LOSSES[name] for name in self.losses if name in NEEDS_OF_LOSSES
        }
        self.register_parameter("weight_ED", None)
        self.register_parameter("logit_bias_E", None)
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
    def score_name(self) -> str:
        """Name of the score function."""
        return self.config.score

    @property
    def batch_comm(self) -> Comm:
        """All data-parallel ranks, whose tokens make up the batch of a step."""
        return self.comm if self.host.batch_comm is None else self.host.batch_comm

    @property
    def step_comm(self) -> Comm:
        """Ranks whose counts add up at the end of a step, other expert-parallel groups included."""
        return self.host.batch_comm or self.all_ranks or self.comm

    def _check_losses(self) -> None:
        for name in self.losses:
            if name in Router.only_noisy and name not in self.own_losses:
                raise ValueError(
                    f"losses.{name} cannot be used with this router ({type(self).__name__}): must "
                    "be 0; noisy_load belongs to router noisy_topk, load_importance and "
                    "tutel_load_importance to routers that add router.noise")

    @property
    def keeps_parameters(self) -> bool:  # type: ignore[override]
        return self.config.fp32

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        return super()._apply(_keep_float32(fn) if self.keeps_parameters else fn, recurse)

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
        if self.schedule is None:  # of a run that had one
            state_dict.pop(f"{prefix}schedule.now", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _parameters_to_meta(self) -> None:
        """Buffers stay: what they hold (costs of links, tables, biases) is not drawn again."""
        for name, parameter in self.named_parameters(recurse=False):
            setattr(self, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))

    def build(self, dtype: torch.dtype | None, device: Any) -> None:
        """Create parameters and buffers, and check settings.

        Here: one linear map, `weight_ED` and, with `router.bias`, `logit_bias_E`.
        """
        self.weight_ED = nn.Parameter(
            torch.empty(self.num_experts, self.model_dim, dtype=dtype, device=device))
        if self.config.bias:
            self.logit_bias_E = nn.Parameter(
                torch.empty(self.num_experts, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Draw `weight_ED` from the Xavier uniform distribution of a linear map from D to E; the
        bias is zero.
        """
        if self.weight_ED is not None:
            xavier_(self.weight_ED)
        if self.logit_bias_E is not None:
            nn.init.zeros_(self.logit_bias_E)

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None, top_k: int | None = None,
                info: TokenInfo | None = None) -> Routing:
        """Route tokens; arguments as of `RouterModule.forward`.

        Raises:
            ValueError: top_k outside 1..E, or other than the router's fixed number; a part of
                `needs` is missing or does not fit.
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
            comm=self.host.loss_comm, penalty_E=self.penalty_E)
        if self.needs:
            self._check_info(call.info, x_TD.shape[0])
        if mask_T is not None:  # padding may be NaN, which a factor of 0 does not remove from a sum
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        if self.training and (self.config.input_jitter or self.config.input_dropout):
            x_TD = self._disturbed(x_TD)
        if not torch.is_autocast_enabled(x_TD.device.type):
            return self.route(x_TD, call)
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.route(x_TD, call)

    def route(self, x_TD: Tensor, call: RoutingCall) -> Routing:
        """The hooks in their order; x_TD: without padding's values, disturbed."""
        call.logits_TE = self.scores(x_TD, call)
        choices = self.num_experts if self.any_number else call.k
        select = self.select if self.forced is None else self._forced
        if torch.compiler.is_compiling() or runs_once(self.training):
            call.ids_TK = select(call)
        else:
            call.ids_TK = self.replayed(lambda: select(call), shape=(x_TD.shape[0], choices))
        weights_TK = self.weigh(call, call.ids_TK)
        # recorded, because a recomputation must see the same load
        if "global_batch" in self.losses:
            call.step_load_E = self.replayed(
                lambda: self._count_step(call),
                "load of the step" if self.training else "load of the call",
                tuple(self.step_load_E.shape))
        return self._finish(call, self.after_choice(call, weights_TK), weights_TK)

    def _forced(self, call: RoutingCall) -> Tensor:
        assert self.forced is not None
        ids_TK = self.forced(call)
        return self.select(call) if ids_TK is None else call.choose(ids_TK)

    def scores(self, x_TD: Tensor, call: RoutingCall) -> Tensor:
        """Hook: logits [T, E], in float32 or float64. Here: of `weight_ED`, with `router.noise`.

        A router whose scores are not the score function of these sets `call.scores_TE`, too.

        Args:
            x_TD: tokens, of any float dtype.
            call: has `mask_T`, `k`, `info`, `noise`.
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
        """Hook: the chosen experts, int64 [T, K], -1: none. Here: the k of the largest scores, ties
        to the lower index. Not called where a recomputation or a replay repeats a choice.
        """
        return call.choose()

    def weigh(self, call: RoutingCall, ids_TK: Tensor) -> Tensor:
        """Hook: the weights [T, K] of chosen experts, differentiable. Here: their scores, divided
        by their sum as `router.normalize` says.
        """
        return call.weights_of(ids_TK)

    def after_choice(self, call: RoutingCall, weights_TK: Tensor) -> Tensor:
        """Hook: what follows from a choice (`call.ids_TK`), such as counting it, and the choices
        that remain of it, int64 [T, K].

        weights_TK: as `weigh` gave them.
        """
        return call.ids_TK

    @property
    def top_k(self) -> int:
        """Experts per token of a call that gives no number."""
        if self.schedule is not None:
            check(not capturing(self.schedule.now.device), "router.top_k_at", self.config.top_k_at,
                  "empty in a CUDA graph, which repeats one number of experts",
                  "leave it out, or capture nothing of the layer")
            return self.schedule.k
        return self.config.top_k if self.fixed_k is None else self.fixed_k

    def _checked(self, top_k: int) -> int:
        if self.fixed_k is not None and top_k != self.fixed_k:
            raise ValueError(f"top_k={top_k} is out of bounds: must be {self.fixed_k} with "
                             f"{type(self).__name__}; pass None or use router topk")
        if not 1 <= top_k <= self.num_experts:
            raise ValueError(f"top_k={top_k} is out of bounds: must be in "
                             f"1..num_experts={self.num_experts}; pass another top_k")
        return top_k

    def _check_info(self, info: TokenInfo, tokens: int) -> None:
        if "token_ids" in self.needs and info.token_ids_T is None:
            raise ValueError(
                f"token_ids_T=None does not fit {type(self).__name__}: must be the vocabulary "
                "index of each token; pass info=TokenInfo(token_ids_T=...) to the layer")
        if "sequences" in self.needs:
            _check_sequences(info, tokens)

    def noisy(self, clean_TE: Tensor, call: RoutingCall) -> Tensor:
        """Logits [T, E] with the call's noise."""
        if not call.noise:
            return clean_TE
        call.clean_TE = clean_TE
        return clean_TE + torch.randn_like(clean_TE) * call.noise

    def _disturbed(self, x_TD: Tensor) -> Tensor:
        """x_TD with input dropout, then times U[1-j, 1+j], at least in float32.

        Both are drawn from the device's default generator, which a checkpoint sets back for its
        recomputation and which ranks with the same tokens have alike. Source: Switch Transformers
        (Fedus et al. 2021), exploration strategies "input dropout" and "input jitter".
        """
        jitter, dropout = self.config.input_jitter, self.config.input_dropout
        x_TD = x_TD.to(accumulate_dtype(x_TD.dtype))
        if dropout:
            x_TD = nn.functional.dropout(x_TD, dropout)
        return x_TD * torch.empty_like(x_TD).uniform_(1 - jitter, 1 + jitter) if jitter else x_TD

    def one_pass(self) -> bool:
        """Whether one kernel makes choice, weights and sums."""
        # torch.compile fuses single steps itself: topk with its losses becomes as many loops, give
        # or take one, as the pass does (torch 2.13 on CPU). And torch 2.6 cannot trace the pass,
        # whose autograd function calls `set_materialize_grads`
        return "torch" in self.score.kernels and not torch.compiler.is_compiling() \
            and not transformed()

    def _count_step(self, call: RoutingCall) -> Tensor:
        mine_E = torch.cat([call.own_load_KE.sum(0), call.own_count()[None]])
        all_E = self.batch_comm.all_reduce(mine_E)
        if self.training and inside_backward():
            raise RuntimeError(
                f"loss global_batch of {type(self).__name__}: this recomputation cannot repeat the "
                "load of its first pass, which was not recorded; checkpoint by "
                "torch.utils.checkpoint.checkpoint, and with torch.compile inside the compiled "
                "function: torch.compile(lambda x: checkpoint(block, x))")
        if not counts(self.training):
            return all_E
        self.step_load_E.add_(all_E)
        return self.step_load_E.clone()  # the next pass adds to it

    def _finish(self, call: RoutingCall, ids_TK: Tensor, weights_TK: Tensor) -> Routing:
        """Padding goes nowhere, weights are scaled, losses and entropy computed.

        ids_TK: the choices that remain.
        """
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
        """The configured losses of a call; those that a noise defines only if there is one."""
        noisy = call.noise or call.deviation_TE is not None
        found = {}
        for name, loss in self.losses.items():
            if noisy or name not in self.only_noisy:
                found[name] = loss(call)
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
        """Restart the counts; see `moe_plugin.routing.finish_step`."""
        self.forget_step()

    def forget_step(self) -> None:
        """Restart the counts of `global_batch`, and those of `step_sums`."""
        for sums in (self.step_load_E, *self.step_sums()):
            sums.zero_()


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
