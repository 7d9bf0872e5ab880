"""`MoELayer`: route, plan, dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin import determinism
from moe_plugin.comm import Comm, default_comm
from moe_plugin.config import MoEConfig
from moe_plugin.config.user_modules import import_user_modules
from moe_plugin.dispatch import check_capacity
from moe_plugin.experts import CustomExperts, expert_kinds
from moe_plugin.experts.ddp_check import refuse_averaged_experts
from moe_plugin.kernels import expert_load
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.planner.choice import LayoutChoice
from moe_plugin.records import HostContext, LayerStats, MoEOutput, Placement, Routing, TokenInfo
from moe_plugin.routing import build_router
from moe_plugin.routing import capacity as capacity_rules
from moe_plugin.routing.replay import Replaying
from moe_plugin.tuning.exchange import prepare
from moe_plugin.tuning.layout_tuner import LayoutTuner
from moe_plugin.tuning.layouts import Layout, Layouts
from moe_plugin.tuning.replicas import with_replicas
from moe_plugin.tuning.timer import Stopwatch

STATE_VERSION = 1


class MoELayer(Replaying, nn.Module):
    """A Mixture-of-Experts feed-forward layer over the ranks of one group.

    Args:
        config: see `MoEConfig`; `model_dim` must be set.
        comm: the expert-parallel group; None: the default torch.distributed group where
            initialised, else this rank alone.
        host: what the host knows of this layer.
        router: a module to use in place of the configured router:
            `(x_TD, mask_T, top_k, info) -> Routing`; see `moe_plugin.routing.RouterModule`.
        experts: `factory(global_index) -> module` for custom experts, in place of the configured
            kind.
        dtype, device: of the parameters.

    Expert parameters carry `expert = True`. After backward, an expert's gradient is the sum over
    the tokens of all ranks in `comm`; all other parameters hold this rank's part. The host (or
    `moe_plugin.hosts.plain.gradients`) reduces and scales.

    Raises:
        ValueError: where config, group and names do not fit together; it names value, bound and
            remedy.
    """

    def __init__(self, config: MoEConfig, comm: Comm | None = None, *,
                 host: HostContext = HostContext(), router: nn.Module | None = None, experts: Callable[[int], nn.Module] | None = None,
                 dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        import_user_modules(config.imports)
        determinism.check(config.deterministic)
        if config.model_dim < 1:
            raise ValueError(
                f"model_dim={config.model_dim} is out of bounds: must be >= 1; set it to the width "
                "of the tokens"
            )
        self.comm = comm if comm is not None else default_comm(config.comm.timeout_s)
        place = Placement(self.comm, config.num_experts, prepare(self.comm, config.comm),
                          cut=config.parallel.shards)
        place.check()
        config, place, self.replicas = with_replicas(config, place)
        check_capacity(config.dispatch)
        self.config = config
        self.placement = place
        where = {"dtype": dtype, "device": device}
        self.host = host
        seen = host if self.replicas is None else host.when_split(self.replicas.comm)
        self.router = router if router is not None else build_router(config, place.comm, host=seen,
                                                                     **where)
        make = expert_kinds.get(config.experts.kind)
        self.experts = make(config, place, **where) if experts is None else CustomExperts(
            experts, place)
        self.experts.adds_to_main_grad = host.adds_to_main_grad
        self.layouts = Layouts(config, place, whole=hasattr(self.experts, "stored"),
                               replay=host.replay)
        self.auto = LayoutTuner(config, self.layouts, next(
            self.parameters()), replay=host.replay) if config.parallel.mode == "auto" else None
        self.shared_expert = SharedExpert(config, **
                                          where) if config.experts.shared_hidden_dim else None
        self._ddp_seen = False
        if self.replicas is not None:
            self.replicas.adopt(self)

    def forward(self, x: Tensor, token_mask: Tensor | None = None, top_k: int | None = None,
                choice: LayoutChoice | None = None, info: TokenInfo | None = None) -> MoEOutput:
        """Send every token through its experts.

        Args:
            x: [..., D] tokens of this rank; any number, also none, also different on each rank.
            token_mask: [...] bool, True = real token; padding tokens are not routed and give zeros.
                None: all real.
            top_k: experts a token for this call; None: configured.
            choice: layout of this call, the same on all ranks; None: configured. It changes no
                number beyond rounding.
            info: token ids, sequences, which of several routers; only some routers and losses want
                it (`router.needs`).
        Returns: output [..., D] in x's dtype, raw losses by name, statistics.
        Raises:
            ValueError: shapes or dtypes that do not fit.
            CommError: a collective failed or timed out; it names rank, collective and sizes.
        """
        self._check_input(x, token_mask)
        if self.comm.size > 1 and not self._ddp_seen and not torch.compiler.is_compiling():
            self._ddp_seen = refuse_averaged_experts(self.experts)
        x_TD, mask_T = x.reshape(
            -1, x.shape[-1]), None if token_mask is None else token_mask.reshape(-1)
        tokens, sent, ran = x_TD.shape[0], self.comm.bytes_sent, dict(self.comm.counters.exchanges)
        if self.replicas is not None:
            x_TD, mask_T = self.replicas.part(x_TD, mask_T)
            info = None if info is None else info.flat().piece(self.replicas.comm.size,
                                                               self.replicas.comm.rank)
        routing = self.router(x_TD, mask_T, top_k, None if info is None else info.flat())
        kept, slots_TK, limit = self._fit(routing)
        layout, watch = self._layout(kept, choice)
        shadows = self.layouts.shadows.now(kept, self.training) if self.layouts.shadows else ()
        y_TD, rows = layout.run(self.experts, x_TD, kept, slots_TK, limit, watch, shadows)
        y_TD = y_TD.to(x_TD.dtype)
        if self.shared_expert is not None:
            y_TD = y_TD + self.shared_expert(x_TD, mask_T)
        if routing.passthrough_T is not None:
            real_TD = x_TD if mask_T is None else x_TD.masked_fill(~mask_T[:, None], 0)
            y_TD = y_TD + (routing.passthrough_T[:, None] * real_TD).to(x_TD.dtype)
        stats = _stats(routing, kept, self.config.num_experts, self.comm.bytes_sent - sent, rows,
                       limit)
        decisions = () if self.auto is None else tuple(d.as_dict() for d in self.auto.pop_decisions())
        losses = routing.losses
        if self.replicas is not None:
            y_TD, losses = self.replicas.whole(y_TD, tokens, losses)
        return MoEOutput(
            y_TD.view(x.shape), losses,
            replace(stats, layout=layout.choice.label, decisions=decisions,
                    exchanges=self._ran_since(ran), copies=self.layouts.copies))

    def _ran_since(self, before: dict[str, int]) -> dict[str, int]:
        """All-to-alls since `before`, by algorithm."""
        return {
            name: count - before.get(name, 0)
            for name, count in self.comm.counters.exchanges.items() if count > before.get(name, 0)
        }

    def _layout(self, kept: Routing,
                choice: LayoutChoice | None) -> tuple[Layout, Stopwatch | None]:
        """The layout of this call: as given, as tuned, or as configured."""
        if self.auto is None or choice is not None:
            return self.layouts.at(choice or self.layouts.fixed), None
        return self.auto.layout(kept, self.training)

    def forget_recordings(self) -> None:
        """See `moe_plugin.routing.replay.forget`."""
        for chooser in (self.auto, self.layouts.shadows):
            if chooser is not None:
                chooser.forget_recordings()

    def _fit(self, routing: Routing) -> tuple[Routing, Tensor | None, int | None]:
        dispatch, router = self.config.dispatch, self.config.router
        experts = self.config.num_experts
        limit = capacity_rules.capacity(dispatch, routing, experts, self.layouts.load_comm,
                                        self.training)
        slots_TK = None if limit is None else capacity_rules.slots(routing, experts,
                                                                   router.batch_prioritized)
        return capacity_rules.drop(routing, slots_TK, limit,
                                   router.normalize == "after_drop"), slots_TK, limit

    def _check_input(self, x: Tensor, token_mask: Tensor | None) -> None:
        if x.dim() < 2 or x.shape[-1] != self.config.model_dim:
            raise ValueError(
                f"input of shape {tuple(x.shape)} does not fit: must be [..., "
                f"{self.config.model_dim}] (model_dim)"
            )
        if not x.is_floating_point():
            raise ValueError(
                f"input of dtype {x.dtype} does not fit: must be a floating-point tensor")
        if x.is_meta:
            raise ValueError(
                "input on the meta device does not fit: which experts a token visits depends on "
                "its values; build the layer there, "
                "then move it with to_empty() before the first forward pass")
        own = getattr(self.experts, "w_in_LDF", x).dtype
        if x.dtype != own and not torch.is_autocast_enabled(x.device.type):
            raise ValueError(
                f"input of dtype {x.dtype} does not fit: must be {own}, the experts' dtype; "
                "convert one of the two, or use torch.autocast"
            )
        if token_mask is not None and (token_mask.shape != x.shape[:-1]
                                       or token_mask.dtype != torch.bool):
            raise ValueError(
                f"token_mask {token_mask.dtype} {tuple(token_mask.shape)} does not fit: must be "
                f"bool {tuple(x.shape[:-1])}, "
                "True where a token is real")

    def get_extra_state(self) -> dict[str, Any]:
        """Where the local experts come from, checked when loaded; with `parallel: auto` also what
        the tuner has learned.
        """
        more = {} if self.auto is None else {"tuner": self.auto.state()}
        if self.placement.cut is not None:
            more["shards"] = self.placement.cut
        return {
            "version": STATE_VERSION, "num_experts": self.config.num_experts,
            "ep_size": self.comm.size, "ep_rank": self.comm.rank, **more
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """`ValueError` where a checkpoint's experts are not this rank's. A checkpoint without a
        tuner's state is as good.
        """
        for key, mine in {"shards": None, **self.get_extra_state()}.items():
            if key != "tuner" and state.get(key) != mine:
                raise ValueError(
                    f"checkpoint has {key}={state.get(key)}, this layer has {key}={mine}; load it "
                    "with the same number of experts, "
                    "expert-parallel ranks and shards, or reshard it with "
                    "moe_plugin.checkpoint.reshard"
                )
        if self.auto is not None and state.get("tuner") is not None:
            self.auto.load_state(state["tuner"])

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"dim={c.model_dim}, hidden={c.hidden_dim}, experts={c.num_experts} "
            f"({self.placement.local} here, {self.placement.shards} shards), "
            f"top_k={c.router.top_k}, dispatch={c.dispatch.name}, ranks={self.comm.size}")


class SharedExpert(nn.Module):
    """An expert of its own width that every real token visits; ordinary, replicated parameters."""

    def __init__(self, config: MoEConfig, *, dtype: torch.dtype | None = None,
                 device: Any = None) -> None:
        super().__init__()
        inner, width, bias = config.experts.shared_hidden_dim, config.model_dim, config.experts.bias
        self.activation = ACTIVATIONS[config.experts.activation].value
        self.fc_in = nn.Linear(width, inner, bias=bias, dtype=dtype, device=device)
        self.fc_gate = nn.Linear(width, inner, bias=bias, dtype=dtype,
                                 device=device) if config.experts.kind == "gated_ffn" else None
        self.fc_out = nn.Linear(inner, width, bias=bias, dtype=dtype, device=device)

    def forward(self, x_TD: Tensor, mask_T: Tensor | None = None) -> Tensor:
        """[T, D] to [T, D] in x's dtype; zeros for padding."""
        # before and after: padding may hold NaN, which would reach the weights' gradients
        if mask_T is not None:
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        inner_TF = self.fc_in(x_TD)
        inner_TF = self.activation(inner_TF) if self.fc_gate is None else self.activation(
            self.fc_gate(x_TD)) * inner_TF
        y_TD = self.fc_out(inner_TF).to(x_TD.dtype)
        return y_TD if mask_T is None else y_TD.masked_fill(~mask_T[:, None], 0)


def _stats(routing: Routing, kept: Routing, experts: int, sent: int, rows: int,
           limit: int | None) -> LayerStats:
    load_KE = expert_load(routing.ids_TK, experts, per_choice=True)
    return LayerStats(load_KE=load_KE,
                      kept_KE=load_KE if kept is routing else expert_load(
                          kept.ids_TK, experts, per_choice=True),
                      entropy=routing.entropy, tokens=routing.tokens, losses={
                          name: value.detach() for name, value in routing.losses.items()
                      }, bytes_sent=sent, rows=rows, capacity=limit, gate=routing.gate,
                      )
