"""Load expert adapters from files of `peft` and from Megatron checkpoints (`load_adapter`)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from moe_plugin.checkpoint.formats.megatron.format import MegatronFormat, common
from moe_plugin.checkpoint.layers import local_window
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.experts.lora import ADAPTER_AXIS, ExpertRanks
from moe_plugin.hosts.plain.adapters.add import add_lora
from moe_plugin.hosts.plain.adapters.files import by_pattern
from moe_plugin.hosts.plain.adapters.load import TARGET_OF, fill, fill_rest, read_stacks
from moe_plugin.layer import MoELayer


def load_adapter(model: nn.Module, folder: str | Path, freeze: bool = True) -> list[str]:
    """Load a `peft` file or a Megatron checkpoint, and add its adapters to the experts of a model.
    Each rank loads only the adapters of its own experts. This is a collective operation.

    Args:
        model: model as described for `save_adapter`. If `peft` wraps the model, `peft`'s own
            adapters are loaded from the file as well.
        folder: path of a folder that contains `adapter_config.json` and
            `adapter_model.safetensors`, or of a distributed Megatron checkpoint (`iter_NNNNNNN`, or
            the folder that contains it) whose run had the setting `finetune.lora_rank`.
        freeze: see `add_lora`.
    Returns: the names of all layers that have adapters.
    Raises:
        ValueError: If the file is damaged, contains adapters of another type, belongs to a
            different model, or contains adapters for modules that `peft` must wrap first.
    """
    if common.is_checkpoint(Path(folder)):
        return _load_trained(model, Path(folder), freeze)
    config, pairs, rest = read_stacks(model, Path(folder))
    pattern = {rf"{re.escape(name)}\.moe\.experts\.\d+\.{TARGET_OF[weight]}": r
               for (name, weight), (_, _, _, r) in pairs.items()}
    adapted = add_lora(model, 1, config.lora_alpha, experts=(), rank_pattern=pattern,
                       use_rslora=config.use_rslora, freeze=freeze)
    for (name, weight), (target, stack, pair, _) in pairs.items():
        layer = cast(MoELayer, model.get_submodule(f"{name}.moe"))
        fill(layer, weight, stack, pair)
        experts: Any = layer.experts
        adapters: ExpertRanks = experts.adapters
        experts.adapters = replace(
            adapters, alphas={**adapters.alphas,
                              weight: by_pattern(config.alpha_pattern, target, config.lora_alpha)})
    fill_rest(model, rest)
    return adapted


@torch.no_grad()
def _load_trained(model: nn.Module, folder: Path, freeze: bool) -> list[str]:
    """Load the adapters of a Megatron checkpoint. Layers correspond by their number."""
    with MegatronFormat().open(folder) as source:
        saved = source.values["megatron"]["meta"].get("finetune") or {}
        if not saved.get("lora_rank"):
            raise ValueError(f"{str(folder)!r} has no description with finetune.lora_rank. Pass a "
                             "checkpoint that a run with --moe-expert-lora-rank saved, without "
                             "--async-save")
        adapted = add_lora(model, saved["lora_rank"], saved["lora_alpha"], freeze=freeze)
        stored = {name for field, name in source.entries if field == MODEL and ".lora_" in name}
        for name in adapted:
            layer = cast(MoELayer, model.get_submodule(name))
            number = re.search(r"\.layers\.(\d+)\.", f".{name}")
            for key in ADAPTER_AXIS:
                target = layer.experts._parameters.get(key)
                if target is None:
                    continue
                theirs = f"decoder.layers.{number and number[1]}.mlp.experts.{key}"
                shape = source.entries[MODEL, theirs].shape if theirs in stored else ()
                window = local_window(key, shape, layer.placement) if shape else ()
                if tuple(part.stop - part.start for part in window) != tuple(target.shape):
                    raise ValueError(f"{str(folder)!r} has {theirs} of the shape {shape}, which "
                                     f"does not fit {name!r}. Pass a model with the layers and "
                                     "widths of the run")
                target.copy_(source.read((MODEL, theirs), window))
                stored.discard(theirs)
        if stored:
            raise ValueError(f"{str(folder)!r} has {min(stored)!r}, but the model has no such "
                             "layer. Pass a model with the layers and widths of the run")
    return adapted
