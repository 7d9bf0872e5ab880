"""Functions that add low-rank adapters to the experts of a model, merge them into the weights, and
store the weights of frozen experts as codes and scales (`freeze_experts`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.config.experts import ROUNDED
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.frozen import FrozenExperts, check_format, freeze, merge_frozen
from moe_plugin.experts.lora import (
    ADAPTER_AXIS,
    TARGETS,
    ExpertRanks,
    as_adapters,
    of_each_weight,
)
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.hosts.plain.adapters.files import adapted_layers, save_adapter
from moe_plugin.hosts.plain.adapters.trainer import extend_trainer
from moe_plugin.hosts.plain.huggingface import refuse_one_of_several
from moe_plugin.kernels.expert_ffn import LowRank
from moe_plugin.kernels.frozen import FROZEN_FORMATS
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.memory.experts.frozen import freeze_stored
from moe_plugin.memory.experts.stored import StoredExperts
from moe_plugin.utils.messages import short

# parts of the names of parameters that adapter files contain
_SAVED = ("lora_", ".modules_to_save.", ".trainable_tokens_")


def add_lora(model: nn.Module, rank: int = 8, alpha: float = 16.0, *,
             targets: Collection[str] = tuple(TARGETS),
             experts: Collection[int] | None = None,
             rank_pattern: Mapping[str, int] | None = None, use_rslora: bool = False,
             use_dora: bool = False, freeze: bool = True) -> list[str]:
    """Add low-rank adapters to the experts of a model. Adding adapters does not change the output
    of the model until the adapters are trained.

    Expert `l` uses the weight `w + (alpha / r) * a @ b` instead of `w`. The factor `a` is
    initialized in the same way as in `peft`, and `b` is initialized to 0. Call this function on all
    ranks after the weights of the model have been loaded. Call this function before the model is
    wrapped (`ddp_model`, `fully_shard_model`) and before the optimizer is created.

    Args:
        model: model that contains at least one `MoELayer`.
        rank: rank r of the adapters.
        alpha: numerator of the scaling factor of the adapters. The scaling factor is `alpha / r`,
            or `alpha / sqrt(r)` with `use_rslora`.
        targets: list of the layers that get adapters: "gate_up", "down", or both. "gate_up" stands
            for the first linear layers, which share one factor `a` like `peft`'s adapters of
            `gate_up_proj`. "down" stands for the last linear layer.
        experts: global indices of the experts to which adapters are added. For all other experts,
            the factors are filled with zeros. Optional. Defaults to all experts.
        rank_pattern: dict that maps regular expressions to ranks. A regular expression must match
            the end of `NAME.experts.INDEX.TARGET`, where NAME is the name of the layer. If several
            regular expressions match, the first one is used. If the rank of an expert is 0, the
            expert gets no adapter.
        use_rslora: True to use the scaling factor `alpha / sqrt(r)` (rsLoRA).
        use_dora: True to train the norms of the adapted weight's columns separately (DoRA).
        freeze: True to freeze all other parameters of the model. If False, only the expert weights
            in the adapted layers are frozen.
    Returns: the names of all layers that have adapters.
    Raises:
        ValueError: If the model has no `MoELayer`, if the experts do not support adapters or
            already have adapters, or if the arguments do not select any expert.
    """
    _check(rank, targets, rank_pattern or {})
    layers = dict(_layers(model))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no MoELayer with experts to adapt. Call "
                         "swap_moe_blocks(model) or replace_ffn(model) first. For a transformers "
                         "model that keeps its own experts, use peft's target_parameters")
    made = {name: ExpertRanks(_ranks(name, layer, rank, targets, experts, rank_pattern or {}),
                              dict.fromkeys(TARGETS.values(), alpha), use_rslora, use_dora)
            for name, layer in layers.items()}
    if not any(layer_ranks.ranks for layer_ranks in made.values()):
        raise ValueError(f"experts={short(experts)} with rank_pattern={short(rank_pattern)} leaves "
                         "no expert with an adapter. Pass 0-based global indices, and patterns "
                         "that match NAME.experts.INDEX.TARGET")
    for parameter in model.parameters() if freeze else ():
        _freeze(parameter)
    for name, layer in layers.items():
        if made[name].ranks:
            _add(layer, made[name])
    if hasattr(model, "save_pretrained"):
        extend_trainer()
        frozen = any(isinstance(layer.experts, FrozenExperts) for layer in layers.values())
        if frozen or hasattr(model, "peft_config"):
            cast(Any, model).save_pretrained = _SavesAdapters(model)
    return [name for name in layers if made[name].ranks]


def _add(layer: MoELayer, ranks: ExpertRanks) -> None:
    for parameter in layer.experts.parameters():
        _freeze(parameter)
    seed = torch.randint(2**31, (1,), device="cpu")
    if layer.comm.size > 1:
        seed = layer.comm.broadcast(seed.to(layer.comm.device))
    built = layer.experts
    assert isinstance(built, FFNExperts)
    built.add_lora(ranks, int(seed))
    layer.follow_parameters()


class _SavesAdapters:
    """A `save_pretrained` method that writes adapters only: for `peft` models, whose own method
    would leave out the adapters of `add_lora`, and for models with frozen experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: str, *args: Any, **kwargs: Any) -> None:
        """Save all adapters. See `save_adapter`. This is a collective operation.

        Raises:
            ValueError: If other parameters are trained, too, or if a `Trainer` saves on one of
                several ranks.
        """
        refuse_one_of_several(adapted_layers(self.model).values(), kwargs)
        trained = [name for name, value in self.model.named_parameters() if value.requires_grad]
        if lost := [name for name in trained if not any(part in name for part in _SAVED)]:
            raise ValueError(
                f"{lost[0]!r} is trained, but save_pretrained writes only adapters here. Call "
                "add_lora with freeze=True, or name the module in modules_to_save of a LoraConfig "
                "and wrap the model in peft before add_lora, or save with moe_plugin.checkpoint")
        save_adapter(self.model, save_directory)


