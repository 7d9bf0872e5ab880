"""Adapter that makes this package's MoE layer usable as Megatron's `MoELayer`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.host_collectives import comm_of
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import flatten, to_dict
from moe_plugin.config.refusals import Values
from moe_plugin.hosts.megatron import frozen, parameters, stages, state
from moe_plugin.hosts.megatron import losses as layer_numbers
from moe_plugin.hosts.megatron.compat import core, muon
from moe_plugin.hosts.megatron.compat.names import mappings
from moe_plugin.hosts.megatron.compat.optimizer import float32_parameters_first
from moe_plugin.hosts.megatron.compat.recipes import in_bf16, recomputed
from moe_plugin.hosts.megatron.compat.router_replay import follow_replay
from moe_plugin.hosts.megatron.compat.sequence_parts import is_mtp_layer, is_told, prediction_of
from moe_plugin.hosts.megatron.compat.settings import (
    OVERLAPPED,
    script_arguments,
    setting,
    settings_errors,
    tokens_of_call,
    vocabulary_sizes,
)
from moe_plugin.hosts.megatron.losses import AuxiliaryLosses, wanted
from moe_plugin.hosts.megatron.native_router import NativeRouter
from moe_plugin.hosts.megatron.refusals import BATCH_INVARIANT, PRE_GATE, STORED
from moe_plugin.hosts.megatron.same_tokens import StepClock, ids_of, layer_config, shares_tokens
from moe_plugin.hosts.megatron.translate import (
    Translation,
    announce,
    refuse_arguments,
    settings_from_flags,
    translate,
)
from moe_plugin.layer import MoELayer
from moe_plugin.observe.sinks import watch_store
from moe_plugin.output import LayerStats
from moe_plugin.records import TokenInfo
from moe_plugin.routing import finish_step, needs_of, number_layers
from moe_plugin.routing.call import TakesTokenIds, token_info
from moe_plugin.routing.counting import counts
from moe_plugin.routing.pregate import chosen_together, has_own_gate
from moe_plugin.routing.replay import replaying
from moe_plugin.routing.routers.hashing import with_vocabulary

logger = logging.getLogger(__name__)


class PluginMoELayer(TakesTokenIds, stages.Stages, core.MoELayer):
    """A replacement for Megatron's `MoELayer` with this package's routing, dispatch and experts.

    Auxiliary losses and logging are the same as in Megatron. The class inherits from Megatron's
    `MoELayer` only to pass `isinstance` checks. The submodules of the parent class are not built.

    Args:
        config: `TransformerConfig`.
        submodules: Megatron's `MoESubmodules` in the spec. The layer uses the shared experts and a
            custom router from the spec, but ignores the experts in the spec.
        layer_number: number of the transformer layer, starting at 1.
        pg_collection: process groups of Megatron. Defaults to Megatron's global process groups.
        settings: settings of this package by dotted path (see `moe_plugin.config`). Defaults to the
            settings that were passed to the launcher.
        in_hybrid: True if the layer belongs to the layer stack of a `HybridModel`.
    Attributes:
        router: Megatron's router if a setting requires it, or else this package's router.
        moe: the `MoELayer` that runs the router and the experts.
        replay: the link between Megatron's `RouterReplay` and this package's router. None if
            routing replay is disabled, or if Megatron's router is used.
        last_stats: the `LayerStats` of the latest forward pass.
        observer: called with the `LayerStats` of each forward pass, except for recomputations.
        run_ends_steps: True if the run calls `finish_step` at the end of each step. If False, the
            layer detects the end of a step itself.
    Raises:
        ValueError: If a setting is not supported.
    """

    layer_number: Any
    router: Any
    experts: Any
    shared_experts: Any

    @settings_errors()
    def __init__(self, config: Any, submodules: Any = None, layer_number: int | None = None,
                 pg_collection: Any = None, settings: Mapping[str, Any] | None = None,
                 in_hybrid: bool = False, **extra: Any) -> None:
        core.check_version()
        refuse_arguments()
        if in_hybrid and not config.is_hybrid_model:
            raise ValueError(
                "is_hybrid_model=False must be True in the layer stack of a HybridModel, because "
                "the layers would otherwise be numbered and initialised like those of a GPT model. "
                "Build the config with TransformerConfig(is_hybrid_model=True, ...).")
        settings = settings_from_flags(script_arguments()) if settings is None else settings
        plan = translate(config, settings, injected_router=core.injects_router(submodules))
        plan = replace(plan, config=with_vocabulary(plan.config, vocabulary_sizes(),
                                                    "Megatron's vocabulary"))
        PRE_GATE.refuse({
            "router.pre_gate": plan.config.router.pre_gate,
            "mtp_num_layers": setting(config, "mtp_num_layers"),
            "moe_at_end": plan.config.router.pre_gate and layer_numbers.last_layer_is_moe(config)})
        groups = core.groups(pg_collection)
        core.init_base(self, config, layer_number, groups.collection, extra)
        self.submodules, self.groups, self.plan = submodules, groups, plan
        self.tp_group = groups.tensor
        self.shares_tokens = shares_tokens(config, plan, groups)
        self._is_mtp, self._prediction = is_mtp_layer(extra), prediction_of(extra)
        self.layer_number = self._number_in_model(self.layer_number)
        self.losses = AuxiliaryLosses(
            config, plan.config.losses, groups.context if self.shares_tokens else groups.tokens,
            plan.config.comm.timeout_s, layer_numbers.passes_a_microbatch(config, is_told(extra)))
        self.passes = layer_numbers.passes_a_microbatch(config, self._is_mtp)
        BATCH_INVARIANT.refuse(Values({
            "batch_invariant": plan.config.batch_invariant, "native_router": plan.native_router,
            "shared_experts": self.use_shared_expert}, functools.partial(setting, config)))
        native = core.native_router(
            config, submodules, groups, is_told(extra)) if plan.native_router else None
        moe = self._build(config, plan, native)
        # router and experts are registered before `moe`: torch names a parameter after the first
        # module that owns it, so the names are Megatron's (`router.*`, `experts.*`)
        self.router = moe.router if native is None else native
        self.experts = moe.experts
        if moe.latent is not None:
            self.fc1_latent_proj, self.fc2_latent_proj = moe.latent.down, moe.latent.up
        self.moe = moe
        self.register_state_dict_post_hook(state.drop_repeated)
        self.register_load_state_dict_pre_hook(state.add_repeated)
        self.shared_experts = core.shared_experts(config, submodules,
                                                    groups) if self.use_shared_expert else None
        again = config.recompute_granularity == "selective" and config.recompute_modules or []
        self.recompute = "moe" in again
        self.shared_experts_recompute = "shared_experts" in again
        self.replay_handle = None if self.replay is None else self.replay.handle
        self._prepare_parameters(native)
        self.needs = needs_of(moe.router)
        if setting(config, "overlap_moe_expert_parallel_comm"):
            stages.check(self)
        if setting(config, "delay_wgrad_compute"):
            stages.delay(self)
        watch_store(moe, lambda: f"layer{self.layer_number}")
        self._clock = StepClock()
        self.run_ends_steps = False
        self._given_number: int | None = None
        self.continues = False  # True for all slices of a micro-batch except the first
        if layer_number is not None:
            self._follow_recipe(layer_number)
        self.last_stats: LayerStats | None = None
        self.observer: Callable[[LayerStats], None] | None = None

    def _build(self, config: Any, plan: Translation, native: nn.Module | None) -> MoELayer:
        device = "cpu" if config.use_cpu_initialization or not torch.cuda.is_available(
        ) else torch.device("cuda", torch.cuda.current_device())
        STORED.refuse(flatten(to_dict(plan.config)))
        router = None if native is None else NativeRouter(
            native, config.moe_router_topk, plan.native_balance, self.losses)
        moe = MoELayer(layer_config(config, plan.config),
                       comm_of(self.groups.experts, plan.config.comm.timeout_s),
                       host=self._host_context(config, plan, native is not None),
                       router=router, dtype=config.params_dtype, device=device)
        moe.ddp_check.compare_replicas(
            comm_of(core.all_data_group(self.groups.collection), plan.config.comm.timeout_s))
        self.replay = follow_replay(
            config, moe.router, plan.config.parallel.replicas, self.tp_group.size() > 1 and not (
                self.shares_tokens or config.sequence_parallel)) if native is None else None
        if config.perform_initialization:
            if native is None:
                parameters.initialise_router(moe.router, config)
            parameters.initialise(moe.experts, moe.placement, config.init_method,
                                  config.output_layer_init_method)
            if moe.latent is not None:
                parameters.initialise_linear(moe.latent.down, config.init_method)
                parameters.initialise_linear(moe.latent.up, config.output_layer_init_method)
        frozen.prepare(moe, config, plan)
        return moe

    def _host_context(self, config: Any, plan: Translation, native: bool) -> HostContext:
        number = None if self.layer_number is None else layer_numbers.moe_layers_before(
            config, self.layer_number)
        host = HostContext(layer_number=number, numbered_later=number is None,
                           agreed=flatten(to_dict(plan.run)), tokens=tokens_of_call(),
                           adds_to_main_grad=bool(config.gradient_accumulation_fusion))
        if native:
            return host
        groups, timeout_s = self.groups, plan.config.comm.timeout_s

        def parts(group: Any) -> Comm | None:
            return comm_of(group, timeout_s) if group.size() > 1 else None

        split_loss = parts(groups.tokens)
        split_batch = comm_of(core.all_data_group(groups.collection), timeout_s)
        if not self.shares_tokens:
            return replace(host, loss_comm=split_loss, batch_comm=split_batch)
        # all tensor-parallel ranks route the same tokens; the layer may also split them
        return replace(host, loss_comm=parts(groups.context),
                       batch_comm=comm_of(groups.data, timeout_s), split_loss_comm=split_loss,
                       split_batch_comm=split_batch)

    def _prepare_parameters(self, native: nn.Module | None) -> None:
        parameters.mark(self.experts)
        muon.prepare(self.experts, self.moe.placement.shards)
        if self.plan.config.router.fp32:
            float32_parameters_first()
        split = self.groups.tensor.size() > 1 and not self.shares_tokens
        latent = () if self.moe.latent is None else self.moe.latent.parameters()
        for parameter in (*self.router.parameters(), *latent):
            parameter.sequence_parallel = self.config.sequence_parallel
            if split and not self.config.sequence_parallel:
                # each tensor-parallel rank routes a part of the tokens and has only their part of
                # these gradients; Megatron sums the parts only under sequence parallelism
                parameter.register_hook(self._sum_over_tensor_ranks)

    def _sum_over_tensor_ranks(self, grad: Tensor) -> Tensor:
        comm = comm_of(self.groups.tensor, self.plan.config.comm.timeout_s)
        return comm.all_reduce(grad)

    def _follow_recipe(self, layer_number: int) -> None:
        # as in Megatron, multi-token prediction layers use the recipe whatever their number is
        if self.plan.follows_recipe and not self._is_mtp and in_bf16(self.config, layer_number):
            self.experts.config = replace(self.experts.config, precision="ieee")

    @property
    def trace_key(self) -> tuple[str, int | None, int] | None:
        """Return (block, prediction depth, layer), as in Megatron's routing traces."""
        return None if self.layer_number is None else layer_numbers.trace_key(
            self.layer_number, self.config, self._prediction)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer number for log records and routers. See `losses.in_model`."""
        self.layer_number = self._number_in_model(layer_number)
        self._given_number = layer_number
        if not self._number_parts(layer_number):
            announce(self.plan)
        if self.plan.native_router:
            self.router.set_layer_number(layer_number)
        if self.replay is not None:
            self.replay.set_layer_number(layer_number)

    def _number_parts(self, layer_number: int) -> int | None:
        self._follow_recipe(layer_number)
        number = layer_numbers.moe_layers_before(self.config, self.layer_number)
        self.experts.use_layer(number)
        if number is not None:
            number_layers(self.router, number)
        return number

    def follow_groups(self, groups: core.MegatronGroups) -> None:
        """Use new process groups, and the current experts and router of `moe`. See `resizing`."""
        self.groups, self.experts = groups, self.moe.experts
        if not self.plan.native_router:
            self.router = self.moe.router
        if self.replay is not None and self.router.forced is not self.replay:
            self.replay.follow(self.router)
        core.count_local_experts(self, groups)
        parameters.mark(self.experts)
        muon.prepare(self.experts, self.moe.placement.shards)
        if self._given_number is not None:
            self._number_parts(self._given_number)

    def _number_in_model(self, layer_number: int | None) -> int | None:
        return layer_numbers.in_model(layer_number, self.config, self._is_mtp, self._prediction)

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None,
                padding_mask: Tensor | None = None, **_unused: Any) -> tuple[Tensor, None]:
        """Compute the output of the MoE layer for all tokens.

        Args:
            hidden_states: activations [s, b, h] of the whole sequence or of this rank's slice.
            intermediate_tensors: tensors of partial CUDA graphs. Must be None.
            padding_mask: bool tensor [b, s] that is True for padding tokens, as in Megatron.
                Padding tokens are not routed, and their outputs are zero.
        Returns: the outputs [s, b, h], and None because the layer has no separate bias.
        """
        if intermediate_tensors is not None:
            raise ValueError(
                "CUDA graphs of a part of the MoE layer are not supported. Set "
                "cuda_graph_impl='none', or capture attention only (scope 'attn').")
        if self.config.gradient_accumulation_fusion and torch.compiler.is_compiling():
            # the backward pass adds to main_grad, which a compiled graph cannot express
            from moe_plugin.tuning.uncompiled import uncompiled

            return uncompiled(self.forward, hidden_states, None, padding_mask)
        if self.training and torch.is_grad_enabled() and setting(
                self.config, "delay_wgrad_compute"):
            raise ValueError(
                "delay_wgrad_compute=True cannot be used when an MoE layer is called as a whole in "
                "training, because its weight gradients would never be computed. Leave it out, or "
                "use the schedule of overlap_moe_expert_parallel_comm=True.")
        real_SB = None if padding_mask is None else ~padding_mask.transpose(0, 1).bool()
        if self.recompute and self.training:
            return recomputed(self._run, self.config, self.tp_group, hidden_states, real_SB), None
        return self._run(hidden_states, real_SB), None

    def _run(self, x_SBD: Tensor, real_SB: Tensor | None) -> Tensor:
        store = self.plan.config.experts.store
        if store != "device" and self.training and torch.is_grad_enabled():
            raise ValueError(
                f"experts.store={store} cannot be used for training in Megatron, which needs "
                "gradient buffers on the device. Use experts.store=device, or only evaluate.")
        ranks: int = self.groups.tensor.size()
        shared: Any = None
        if self.shared_experts is not None:
            shared = functools.cache(functools.partial(self.shared_experts_compute, x_SBD))
        overlapped = shared if self.plan.config.experts.shared_overlap else None
        if ranks > 1 and not self.config.sequence_parallel and not self.shares_tokens:
            output = self._run_split(x_SBD, real_SB, ranks, overlapped)
        else:
            output = self._routed(x_SBD, real_SB, overlapped)
        return output if shared is None else output + shared()

    def _run_split(self, x_SBD: Tensor, real_SB: Tensor | None, ranks: int,
                   overlapped: Callable[[], Tensor] | None) -> Tensor:
        # every tensor-parallel rank has all tokens, so each rank routes its own part of the
        # sequence, as under sequence parallelism, to avoid repeated work
        length = x_SBD.shape[0]
        missing = -length % ranks
        if missing:
            real_SB = real_SB if real_SB is not None else x_SBD.new_ones(
                x_SBD.shape[:2], dtype=torch.bool)
            real_SB = torch.cat([real_SB, real_SB.new_zeros(missing, real_SB.shape[1])])
            x_SBD = torch.cat([x_SBD, x_SBD.new_zeros(missing, *x_SBD.shape[1:])])
        group = self.groups.tensor
        part_SBD = mappings.scatter_to_sequence_parallel_region(x_SBD, group=group)
        real_SB = None if real_SB is None else real_SB.chunk(ranks)[group.rank()]
        output = self._routed(part_SBD, real_SB, overlapped)
        return mappings.gather_from_sequence_parallel_region(
            output, tensor_parallel_output_grad=False, group=group)[:length]

    def _routed(self, x_SBD: Tensor, real_SB: Tensor | None,
                overlapped: Callable[[], Tensor] | None) -> Tensor:
        parameters.wait_for(self.experts)
        out = self.moe(x_SBD, real_SB, info=self._before_routing(x_SBD), overlapped=overlapped)
        self._observe(out.stats)
        return self._with_losses(
            out.output, out.losses,
            x_SBD.shape[0] * x_SBD.shape[1] if real_SB is None else real_SB.sum())

    def _observe(self, stats: LayerStats | None) -> None:
        if (torch.is_grad_enabled() and not replaying()) or not self.training:  # not recomputed
            self.last_stats = stats
            if self.observer is not None and stats is not None:
                self.observer(stats)

    def _before_routing(self, x_SBD: Tensor) -> TokenInfo | None:
        if self.plan.native_router:
            router: Any = self.moe.router
            router.batch_size = x_SBD.shape[1]
        # with a pre-gate, routing for this layer starts in the block before, so that the end of a
        # step must be detected here
        if (has_own_gate(self.moe) and counts(self.training) and not self.continues
                and self._clock.new_step(self._passes_a_step())):
            self._finish_step()
        part = 0 if self.shares_tokens else self.groups.tensor.rank()
        ids_SB = ids_of(x_SBD, self.tokens_BT, self.needs, part,
                        self.config.sequence_parallel)
        return token_info(x_SBD, ids_SB, self.needs)

    def _passes_a_step(self) -> int | None:
        if self.run_ends_steps or self.plan.run.offload.weights == "host":
            return None
        microbatches = core.microbatches_a_step()
        return None if microbatches is None else microbatches * self.passes

    def _finish_step(self) -> None:
        for moe in chosen_together(self.moe):
            finish_step(moe)

    def _with_losses(self, y: Tensor, losses: Mapping[str, Tensor], tokens: int | Tensor) -> Tensor:
        return self.losses.attach(y, losses, tokens, self.layer_number) if wanted(self) else y

    def router_and_preprocess(self, *_args: Any, **_kwargs: Any) -> Any:
        """Not supported. Raises a `ValueError` that names the setting to change."""
        raise ValueError(
            "moe-plugin's layer does not implement MoELayer.router_and_preprocess. "
            f"overlap_moe_expert_parallel_comm needs megatron-core {OVERLAPPED}.")

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (),
                           metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the layer's sharded tensors for Megatron's distributed checkpoint.

        Experts are stored by global index, so a run with any expert-parallel size can load them.
        """
        if not self.plan.native_router and self._clock.ended():
            self._finish_step()
        return state.layer_shards(self, prefix, sharded_offsets, metadata)


def plugin_layers(*chunks: nn.Module) -> list[PluginMoELayer]:
    """Return all MoE layers of this package in the given model chunks, in order."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)]
