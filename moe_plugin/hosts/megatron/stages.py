"""The layer of this package, split into the steps of Megatron's schedule that overlaps two
micro-batches.

With `overlap_moe_expert_parallel_comm`, Megatron runs the forward pass of one micro-batch at the
same time as the backward pass of another micro-batch.

Megatron splits the autograd graph between the steps. Each step receives detached tensors and runs
its own backward pass. The memory of a step's inputs is released when the step is done. Every tensor
with a gradient (tokens, rows, gate weights) must therefore be passed from step to step as an
argument. A step copies the tensors that it needs later. A layer processes only one call at a time.
Backward passes that run between the steps of a call do not change the state of the call.

| Megatron's step | steps of this package's layer |
|---|---|
| `shared_experts_compute` | Megatron's shared expert |
| `route`, `preprocess` | route, capacity, select, plan |
| `dispatch` | dispatch |
| `routed_experts_compute` | experts |
| `combine`, `postprocess` | combine, leave |
| `backward_dw` | weight gradients, with `delay_wgrad_compute` |
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moe_plugin.comm.state import TrafficMeter
from moe_plugin.config import flatten, to_dict
from moe_plugin.dispatch import Sent
from moe_plugin.dispatch.layout import LayerLayout
from moe_plugin.dispatch.rows import TokenPlan, with_weights
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.hosts.megatron import parameters
from moe_plugin.hosts.megatron.compat.recipes import recomputed
from moe_plugin.hosts.megatron.compat.settings import cuda_graphs
from moe_plugin.hosts.megatron.losses import last_layer_is_moe
from moe_plugin.hosts.megatron.refusals import OVERLAP
from moe_plugin.kernels.weight_grads import LaterGrads
from moe_plugin.records import DispatchPlan, ExpertRows, KeptRouting, RowPlan, Tokens


@dataclass
class _Call:
    """State of the current call that later steps need, in addition to the tensors they receive."""

    tokens: Tokens
    kept: KeptRouting
    layout: LayerLayout
    traffic: TrafficMeter
    plan: DispatchPlan | None = None
    sent: Sent | None = None
    work: ExpertRows | None = None


class Stages:
    """The steps of `PluginMoELayer` that Megatron's overlapping schedule calls."""

    _call: _Call | None = None

    def shared_experts_compute(self: Any, hidden_states: Tensor) -> Tensor | None:
        """Return the shared expert's output [s, b, h], or None if there is no shared expert."""
        if self.shared_experts is None:
            return None
        if self.shared_experts_recompute:
            return recomputed(self.shared_experts, self.config, self.tp_group, hidden_states)
        return self.shared_experts(hidden_states)

    def route(self: Any, hidden_states: Tensor,
              padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route the tokens in `hidden_states` [s, b, h]. Return the gate weights [T, K] and the
        int64 expert ids [T, K].

        padding_mask: bool tensor [b, s] that is True for padding tokens.
        """
        real_SB = None if padding_mask is None else ~padding_mask.transpose(0, 1).bool()
        info, moe = self._before_routing(hidden_states), self.moe
        traffic = TrafficMeter(moe.comm.counters)
        tokens = moe.token_entry.enter(hidden_states, real_SB, info, moe.experts.dtype)
        routing = moe.router(tokens.x_TD, tokens.mask_T, None, tokens.info)
        if routing.passthrough_T is not None:
            raise ValueError(
                f"router.name={moe.config.router.name!r} cannot be combined with "
                "overlap_moe_expert_parallel_comm=True, because this router adds a part of each "
                "token to its output. Choose another router, or turn the overlap off.")
        kept = moe.capacity(routing, self.training)
        layout, kept = moe.routed_experts.select(kept, None, self.training)
        self._call = _Call(tokens, kept, layout, traffic)
        return routing.weights_TK, routing.ids_TK

    def preprocess(self: Any, hidden_states: Tensor, probs: Tensor,
                   routing_map: Tensor) -> tuple[Tensor, Tensor]:
        """Plan the dispatch of the tokens, and attach the auxiliary losses.

        Returns: the tokens [T, h] (or [T, latent width]), and the gate weights in the order that
            the dispatch plan uses.
        """
        call = self._call
        call.plan = call.layout.dispatcher.plan(call.kept)
        real_T, tokens = call.tokens.mask_T, call.tokens.count
        x_TD = self._with_losses(call.tokens.x_TD.clone(), call.kept.before.losses,
                                 tokens if real_T is None else real_T.sum())
        if self.moe.latent is not None:
            x_TD = self.moe.latent.enter(dataclasses.replace(call.tokens, x_TD=x_TD))
        call.traffic.hold()
        # cloned, because the router's backward pass reads the original
        plan: Any = call.plan.row_plan if isinstance(call.plan, TokenPlan) else call.plan
        return x_TD, plan.weights_TK.clone()

    def dispatch(self: Any, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send the tokens to their experts. Return the rows [R, h] of the current rank's experts,
        and the gate weights.
        """
        call = self._call
        call.traffic.go_on()
        parameters.wait_for(self.experts)
        # no anchor: with an anchor the backward passes of the exchanges would run the gradient
        # hook of an expert parameter, in which Megatron's overlapped reduction collects the
        # gradient, although only the experts' backward pass computes this gradient
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
        """Return a tuple (outputs of the experts [R, h], None). The second element is None because
        the experts have no separate bias.
        """
        call = self._call
        call.plan = _with_weights(call.plan, probs)
        rows = call.work.rows
        if isinstance(rows, RowPlan) and rows.weights_TK is not None:
            rows = with_weights(rows, probs)
        work = dataclasses.replace(call.work, x=hidden_states.clone(), rows=rows)
        return self.experts(work), None

    def combine(self: Any, output: Tensor) -> Tensor:
        """Return the weighted sum of the expert outputs for each token, with shape [T, h]."""
        call = self._call
        call.traffic.go_on()
        call.sent.put_back(output)
        return call.layout.dispatcher.combine(call.sent, call.plan)

    def postprocess(self: Any, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Return the output of the layer [s, b, h], including the output of the shared expert. This
        step ends the call of the layer.
        """
        call, self._call, moe = self._call, None, self.moe
        if moe.latent is not None:
            output = moe.latent.leave(output, call.tokens)
        y, _ = moe.token_entry.leave(output.to(call.tokens.x_TD.dtype), {}, call.tokens)
        stats = moe.routed_experts.stats(call.layout, call.kept, call.plan.rows, call.traffic)
        self._observe(stats)
        return y if shared_expert_output is None else y + shared_expert_output

    def backward_dw(self: Any, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Compute the weight gradients that the backward passes have postponed."""
        if routed_experts:
            if isinstance(self.experts, FFNExperts) and self.experts.later is not None:
                self.experts.later.compute(dict(self.experts.named_parameters(recurse=False)))
            if not self._gradient_hooks and any(
                    hasattr(parameter, "main_grad") for parameter in self.experts.parameters()):
                raise ValueError(
                    "delay_wgrad_compute=True is set in TransformerConfig but not in "
                    "DistributedDataParallelConfig, which would therefore ignore the gradients of "
                    "the experts. Set it in both.")
            for hook in self._gradient_hooks:
                hook()
        if shared_experts and self.shared_experts is not None:
            self.shared_experts.backward_dw()


def delay(layer: Any) -> None:
    """Postpone the weight gradients of a `PluginMoELayer` until `backward_dw` is called.

    The compute strategies `fused` and `kernels` compute the weight gradients in `backward_dw`.
    Other strategies still compute the weight gradients in the backward pass. With all strategies,
    Megatron reduces the gradients in `backward_dw`. Megatron's data-parallel wrapper searches for
    modules with a method `register_wgrad_accumulation_and_reduce_hooks`. The wrapper passes the
    reduction hooks of the module's parameters to this method. The method is added to the routed
    experts instead of the whole layer. The layer also contains the shared expert, whose modules
    call their hooks themselves.
    """
    layer._gradient_hooks = []
    layer.experts.register_wgrad_accumulation_and_reduce_hooks = functools.partial(
        list.append, layer._gradient_hooks)
    for parameter in layer.experts.parameters():
        parameter.skip_backward_post_hook = True
    if isinstance(layer.experts, FFNExperts):
        layer.experts.later = LaterGrads()


def check(layer: Any) -> None:
    """Raise a `ValueError` if a setting prevents splitting a `PluginMoELayer` into steps."""
    config, native = layer.moe.config, layer.config
    traits = layer.moe.routed_experts.layouts.traits
    OVERLAP.refuse({
        **flatten(to_dict(config)), "sequence_parallel": native.sequence_parallel,
        "moe_layer_freq": native.moe_layer_freq, "cuda_graph_impl": cuda_graphs(native),
        "moe_token_dispatcher_type": native.moe_token_dispatcher_type,
        "indivisible": not traits.supports_pieces or traits.bounded or traits.single_layout,
        "tokens_of_all_ranks": layer.groups.tensor.size() > 1 and not native.sequence_parallel,
        "reads_token_ids": "token_ids" in layer.needs,
        "dense_at_end": not last_layer_is_moe(native)})


def _with_weights(plan: DispatchPlan, weights_TK: Tensor) -> DispatchPlan:
    if isinstance(plan, TokenPlan):
        return dataclasses.replace(plan, row_plan=with_weights(plan.row_plan, weights_TK))
    changed: Any = {"weights_TK": weights_TK}  # a field of all other plans
    return dataclasses.replace(plan, **changed)