def _freeze(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(False)
    parameter.grad = None


def _check(rank: int, targets: Collection[str], pattern: Mapping[str, int]) -> None:
    if rank < 1:
        raise ValueError(f"rank={rank} must be >= 1. Use rank_pattern={{...: 0}} for experts "
                         "without an adapter")
    if (least := min(pattern.values(), default=0)) < 0:
        raise ValueError(f"rank_pattern={short(dict(pattern))} contains {least}, but ranks must be "
                         ">= 0. Use 0 for experts without an adapter")
    if isinstance(targets, str) or not set(targets) <= set(TARGETS) or not targets:
        raise ValueError(f"targets={short(targets)} must be a list of {', '.join(TARGETS)}. For "
                         "routers use peft's target_parameters")


def _layers(model: nn.Module) -> Iterator[tuple[str, MoELayer]]:
    """Yield all MoE layers of a model with their names. Raise a `ValueError` if the experts of a
    layer do not support adapters.
    """
    for name, layer in named_layers_in(model).items():
        built, where = layer.experts, f"layer {name!r}"
        if not isinstance(built, FFNExperts):
            raise ValueError(f"{where} has experts of the type {type(built).__name__}, which do "
                             "not support adapters. Use experts of kind ffn or gated_ffn on the "
                             "device (experts.store=device) without other adapters, call "
                             "freeze_experts first, or use peft")
        if layer.config.experts.precision in ROUNDED:
            raise ValueError(f"{where} has experts.precision={layer.config.experts.precision}, "
                             "whose kernels do not support adapters. Set experts.precision to ieee "
                             "or tf32")
        if built.w_in_LDF.is_meta:
            raise ValueError(f"{where} is on the meta device and has no weights yet. Call add_lora "
                             "after the weights are loaded")
        yield name, layer


def _ranks(name: str, layer: MoELayer, rank: int, targets: Collection[str],
           experts: Collection[int] | None, pattern: Mapping[str, int]) -> dict[str, list[int]]:
    """Return a dict from each target with adapters to a list of the experts' adapter ranks."""
    built, count = layer.experts, layer.config.num_experts
    assert isinstance(built, FFNExperts)
    if built.adapters is not None:
        raise ValueError(f"layer {name!r} already has adapters. Call merge_lora(model) before you "
                         "add new adapters")
    if unknown := [e for e in experts or () if not 0 <= e < count]:
        raise ValueError(f"experts={short(experts)} contains {unknown[0]}, but layer {name!r} has "
                         f"the experts 0..{count - 1}. Leave this index out")

    def of(expert: int, target: str) -> int:
        full = f"{name}.experts.{expert}.{target}"
        chosen = experts is None or expert in experts
        return next((r for key, r in pattern.items() if re.match(rf"(.*\.)?({key})$", full)),
                    rank if chosen else 0)

    by_target = {target: [of(expert, target) for expert in range(count)] for target in targets}
    return {TARGETS[target]: ranks for target, ranks in by_target.items() if any(ranks)}


def merge_lora(model: nn.Module, keep: bool = False, requantize: bool = False) -> None:
    """Merge the adapters into the experts' weights. This is a collective operation.

    Args:
        model: model whose experts have adapters.
        keep: True to keep the adapters, so that `unmerge_lora` can undo the merge. After the merge,
            the kept adapters have no effect. If False, the adapters are deleted, and the weights
            and biases of the experts become trainable again. Frozen experts (`freeze_experts`)
            stay frozen.
        requantize: True to round the merged weights of frozen experts to their format again. This
            changes the output of the model, and cannot be undone.
    Raises:
        ValueError: If the model has no adapters, if the adapters have been merged before, or if the
            experts are frozen and `requantize` is False or `keep` is True.
    """
    layers = adapted_layers(model)
    for name, layer in layers.items():
        ranks = layer.routed_experts.experts.adapters
        assert ranks is not None
        if ranks.merged is not None:
            raise ValueError(f"the adapters of layer {name!r} are already merged. Call "
                             "unmerge_lora(model) first")
        if isinstance(layer.experts, FrozenExperts) and (keep or not requantize):
            raise ValueError(f"layer {name!r} is frozen in the format {layer.experts.format}, so "
                             "merged weights must be rounded again, which cannot be undone. Call "
                             "merge_lora(model, requantize=True), or save_adapter(model, folder)")
    for layer in layers.values():
        built = layer.experts
        assert isinstance(built, FFNExperts) and built.adapters is not None
        if isinstance(built, FrozenExperts):
            merge_frozen(built)
            _without_adapters(built)
            continue
        with torch.no_grad():
            merged = as_adapters(built.used_adapters())
            for w_LIO, low_LIO, factor_LO in _sums(built, merged):
                w_LIO += low_LIO
                w_LIO *= factor_LO
        built.adapters = replace(built.adapters, merged=merged)
        if not keep:
            _without_adapters(built)
            built.requires_grad_()


def _without_adapters(built: FFNExperts) -> None:
    built.adapters = None
    for adapter in ADAPTER_AXIS:
        built.register_parameter(adapter, None)


def unmerge_lora(model: nn.Module) -> None:
    """Undo `merge_lora(model, keep=True)` up to rounding errors.

    Raises:
        ValueError: If the adapters are not merged.
    """
    for name, layer in adapted_layers(model).items():
        built = layer.experts
        assert isinstance(built, FFNExperts) and built.adapters is not None
        if built.adapters.merged is None:
            raise ValueError(f"the adapters of layer {name!r} are not merged. Call "
                             "merge_lora(model, keep=True) first")
        with torch.no_grad():
            for w_LIO, low_LIO, factor_LO in _sums(built, built.adapters.merged):
                w_LIO /= factor_LO
                w_LIO -= low_LIO
        built.adapters = replace(built.adapters, merged=None)


def _sums(experts: FFNExperts, adapters: Mapping[str, LowRank]
          ) -> Iterator[tuple[Tensor, Tensor, Tensor | float]]:
    """For each weight [L, I, O], yield the weight, the matrix product to add to the weight, and the
    factor by which the sum is multiplied.
    """
    for w_LIO, (a_LIR, b_LRO, factor_LO) in of_each_weight(adapters, experts.weights_of()):
        yield w_LIO, torch.bmm(a_LIR, b_LRO), 1.0 if factor_LO is None else factor_LO[:, None]


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
        if isinstance(experts := built[name], StoredExperts):
            freeze_stored(experts, format)
        else:
            freeze(experts, format)
        layer.follow_parameters()
        layer.ddp_check.begin(layer.experts)
    return list(layers)


def _checked(name: str, layer: MoELayer, format: str) -> FFNExperts | StoredExperts:
    """Return the experts of a layer. Raise a `ValueError` if they cannot be frozen."""
    stored: Any = layer.routed_experts.experts
    where = f"layer {name!r}"
    built: Any = stored.template if isinstance(stored, StoredExperts) else stored
    if stored is not layer.experts or not isinstance(built, FFNExperts):
        raise ValueError(f"{where} has experts of the type {type(layer.experts).__name__}, which "
                         "cannot be frozen. Use experts of kind ffn or gated_ffn without adapters "
                         "of other libraries")
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
        raise ValueError(f"{where} belongs to Megatron, which must freeze experts before it "
                         "creates its gradient buffers. Use --moe-frozen-experts")
    try:
        check_format(built, format)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return cast("FFNExperts | StoredExperts", stored)
