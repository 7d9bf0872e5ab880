"""`load_adapter`: adapters from files of `peft`, each rank its own experts'."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import local_window
from moe_plugin.experts.lora import PLACES
from moe_plugin.hosts.plain.adapters.add import add_lora
from moe_plugin.hosts.plain.adapters.files import STACKS, START
from moe_plugin.hosts.plain.huggingface import swapped_blocks
from moe_plugin.layer import MoELayer


def load_adapter(model: nn.Module, folder: str | Path, freeze: bool = True) -> list[str]:
    """Give experts the adapters of `peft`'s file; each rank takes its own. Collective.

    Args:
        model: as of `save_adapter`; a model of `peft` takes its own adapters from the file, too.
        folder: with `adapter_config.json` and `adapter_model.safetensors`.
        freeze: see `add_lora`.
    Returns: names of the layers that have adapters now.
    Raises:
        ValueError: the file is of another kind of adapter or another model, or has adapters of
            modules that `peft` would have to wrap first.
    """
    import peft
    from safetensors.torch import load_file

    config = peft.LoraConfig.from_pretrained(str(folder))
    if config.peft_type != peft.PeftType.LORA or config.use_dora:
        raise ValueError(f"{str(folder)!r} holds {config.peft_type.value} with use_dora="
                         f"{getattr(config, 'use_dora', False)}: must be LoRA; give another folder")
    rest = load_file(Path(folder) / "adapter_model.safetensors")
    found, pattern = {}, {}
    for name, block in swapped_blocks(model):
        for place, pair in _pairs(name.removeprefix(START), block.moe, rest):
            found[name, place] = pair
            r = pair[0].shape[0] // block.moe.config.num_experts
            pattern[rf"{re.escape(name)}\.moe\.experts\.\d+\.{STACKS[place][0]}"] = r
    if not found:
        raise ValueError(f"{str(folder)!r} has no adapters of experts of {type(model).__name__}: "
                         "must have some of its stacks (target_parameters); call "
                         "swap_moe_blocks(model) first, or let peft load it")
    if rest and not hasattr(model, "peft_config"):
        raise ValueError(f"{str(folder)!r} has {next(iter(rest))!r}, which is of no expert: must "
                         "be in peft's model; call get_peft_model(model, LoraConfig(target_modules="
                         "...)) with the modules of the file first")
    made = add_lora(model, 1, config.lora_alpha, experts=(), rank_pattern=pattern,
                    use_rslora=config.use_rslora, freeze=freeze)
    for (name, place), (a, b) in found.items():
        target = f"{name.removeprefix(START)}.experts.{STACKS[place][1]}"
        layer = model.get_submodule(f"{name}.moe")
        _fill(layer, place, a, b)
        adapters = layer.experts.adapters
        layer.experts.adapters = replace(
            adapters, alphas={**adapters.alphas, place: _alpha(config, target)})
    if rest:
        peft.set_peft_model_state_dict(model, rest)
    return made


def _alpha(config: Any, target: str) -> float:
    """As peft reads its own configuration."""
    return next((alpha for key, alpha in config.alpha_pattern.items()
                 if re.match(rf"(.*\.)?({key})$", target)), config.lora_alpha)


def _pairs(name: str, layer: MoELayer, rest: dict[str, Tensor]
           ) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Place and `lora_A`, `lora_B` of a layer's stacks, which are taken out of `rest`.

    Which adapter is inside of which depends on peft; shapes tell them apart.
    """
    config = layer.config
    sizes = {"in": (config.row_dim, 2 * config.hidden_dim), "out": (config.hidden_dim,
                                                                   config.row_dim)}
    for depth in range(len(sizes)):
        key = f"{START}{name}.experts{'.base_layer' * depth}.lora_"
        if f"{key}A.weight" not in rest:
            continue
        a, b = (rest.pop(f"{key}{which}.weight") for which in "AB")
        place = next((each for each, (inner, outer) in sizes.items()
                      if (a.shape[1], b.shape[0]) == (inner, outer)), None)
        if place is None or a.shape[0] % config.num_experts:
            raise ValueError(f"{key}A.weight and B have shapes {tuple(a.shape)}, {tuple(b.shape)}: "
                             f"must be [r * {config.num_experts}, in], [out, r * "
                             f"{config.num_experts}] of a stack with (in, out) of "
                             f"{' or '.join(map(str, sizes.values()))}; load it into its own model")
        yield place, (a, b)


@torch.no_grad()
def _fill(layer: MoELayer, place: str, a: Tensor, b: Tensor) -> None:
    """A rank's part of `lora_A` and `lora_B`."""
    experts, (name, bs, _) = layer.config.num_experts, PLACES[place]
    values = {name: a.unflatten(0, (experts, -1)).mT}
    halves = b.unflatten(1, (-1, experts)).permute(2, 1, 0).chunk(len(bs), -1)
    values |= dict(zip(reversed(bs), halves, strict=True))
    for each, value in values.items():
        target = layer.experts.get_parameter(each)
        target.copy_(value[local_window(each, tuple(value.shape), layer.placement)])
