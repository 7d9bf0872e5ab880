"""fairseq's language and translation models with some layers replaced by MoE layers.

The layers are replaced after fairseq has built the dense model.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from moe_plugin.config import MoEConfig, ParallelConfig, flatten, to_dict, with_overrides
from moe_plugin.config.options import unread_allowed
from moe_plugin.hosts.fairseq.compat.names import (
    TransformerLanguageModel,
    TransformerModel,
    checkpoint_wrapper,
    gen_parser_from_dataclass,
)
from moe_plugin.hosts.fairseq.groups import (
    Evaluation,
    FairseqGroups,
    current_evaluation,
    make_groups,
)
from moe_plugin.hosts.fairseq.layers import (
    LayerSettings,
    MoEDecoderLayer,
    MoEEncoderLayer,
    run_settings,
)
from moe_plugin.hosts.fairseq.options import MoETransformerFlags
from moe_plugin.hosts.fairseq.refusals import MODEL, values_of
from moe_plugin.hosts.fairseq.translate import (
    check_experts_given,
    gradient_factor,
    layer_config,
    masks_padding,
    run_config,
    setting,
)
from moe_plugin.memory.weights.refusal import refuse_streamed_weights
from moe_plugin.routing.call import hand_token_ids
from moe_plugin.routing.pregate import link
from moe_plugin.routing.routers.hashing import with_vocabulary
from moe_plugin.training.gradients.sync import exclude_experts
from moe_plugin.utils import determinism
from moe_plugin.utils.messages import short

logger = logging.getLogger(__name__)


class MoETransformerLanguageModel(TransformerLanguageModel):
    """fairseq's `transformer_lm` with MoE layers, or unchanged without `--moe-freq`."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> MoETransformerLanguageModel:
        """Build the dense model. Each layer `i` with `(i + 1) % moe_freq == 0` is then replaced."""
        freq = setting(args, "moe_freq", 0) or 0
        _check(args, [freq])
        model = super().build_model(args, task)
        if freq:
            if setting(args, "alternate_decoder_ffn_embed_dim", 0):
                _widen_dense_layers(model.decoder, freq, int(args.alternate_decoder_ffn_embed_dim))
            else:
                _add_experts(model, args, {"decoder": freq})
        return model


class MoETransformerModel(TransformerModel):
    """fairseq's `transformer` with MoE layers in the encoder, the decoder, or both."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Add the command-line arguments of fairseq and those of this package."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, MoETransformerFlags(), delete_default=True)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> MoETransformerModel:
        """Build the dense model. Each layer `i` with `(i + 1) % freq == 0` is then replaced."""
        both = setting(args, "moe_freq", 0) or 0
        freqs = {
            stack: setting(args, f"{stack}_moe_freq", 0) or both for stack in ("encoder", "decoder")
        }
        _check(args, list(freqs.values()))
        model = super().build_model(args, task)
        if any(freqs.values()):
            _add_experts(model, args, freqs)
            refuse_streamed_weights(run_settings(model).offload, "fairseq's translation models")
        return model


def _check(args: Any, freqs: list[int]) -> None:
    for freq in freqs:
        check_experts_given(args, freq)
    if any(freqs):
        MODEL.refuse(values_of(args))


def _add_experts(model: nn.Module, args: Any, freqs: dict[str, int]) -> None:
    groups: FairseqGroups | None = None
    evaluation = current_evaluation()
    for stack, freq in freqs.items():
        if not freq:
            continue
        module = getattr(model, stack)
        # the settings of a finished run cannot be changed, so unused settings are allowed
        with nullcontext() if evaluation is None else unread_allowed():
            config = _stack_config(module, stack, args)
            run = run_config(args)
        if config.deterministic:
            determinism.enable()
        if evaluation is not None:
            config = _for_other_ranks(config)
        groups = groups or _groups(args, config, evaluation)
        settings = LayerSettings(config, groups, masks_padding(args, config),
                                 gradient_factor(args, groups.world),
                                 evaluation=evaluation, run=run)
        _exchange_layers(module, stack, freq, settings)
    if dist.is_initialized() and evaluation is None:
        exclude_experts(model)


def _for_other_ranks(config: MoEConfig) -> MoEConfig:
    """Adapt the settings of a trained model to the ranks that evaluate the model.

    Settings that depend on the number of ranks in the training run are reset. Resetting these
    settings changes the outputs only by rounding errors.
    """
    default = ParallelConfig()
    reset = {"dispatch.equal_tokens": False,  # evaluating ranks have different numbers of tokens
             "comm.network": None, "comm.topology": "detect", **{
                  f"parallel.{name}": getattr(default, name) for name in
                  ("shards", "spill", "speeds", "replan", "guests")}}
    if config.parallel.r:  # 0 fits any number of ranks
        reset["parallel.r"] = None
    before = flatten(to_dict(config))
    left_out = [f"{path}={short(before[path])}" for path, value in reset.items()
                if before[path] != value]
    if left_out:
        logger.info("evaluation ignores these settings, which describe the ranks of the training: "
                    "%s", ", ".join(left_out))
    with unread_allowed():
        return with_overrides(config, reset)


def _groups(args: Any, config: MoEConfig, evaluation: Evaluation | None) -> FairseqGroups:
    if evaluation is not None:
        return evaluation.groups(config.num_experts, config.comm.timeout_s)
    return training_groups(args, setting(args, "moe_expert_parallel_size", 0),
                           config.comm.timeout_s)


def training_groups(args: Any, size: int, timeout_s: float) -> FairseqGroups:
    """Create the process groups of a model that is trained. See `make_groups`."""
    return make_groups(
        size, timeout_s, measured=bool(setting(args, "record_a2a_perf_stats", False)),
        dummy=bool(setting(args, "dummy_a2a", False)))


def _stack_config(module: Any, stack: str, args: Any) -> MoEConfig:
    part = getattr(module.cfg, stack)
    config = layer_config(args, model_dim=part.embed_dim, ffn_dim=part.ffn_embed_dim,
                          activation=str(setting(module.cfg, "activation_fn")))
    return with_vocabulary(config, [len(module.dictionary)], f"the {stack}'s dictionary")


def _exchange_layers(module: Any, stack: str, freq: int, settings: LayerSettings) -> None:
    if len(module.layers) < freq:
        raise ValueError(
            f"--moe-freq {freq} leaves no MoE layer in the {len(module.layers)} {stack} layers. It "
            f"must be <= {len(module.layers)}")
    for number, index in enumerate(range(freq - 1, len(module.layers), freq)):
        settings, old = replace(settings, layer_number=number), module.layers[index]
        layer = (MoEDecoderLayer(module.cfg, old.encoder_attn is None, settings)
                 if stack == "decoder" else MoEEncoderLayer(module.cfg, module.return_fc, settings))
        if module.cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=module.cfg.offload_activations)
        module.layers[index] = layer
    link(module)
    hand_token_ids(module, "prev_output_tokens", "src_tokens")


def _widen_dense_layers(decoder: Any, freq: int, width: int) -> None:
    """Set a different inner width for every `freq`-th layer of a decoder.

    Implements `--alternate-decoder-ffn-embed-dim`.
    """
    for index in range(freq - 1, len(decoder.layers), freq):
        layer = decoder.layers[index]
        layer.fc1 = layer.build_fc1(layer.embed_dim, width, layer.quant_noise,
                                    layer.quant_noise_block_size)
        layer.fc2 = layer.build_fc2(width, layer.embed_dim, layer.quant_noise,
                                    layer.quant_noise_block_size)
