"""The function `freeze_experts`, which stores the weights of frozen experts as codes and scales."""

from __future__ import annotations

from torch import nn

from moe_plugin.config.experts import ROUNDED
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.frozen import FrozenExperts, check_format, freeze
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.kernels.frozen import FROZEN_FORMATS
from moe_plugin.layer import MoELayer, named_layers_in


@replaces_parameters
def freeze_experts(model: nn.Module, format: str = "nf4") -> list[str]:
    """Freeze the experts of all MoE layers, and store their weights as codes and scales. This is a
    collective operation.

    The weights are rounded to the format. Biases keep their dtype, and are frozen as well. Experts
    are computed from the codes, one tile at a time, and a decoded copy of all weights never exists.
    Call this function after the weights have been loaded, before `add_lora`, and before the model
    is wrapped (`ddp_model`, `fully_shard_model`) and the optimizer is created. Checkpoints of
    `moe_plugin.checkpoint` contain the codes. To load such a checkpoint, call `freeze_experts` with
    the same format first.

    Args:
        model: model that contains at least one `MoELayer`.
        format: "nf4" or "nf4_double" (bitsandbytes' NF4 in blocks of 64, also with double
            quantization), "mxfp4" (as gpt-oss), "fp8" (e4m3 in blocks of 128 x 128, as
            DeepSeek-V3), or "int8" (one scale per output).
    Returns: the names of all layers.
    Raises:
        ValueError: If the format is unknown, if the model has no `MoELayer`, or if the experts of a
            layer cannot be stored in this format. The error is raised before any layer is changed.
    """
    if format not in FROZEN_FORMATS:
        raise ValueError(f"format={format!r} must be one of {', '.join(FROZEN_FORMATS)}")
    layers = named_layers_in(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no MoELayer with experts to freeze. Call "
                         "swap_moe_blocks(model) or replace_ffn(model) first")
    built = {name: _checked(name, layer, format) for name, layer in layers.items()}
    for name, layer in layers.items():
        freeze(built[name], format)
        layer.follow_parameters()
        layer.ddp_check.begin(layer.experts)
    return list(layers)


def _checked(name: str, layer: MoELayer, format: str) -> FFNExperts:
    """Return the experts of a layer. Raise a `ValueError` if they cannot be frozen."""
    built, where = layer.routed_experts.experts, f"layer {name!r}"
    if built is not layer.experts or not isinstance(built, FFNExperts):
        raise ValueError(f"{where} has experts of the type {type(layer.experts).__name__}, which "
                         "cannot be frozen. Use experts of kind ffn or gated_ffn on the device "
                         "(experts.store=device) without adapters of other libraries")
    if isinstance(built, FrozenExperts):
        raise ValueError(f"{where} is already frozen in the format {built.format}. Call "
                         "freeze_experts once")
    if built.adapters is not None:
        raise ValueError(f"{where} already has adapters, which belong to the weights before "
                         "rounding. Call freeze_experts before add_lora")
    if layer.config.experts.precision in ROUNDED:
        raise ValueError(f"{where} has experts.precision={layer.config.experts.precision}, whose "
                         "kernels do not read codes. Set experts.precision to ieee or tf32")
    if layer.config.batch_invariant:
        raise ValueError(f"{where} has batch_invariant=True, but no batch-invariant kernel reads "
                         "codes. Set batch_invariant to False")
    if built.adds_to_main_grad:
        raise ValueError(f"{where} belongs to Megatron, whose checkpoints cannot store codes. Use "
                         "plain PyTorch or transformers")
    try:
        check_format(built, format)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return built
