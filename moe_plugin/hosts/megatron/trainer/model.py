"""The model, its data-parallel wrapper and its optimizer, as Megatron's own training builds them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state as ps
from torch import Tensor, nn

from moe_plugin.config import run_config
from moe_plugin.hosts.megatron import parameters, streamed
from moe_plugin.hosts.megatron.activations import activations_of
from moe_plugin.hosts.megatron.compat import core
from moe_plugin.hosts.megatron.compat.layer_norm import LocalNorm
from moe_plugin.hosts.megatron.compat.names import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Float16Module,
    FusedLayerNorm,
    GPTModel,
    OptimizerConfig,
    WrappedTorchNorm,
    finalize_model_grads,
    get_gpt_decoder_block_spec,
    get_megatron_optimizer,
    get_model_config,
)
from moe_plugin.hosts.megatron.compat.optimizer import use_fused_adam
from moe_plugin.hosts.megatron.ensemble import add_heads, ensemble_of
from moe_plugin.hosts.megatron.layer import PluginMoELayer
from moe_plugin.hosts.megatron.model_settings import model_settings
from moe_plugin.hosts.megatron.spec import swap_attention, swap_moe
from moe_plugin.hosts.megatron.streamed import StreamedModel
from moe_plugin.hosts.megatron.tokens import give_token_ids
from moe_plugin.hosts.megatron.trainer.arguments import values_for
from moe_plugin.hosts.megatron.trainer.data import Batch
from moe_plugin.memory.activations.offload import Activations
from moe_plugin.observe import StatsRecorder
from moe_plugin.pregate import link


@dataclass
class Training:
    """What a training step needs: model chunks, optimizer, Megatron's config.

    Attributes:
        chunks: wrapped; one, or one per virtual pipeline stage. Without an optimizer they are
            bare.
        optimizer: None: the model only evaluates.
        settings: what the model computes, for checkpoints (`model_settings`).
        activations: what its layers do with theirs; None: they keep them.
        passes: in the place of what Megatron's `get_forward_backward_func` returns; None: that.
        stage_layouts: of stages of unequal layout, first to last; empty: all are alike.
    """

    chunks: list[Any]
    optimizer: Any
    config: Any
    settings: Mapping[str, Any] = field(default_factory=dict)
    activations: Activations | None = None
    passes: Callable[..., Any] | None = None
    stage_layouts: Sequence[str] = ()

    def bare(self) -> list[nn.Module]:
        """The model chunks without their data-parallel wrapper."""
        return list(self.chunks) if self.optimizer is None else [
            chunk.module for chunk in self.chunks]

    def moe_layers(self) -> list[PluginMoELayer]:
        """Our layers on this rank."""
        return [
            m for chunk in self.chunks for m in chunk.modules() if isinstance(m, PluginMoELayer)
        ]

    @property
    def streams(self) -> bool:
        """Whether the weights do."""
        return isinstance(self.chunks[0], StreamedModel)

    def watch(self, recorder: StatsRecorder) -> None:
        """Let a recorder watch copies that are not of activations."""
        if self.streams:
            self.chunks[0].watch(recorder)

    def gather_parameters(self) -> None:
        """See `parameters.gather`. A collective call."""
        if self.optimizer is not None and not self.streams:
            parameters.gather(self.chunks)


def build(args: argparse.Namespace, config: Any, settings: Mapping[str, Any],
          vocab_size: int) -> Training:
    """Model, wrapper and optimizer for this rank; the model alone with `--skip-train`. Megatron's
    groups must be initialised.
    """
    run = run_config(settings)
    if run.offload.weights == "host":
        return _streamed(args, config, settings, vocab_size)
    stages = args.num_virtual_stages_per_pipeline_rank or 1
    wrapper = DistributedDataParallelConfig(
        **values_for(DistributedDataParallelConfig, args), bucket_size=args.ddp_bucket_size,
        grad_reduce_in_fp32=args.bf16 or args.accumulate_allreduce_grads_in_fp32)
    chunks, ensemble = [], ensemble_of(args)
    for stage in range(stages):
        model = _stage(args, config, settings, vocab_size, stage if stages > 1 else None)
        if ensemble:
            add_heads(model, ensemble, vocab_size)
        link(model)
        give_token_ids(model)
        model = Float16Module(config, model) if args.bf16 or args.fp16 else model
        if torch.cuda.is_available() and not args.cpu:
            model = model.cuda()
        if args.skip_train:
            chunks.append(model)
            continue
        # as in Megatron's training: what other chunks send overlaps with the first one's compute
        chunks.append(DistributedDataParallel(config=config, ddp_config=wrapper, module=model,
                                              disable_bucketing=stage > 0))
    if args.skip_train:
        return Training(chunks, None, config, model_settings(args, config))
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = _optimizer(args, config, chunks)
    use_fused_adam(optimizer, args.moe_fused_adam)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap_grad_reduce:  # gradients leave in a step's last micro-batch only
        held_back = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = held_back if stages > 1 else held_back[0]
    activations = activations_of(run.offload, config, [chunk.module for chunk in chunks])
    return Training(chunks, optimizer, config, model_settings(args, config), activations)


def _streamed(args: argparse.Namespace, config: Any, settings: Mapping[str, Any],
              vocab_size: int) -> Training:
    def stage(**part: bool) -> nn.Module:
        return gpt(args, config, layer_spec(args, config, settings, None), vocab_size, **part)

    chunk, optimizer = streamed.build(stage, args, settings)
    return Training([chunk], None if args.skip_train else optimizer, config,
                    model_settings(args, config), passes=chunk.passes)


def _stage(args: argparse.Namespace, config: Any, settings: Mapping[str, Any], vocab_size: int,
           stage: int | None) -> nn.Module:
    here = {"ignore_virtual": False, "vp_stage": stage}
    return gpt(args, config, layer_spec(args, config, settings, stage), vocab_size,
               pre_process=core.call_supported(ps.is_pipeline_first_stage, **here),
               post_process=core.call_supported(ps.is_pipeline_last_stage, **here), vp_stage=stage)


def gpt(args: argparse.Namespace, config: Any, spec: Any, vocab_size: int,
        **part: Any) -> nn.Module:
    """Megatron's `GPTModel`. spec: of its layers. part: of the model, if it is one."""
    # for any usual size the same vocabulary, so that checkpoints fit
    step = math.lcm(128, args.tensor_model_parallel_size)
    padded = -(-vocab_size // step) * step
    return core.call_supported(
        GPTModel, config=config, transformer_layer_spec=spec, vocab_size=padded,
        max_sequence_length=args.max_position_embeddings or args.seq_length,
        position_embedding_type=args.position_embedding_type, rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        parallel_output=True, **part)


def layer_spec(args: argparse.Namespace, config: Any, settings: Mapping[str, Any],
               stage: int | None) -> Any:
    """Megatron's spec of a stage's layers, with ours in it."""
    engine = core.has_transformer_engine()
    spec = core.call_supported(get_gpt_decoder_block_spec, config=config,
                                 use_transformer_engine=engine, vp_stage=stage)
    for native in () if engine else (WrappedTorchNorm, FusedLayerNorm):
        spec = core.changed_spec(
            spec, lambda _, value, native=native: LocalNorm if value is native else value)
    if run_config(settings).pipeline.cuts:
        spec = swap_attention(spec)
    if args.native_moe or not args.num_experts:
        return spec
    return swap_moe(spec, settings, allow_none=True)  # a pipeline stage may have dense layers only


def _optimizer(args: argparse.Namespace, config: Any, chunks: list[Any]) -> Any:
    settings = OptimizerConfig(**values_for(OptimizerConfig, args),
                               params_dtype=config.params_dtype)
    return get_megatron_optimizer(settings, chunks)


def causal_mask(length: int, device: torch.device) -> Tensor | None:
    """[1, 1, T, T], True where nothing is seen; None: attention does without."""
    if core.has_transformer_engine():
        return None
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def forward_step(batches: Iterator[Batch], model: Any, return_schedule_plan: bool = False
                 ) -> tuple[Any, Callable[[Tensor], Any]]:
    """Megatron's `forward_step_func`.

    return_schedule_plan: as under `overlap_moe_expert_parallel_comm`.
    Returns: output or per-token loss (or the plan to compute it), and the function from it to the
        loss and what is logged.
    """
    batch = next(batches)
    length = batch.tokens.shape[1]
    mask = causal_mask(length, batch.tokens.device)
    per_token = get_model_config(model).calculate_per_token_loss
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch.tokens, batch.positions, mask, labels=batch.labels,
                 loss_mask=batch.loss_mask)

    def loss(loss_BS: Tensor) -> Any:
        tokens = batch.loss_mask.sum()
        total = (loss_BS.float() * batch.loss_mask).sum()
        logged = {"lm loss": torch.stack([total.detach(), tokens.detach()])}
        return (total, tokens.to(torch.int), logged) if per_token else (total / tokens.clamp(min=1),
                                                                        logged)

    return output, loss
