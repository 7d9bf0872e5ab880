"""Build the model of a Hugging Face `config.json` on the meta device, and trace its memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.families import moe_block_of
from moe_plugin.cli.measure.traced_layers import FusedAttention, ModelBytes, trace
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.lora import TARGETS, ExpertRanks
from moe_plugin.hosts.plain.adapters.add import freeze_experts
from moe_plugin.hosts.plain.huggingface import swap_moe_blocks
from moe_plugin.kernels.frozen import FROZEN_FORMATS
from moe_plugin.layer import named_layers_in
from moe_plugin.planner.fine_tuned import BF16, FineTunedModel, FineTuning
from moe_plugin.planner.traced_model import TracedModel
from moe_plugin.utils.messages import short

ATTENTION = "moe_plugin_traced"  # name of `FusedAttention` among transformers' attention functions


def _attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any,
               **__: Any) -> tuple[Tensor, None]:
    out: Tensor = FusedAttention.apply(q, k, v)
    return out.transpose(1, 2).contiguous(), None


def text_config(config: Any) -> Any:
    """Return the settings of the decoder, also for a model with other parts, such as vision."""
    return config.get_text_config(decoder=True)


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build a causal language model on the meta device.

    Args:
        config: a `PreTrainedConfig` of transformers.
        dtype: dtype of the parameters.
    Raises:
        ValueError: If transformers has no causal language model for the settings.
    """
    import transformers

    transformers.AttentionInterface.register(ATTENTION, _attention)
    try:
        with torch.device("meta"):
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(
                text_config(config), dtype=dtype, attn_implementation=ATTENTION)
        if expert_modules(model):
            model.set_experts_implementation("grouped_mm")  # type: ignore[operator]
        return model
    except (ValueError, AttributeError, TypeError, ImportError) as error:
        raise ValueError(f"transformers cannot build a language model for model_type="
                         f"{short(config.model_type)}: {short(error)}. Write the sizes into a "
                         "YAML file as in configs/plans/") from error


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers: the first list of `num_hidden_layers` modules."""
    config: Any = model.config
    return next(list(module) for module in model.modules() if isinstance(module, nn.ModuleList)
                and len(module) == config.num_hidden_layers)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute routed experts, which have 3D parameters [E, *, *]."""
    return [module for name, module in model.named_modules() if name.endswith("experts")
            and any(p.dim() == 3 for p in module.parameters(recurse=False))]


def model_bytes(model: nn.Module, sequence: int, batch: int = 1) -> ModelBytes:
    """Trace a micro-batch of `batch` sequences with `sequence` tokens each."""
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    return trace(model, decoder_layers(model), expert_modules(model),
                 lambda m: m(input_ids=ids, labels=ids, use_cache=False).loss,
                 batch * sequence * choices(model.config))


def choices(config: Any) -> int:
    """Return the number of experts that compute each token."""
    block = moe_block_of({"model_type": config.model_type})
    top_k: int = getattr(config, block.key("top_k") if block else "num_experts_per_tok")
    return top_k


def fine_tune(model: nn.Module, tuning: FineTuning) -> None:
    """Replace the MoE blocks of a model on the meta device, freeze the model, and add adapters.

    Raises:
        ValueError: If the blocks cannot be replaced, or their weights do not fit the format.
    """
    logging.disable(logging.WARNING)  # the warnings are about the training of routers
    try:
        swap_moe_blocks(model)
    finally:
        logging.disable(logging.NOTSET)
    model.to("meta")  # also buffers of routers, which are always built on the CPU
    if tuning.format != BF16:
        freeze_experts(model, tuning.format)
    model.requires_grad_(False)
    for layer in named_layers_in(model).values():
        assert isinstance(layer.experts, FFNExperts)
        layer.experts.add_lora(ExpertRanks(
            {key: [tuning.rank] * layer.config.num_experts for key in TARGETS.values()},
            dict.fromkeys(TARGETS.values(), 1.0)), 0)


