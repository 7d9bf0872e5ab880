"""Files of `peft` for adapters on experts of a model of `transformers` with our layers.

`peft` adapts the stacks of experts as parameters (`target_parameters`): a file has, for each stack,
`lora_A` [r * E, in], expert after expert, and `lora_B` [out, r * E], in which an expert's columns
are E apart (`ParamWrapper` of `peft.tuners.lora`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import full_state
from moe_plugin.comm import default_comm
from moe_plugin.experts.lora import PLACES, ExpertRanks
from moe_plugin.hosts.plain.adapters.merge import adapted_layers
from moe_plugin.hosts.plain.huggingface import swapped_blocks

START = "base_model.model."  # of all names in a file, and of those in a model of peft
# of the stack that a place of ours is in `transformers`
STACKS = {"in": ("gate_up", "gate_up_proj"), "out": ("down", "down_proj")}


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of `add_lora` as `peft` does, for the model before `swap_moe_blocks`:
    `PeftModel.from_pretrained(model, folder)`. Collective; the first rank writes.

    Of a model that `peft` has wrapped, its own adapters are in the same file. Experts of one layer
    have one rank and scale there: others get columns of zeros, and their scale moves into b.

    Args:
        model: with blocks of `swap_moe_blocks`, or `peft`'s model around it.
    Raises:
        ValueError: there are no adapters, they are not in such blocks, or they have lengths (DoRA),
            which `peft` has on no stack of experts.
    """
    import peft
    from safetensors.torch import save_file

    layers, config = adapted_layers(model), _config(model)
    named = {f"{name}.moe": name.removeprefix(START) for name, _ in swapped_blocks(model)}
    ours = [layer.experts.adapters for layer in layers.values()]
    if odd := sorted(set(layers) - set(named)):
        raise ValueError(f"layer {odd[0]!r} is in no block of swap_moe_blocks: must be, for peft "
                         "to know its experts; use moe_plugin.checkpoint.save")
    if any(ranks.dora for ranks in ours):
        raise ValueError("use_dora=True: peft has no DoRA on stacks of experts, and no file for "
                         "it: must be False; use moe_plugin.checkpoint.save, or merge_lora(model) "
                         "and save_pretrained")
    wrapped = hasattr(model, "peft_config")
    state = {} if not wrapped else dict(peft.get_peft_model_state_dict(model))
    if not wrapped:
        config.r = max(r for one in ours for each in one.ranks.values() for r in each)
        config.lora_alpha = max(ours[0].alphas.values())
        config.use_rslora = ours[0].rooted
    targets = list(config.target_parameters or ())
    for name, layer in layers.items():
        ranks: ExpertRanks = layer.experts.adapters
        full = full_state(layer, "experts.lora_")
        for depth, place in enumerate(reversed(sorted(ranks.ranks, key=list(PLACES).index))):
            r, target = max(ranks.ranks[place]), f"{named[name]}.experts.{STACKS[place][1]}"
            a_EIR, b_ERO = _of_stack(full, place)
            b_ERO = b_ERO * ranks.scale_LR(place, 0, b_ERO)[..., None] / ranks.scale(place, r)
            key = f"{START}{named[name]}.experts{'.base_layer' * depth}"
            state[f"{key}.lora_A.weight"] = a_EIR.mT.flatten(0, 1)
            state[f"{key}.lora_B.weight"] = b_ERO.permute(2, 1, 0).flatten(1)
            targets.append(target)
            if ranks.rooted != config.use_rslora:
                raise ValueError(f"use_rslora={ranks.rooted} in layer {name!r} and "
                                 f"{config.use_rslora} in others: must be the same; call add_lora "
                                 "with it alike")
            _note(config.rank_pattern, target, r, config.r)
            _note(config.alpha_pattern, target, ranks.alphas[place], config.lora_alpha)
    config.target_parameters, config.inference_mode = targets, True
    if default_comm().rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file({name: value.cpu().contiguous() for name, value in state.items()},
                  Path(folder) / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(folder))


def _config(model: nn.Module) -> Any:
    """Of the adapters that `peft` has in a model; of none."""
    import peft

    if not hasattr(model, "peft_config"):
        return peft.LoraConfig(target_modules=[])
    [config] = model.peft_config.values()
    return copy.deepcopy(config)


def _note(pattern: dict[str, Any], target: str, value: float, usual: float) -> None:
    if value != usual:
        pattern[re.escape(target)] = value


def _of_stack(full: Mapping[str, Tensor], place: str) -> tuple[Tensor, Tensor]:
    """(a [E, I, R], b [E, R, O]) of a stack; gates come before the others in O."""
    a, bs, _ = PLACES[place]
    return full[f"experts.{a}"], torch.cat(
        [full[f"experts.{b}"] for b in reversed(bs) if f"experts.{b}" in full], -1)
