"""Our layer in steps, for Megatron's schedule that runs the forward pass of one micro-batch with
the backward pass of another (`overlap_moe_expert_parallel_comm`).

Megatron cuts the graph between these steps: each takes detached tensors, runs its own backward, and
the memory of what it took is freed when it is done. So whatever has a gradient, tokens, rows and
gate weights, goes from step to step as an argument, and a step copies what it must keep. One call
is under way in a layer at a time; backward passes in between do not touch it.

| Megatron's step | here |
|---|---|
| `shared_experts_compute` | Megatron's shared expert |
| `route`, `preprocess` | route, capacity, select, plan |
| `dispatch` | dispatch |
| `routed_experts_compute` | experts |
| `combine`, `postprocess` | combine, leave |
| `backward_dw` | weight gradients, under `delay_wgrad_compute` |
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_plugin.comm.state import TrafficMeter
from moe_plugin.dispatch import Sent
from moe_plugin.dispatch.layout import LayerLayout
from moe_plugin.dispatch.rows import TokenPlan, with_weights
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.hosts.megatron import parameters
from moe_plugin.hosts.megatron.compat.recipes import recomputed
from moe_plugin.hosts.megatron.compat.settings import cuda_graphs
from moe_plugin.hosts.megatron.losses import last_layer_is_moe
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.output import MoEOutput
from moe_plugin.records import DispatchPlan, ExpertRows, KeptRouting, RowPlan, Tokens
from moe_plugin.utils.messages import short
from moe_plugin.utils.run_feature import refuse_unfit


@dataclass
class _Call:
    """The call under way: what a step leaves for the next ones in addition to its tensors."""

    tokens: Tokens
    kept: KeptRouting
    layout: LayerLayout
    traffic: TrafficMeter
    plan: DispatchPlan | None = None
    sent: Sent | None = None
    work: ExpertRows | None = None


class Stages:
    """The steps of `PluginMoELayer`; its `forward` does not use them."""

    _call: _Call | None = None

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Tensor | None:
        """The shared expert's outputs [s, b, h]; None without one."""
        if self.shared_experts is None:
            return None
        if self.shared_experts_recompute:
            return recomputed(self.shared_experts, self.config, self.tp_group, hidden_states)
        return self.shared_experts(hidden_states)

    def route(self: Any, hidden_states: Tensor,
              padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(gate weights [T, K], experts int64 [T, K]) of hidden_states [s, b, h].

        padding_mask: [b, s] bool, True = padding.
        """
        real_SB = None if padding_mask is None else ~padding_mask.transpose(0, 1).bool()
        info, moe = self._before_routing(hidden_states), self.moe
        traffic = TrafficMeter(moe.comm.counters)
        tokens = moe.token_entry.enter(hidden_states, real_SB, info, moe.experts.dtype)
        routing = moe.router(tokens.x_TD, tokens.mask_T, None, tokens.info)
        if routing.passthrough_T is not None:
            raise ValueError(
                f"router.name={moe.config.router.name!r} does not fit "
                "overlap_moe_expert_parallel_comm=True: it adds a part of each token to its "
                "output; set one of the two otherwise")
        kept = moe.capacity(routing, self.training)
        layout, kept = moe.routed_experts.select(kept, None, self.training)
        self._call = _Call(tokens, kept, layout, traffic)
        return routing.weights_TK, routing.ids_TK

    def preprocess(self: Any, hidden_states: Tensor, probs: Tensor,
                   routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens [T, h] or in the latent width, gate weights as the plan has them); auxiliary
        losses are attached.
        """
        call = self._call
        call.plan = call.layout.dispatcher.plan(call.kept)
        real_T, tokens = call.tokens.mask_T, call.tokens.count
        x_TD = self._with_losses(call.tokens.x_TD.clone(), call.kept.before.losses,
                                 tokens if real_T is None else real_T.sum())
        if self.moe.latent is not None:
            x_TD = self.moe.latent.enter(dataclasses.replace(call.tokens, x_TD=x_TD))
        call.traffic.hold()
        return x_TD, _weights(call.plan).clone()  # the router's backward reads its own

    def dispatch(self: Any, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """(rows [R, h] for this rank's experts, gate weights)."""
        call = self._call
        call.traffic.go_on()
        parameters.wait_for(self.experts)
        # no anchor: the exchanges' backward passes would run the hook of a parameter that gets its
        # gradient from the experts' alone, and Megatron's overlapped reduction takes it there
        call.sent = call.layout.dispatch(hidden_states, call.plan, self.experts, anchored=False)
        [call.work] = call.sent
        call.traffic.hold()
        rows_RD = call.work.x
        call.work = dataclasses.replace(call.work, x=rows_RD[:0])
        if rows_RD.untyped_storage().data_ptr() == hidden_states.untyped_storage().data_ptr():
            rows_RD = rows_RD.clone()
        return rows_RD, probs.clone()

    def routed_experts_compute(self: Any, hidden_states: Tensor,
                               probs: Tensor) -> tuple[Tensor, None]:
        """(the experts' results for the rows [R, h], None: without a separate bias)."""
        call = self._call
        call.plan = _with_weights(call.plan, probs)
        rows = call.work.rows
        if isinstance(rows, RowPlan) and rows.weights_TK is not None:
            rows = with_weights(rows, probs)
        work = dataclasses.replace(call.work, x=hidden_states.clone(), rows=rows)
        return self.experts(work), None

    def combine(self: Any, output: Tensor) -> Tensor:
        """Each token's results weighted and summed, [T, h]."""
        call = self._call
        call.traffic.go_on()
        call.sent.put_back(output)
        return call.layout.dispatcher.combine(call.sent, call.plan)

    def postprocess(self: Any, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Outputs [s, b, h], with the shared expert's; ends the call."""
        call, self._call, moe = self._call, None, self.moe
        if moe.latent is not None:
            output = moe.latent.leave(output, call.tokens)
        y, _ = moe.token_entry.leave(output.to(call.tokens.x_TD.dtype), {}, call.tokens)
        stats = moe.routed_experts.stats(call.layout, call.kept, call.plan.rows, call.traffic)
        self._observe(MoEOutput(y, {}, stats))
        return y if shared_expert_output is None else y + shared_expert_output

    def backward_dw(self: Any, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """What backward passes have left of weight gradients."""
        if routed_experts:
            if isinstance(self.experts, FFNExperts) and self.experts.later is not None:
                self.experts.later.compute(dict(self.experts.named_parameters(recurse=False)))
            if not self._gradient_hooks and any(
                    hasattr(parameter, "main_grad") for parameter in self.experts.parameters()):
                raise ValueError(
                    "delay_wgrad_compute=True of a TransformerConfig needs it in "
                    "DistributedDataParallelConfig, too, which would take no gradient of the "
                    "experts: must be the same in both; set it there")
            for hook in self._gradient_hooks:
                hook()
        if shared_experts and self.shared_experts is not None:
            self.shared_experts.backward_dw()


def delay(layer: Any) -> None:
    """Leave the weight gradients of a `PluginMoELayer` to `backward_dw`.

    Strategies `fused` and `kernels` compute them there; other ways to compute experts have them
    from the backward pass. Megatron takes all of them there: its data-parallel wrapper gives each
    module that has the method `register_wgrad_accumulation_and_reduce_hooks` what takes the
    gradient of any parameter in it. So the routed experts have it, not the layer, which has the
    shared expert, too: what takes that one's gradients is its own modules' to call, when they are
    there.
    """
    layer._gradient_hooks = []
    layer.experts.register_wgrad_accumulation_and_reduce_hooks = functools.partial(
        list.append, layer._gradient_hooks)
    for parameter in layer.experts.parameters():
        parameter.skip_backward_post_hook = True
    if isinstance(layer.experts, FFNExperts):
        layer.experts.later = LaterGrads()


def check(layer: Any) -> None:
    """`ValueError` for settings of a `PluginMoELayer` that cannot be cut into these steps."""
    config, native, split = layer.moe.config, layer.config, layer.groups.tensor.size() > 1
    traits, graphs = layer.moe.routed_experts.layouts.traits, cuda_graphs(native)
    refuse_unfit(
        "overlap_moe_expert_parallel_comm=True, which hides exchanges behind another micro-batch,",
        ((f"{name}={short(value)}", fits, f"must be {bound}; set one of the two otherwise")
         for name, value, bound, fits in (
            ("parallel.mode", config.parallel.mode, "'fixed'", config.parallel.mode == "fixed"),
            ("parallel.d", config.parallel.d, 1, config.parallel.d == 1),
            ("parallel.d_backward", config.parallel.d_backward, 0,
             config.parallel.d_backward in (0, 1)),
            ("parallel.spill", config.parallel.spill, "'never'",
             config.parallel.spill in (None, "never")),
            ("dispatch.send", config.dispatch.send, "'rows'",
             config.dispatch.send in ("rows", "auto")),
            ("experts.weights_first", config.experts.weights_first, False,
             not config.experts.weights_first),
            ("parallel.replicas", config.parallel.replicas, 1, config.parallel.replicas == 1),
            ("dispatch.name", config.dispatch.name, "'ragged' or 'padded'",
             traits.supports_pieces and not (traits.bounded or traits.single_layout)),
            ("sequence_parallel", False, True, native.sequence_parallel or not split),
            ("router.pre_gate", config.router.pre_gate, 0, not config.router.pre_gate),
            ("router.name", config.router.name, "a router that reads no token ids",
             "token_ids" not in layer.needs),
            # Megatron's schedule has the final norm in an MoE layer's last step alone
            ("moe_layer_freq", native.moe_layer_freq, "such that the last layer is an MoE layer",
             last_layer_is_moe(native)),
            # it reaches into Megatron's own dispatcher, and into its layer where there are graphs
            ("moe_token_dispatcher_type", native.moe_token_dispatcher_type, "'alltoall'",
             native.moe_token_dispatcher_type != "flex"),
            ("cuda_graph_impl", graphs, "'none'", graphs is None))))


def _weights(plan: DispatchPlan) -> Tensor:
    return plan.row_plan.weights_TK if isinstance(plan, TokenPlan) else plan.weights_TK


def _with_weights(plan: DispatchPlan, weights_TK: Tensor) -> DispatchPlan:
    if isinstance(plan, TokenPlan):
        return dataclasses.replace(plan, row_plan=with_weights(plan.row_plan, weights_TK))
    return dataclasses.replace(plan, weights_TK=weights_TK)