def traced_model(values: Mapping[str, Any], file: Path, sequence: int, global_batch: int,
                 tuning: FineTuning | None = None) -> TracedModel:
    """Build the model of a `config.json`, trace it, and return its sizes.

    Args:
        values: the content of `config.json`.
        file: the path of the file, for error messages.
        sequence: number of tokens per sequence.
        global_batch: number of sequences per training step.
        tuning: how the model is fine-tuned. Optional. By default, all parameters are trained.
    Raises:
        ValueError: If transformers does not know the model, if it cannot be fine-tuned, or if it
            has no experts.
    """
    import transformers

    name = values.get("model_type")
    if name not in transformers.CONFIG_MAPPING:
        raise ValueError(f"{short(str(file))}: model_type={short(name)} is unknown to the "
                         "installed transformers. Install a newer version, or write the sizes into "
                         "a YAML file as in configs/plans/")
    config = text_config(transformers.CONFIG_MAPPING[name].from_dict(
        {key: value for key, value in values.items() if key != "quantization_config"}))
    model = build(config, torch.bfloat16)
    experts = expert_modules(model)
    if not experts:
        raise ValueError(f"{short(str(file))}: model_type={short(name)} has no routed experts. "
                         "Plan a model with experts, or convert this one with `moe-plugin upcycle`")
    stacks = [tuple(p.shape) for p in experts[0].parameters() if p.dim() == 3]
    if tuning is not None:
        fine_tune(model, tuning)
    traced = model_bytes(model, sequence)
    made = shape_of(config, traced, stacks, sequence, global_batch)
    return made if tuning is None else _tuned(made, traced, tuning)


def _tuned(model: TracedModel, traced: ModelBytes, tuning: FineTuning) -> FineTunedModel:
    """Return the record of a model with frozen weights and adapters."""
    width, inner = model.model_dim, model.hidden_dim
    bits = {name: sum(math.prod(shape) for i, o in ((width, inner),) * (model.matrices - 1) + (
        (inner, width),) for shape in form.shapes(i, o)) / (model.matrices * width * inner)
        for name, form in FROZEN_FORMATS.items() if not any(
            form.refusal(i, o, 1, False) for i, o in ((width, inner), (inner, width)))}
    adapters = sum(layer.trained for layer in traced.layers)
    return FineTunedModel(**{
        **{f.name: getattr(model, f.name) for f in fields(model)}, "tuning": tuning,
        "code_bytes": sum(layer.frozen_bytes for layer in traced.layers),
        "in_experts": adapters, "format_bytes": {**bits, BF16: 2.0}})


def shape_of(config: Any, traced: ModelBytes, stacks: list[tuple[int, ...]], sequence: int,
             global_batch: int) -> TracedModel:
    """Convert the settings and the traced sizes of a model to the planner's record.

    Args:
        config: the settings of the decoder.
        traced: the traced sizes of a micro-batch of one sequence.
        stacks: the shapes of the weights of one layer's experts, each [E, *, *].
    Raises:
        ValueError: If the layers with experts have no regular distance.
    """
    width, count, sizes = config.hidden_size, stacks[0][0], [math.prod(one) for one in stacks]
    inner = min(sizes) // (count * width)
    positions = [i for i, layer in enumerate(traced.layers) if layer.expert_parameters]
    every = positions[1] - positions[0] if len(positions) > 1 else len(traced.layers)
    if positions != list(range(positions[0], len(traced.layers), every)):
        raise ValueError(f"the layers {short(positions)} with experts have no regular distance, "
                         "which the planner needs. Write the sizes into a YAML file as in "
                         "configs/plans/")
    block = moe_block_of({"model_type": config.model_type})
    top_k = choices(config)
    groups = getattr(config, block.key("groups") if block else "n_group", None) or 1
    in_experts = sum(layer.expert_parameters for layer in traced.layers)
    dense = [layer for layer in traced.layers if not layer.expert_parameters]
    sparse = [layer for layer in traced.layers if layer.expert_parameters]
    return TracedModel(
        layers=len(traced.layers), model_dim=width, heads=config.num_attention_heads,
        ffn_dim=getattr(config, "intermediate_size", None) or inner, vocab=config.vocab_size,
        sequence=sequence, global_batch=global_batch, moe_every=every, moe_first=True,
        experts=count, hidden_dim=inner, top_k=top_k, groups=groups,
        group_top_k=getattr(config, "topk_group", None) or 1,
        gated=sum(sizes) > 2 * count * width * inner,
        dense_first=positions[0], outside=traced.parameters - in_experts,
        in_layers=sum(layer.parameters for layer in traced.layers), in_experts=in_experts,
        dense_saved=_mean([layer.saved for layer in dense]),
        moe_saved=_mean([layer.saved for layer in sparse]), ends_saved=traced.ends_saved,
        row_saved=_mean([layer.expert_saved for layer in sparse]) / (sequence * top_k),
        extra=traced.extra, largest_matrix=traced.largest_matrix, gradient_bytes=2,
        optimizer_bytes=4)


def _mean(sizes: list[int]) -> int:
    return sum(sizes) // len(sizes) if sizes else 0
