"""Files of `peft` for adapters on experts of a model of `transformers` with our layers.

`peft` adapts the stacks of experts as parameters (`target_parameters`): a file has, for each stack,
`lora_A` [r * E, in], expert after expert, and `lora_B` [out, r * E], in which an expert's columns
are E apart (peft 0.17 to 0.21, `lora.ParamWrapper`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import full_state, local_window
from moe_plugin.comm import default_comm
from moe_plugin.experts.lora import PLACES, ExpertRanks
from moe_plugin.hosts.plain.adapters import adapted_layers, add_lora
from moe_plugin.hosts.plain.huggingface import swapped_blocks
from moe_plugin.layer import MoELayer

_START = "base_model.model."  # of all names in a file, and of those in a model of peft
# of the stack that a place of ours is in `transformers`
_STACKS = {"in": ("gate_up", "gate_up_proj"), "out": ("down", "down_proj")}


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
    named = {f"{name}.moe": name.removeprefix(_START) for name, _ in swapped_blocks(model)}
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
        config.r, config.lora_alpha = max(_widest(each) for each in ours), max(
            ours[0].alphas.values())
        config.use_rslora = ours[0].rooted
    targets = list(config.target_parameters or ())
    for name, layer in layers.items():
        ranks: ExpertRanks = layer.experts.adapters
        full = full_state(layer, "experts.lora_")
        for depth, place in enumerate(reversed(sorted(ranks.ranks, key=list(PLACES).index))):
            r, target = max(ranks.ranks[place]), f"{named[name]}.experts.{_STACKS[place][1]}"
            a_EIR, b_ERO = _of_stack(full, place)
            b_ERO = b_ERO * ranks.scale_LR(place, 0, b_ERO)[..., None] / ranks.scale(place, r)
            key = f"{_START}{named[name]}.experts{'.base_layer' * depth}"
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
        for place, pair in _pairs(name.removeprefix(_START), block.moe, rest):
            found[name, place] = pair
            r = pair[0].shape[0] // block.moe.config.num_experts
            pattern[rf"{re.escape(name)}\.moe\.experts\.\d+\.{_STACKS[place][0]}"] = r
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
        target = f"{name.removeprefix(_START)}.experts.{_STACKS[place][1]}"
        layer = model.get_submodule(f"{name}.moe")
        _fill(layer, place, a, b)
        adapters = layer.experts.adapters
        layer.experts.adapters = replace(
            adapters, alphas={**adapters.alphas, place: _alpha(config, target)})
    if rest:
        peft.set_peft_model_state_dict(model, rest)
    return made


def _config(model: nn.Module) -> Any:
    """Of the adapters that `peft` has in a model; of none."""
    import peft

    if not hasattr(model, "peft_config"):
        return peft.LoraConfig(target_modules=[])
    [config] = model.peft_config.values()
    return copy.deepcopy(config)


def _widest(ranks: ExpertRanks) -> int:
    return max(r for each in ranks.ranks.values() for r in each)


def _note(pattern: dict[str, Any], target: str, value: float, usual: float) -> None:
    if value != usual:
        pattern[re.escape(target)] = value


def _alpha(config: Any, target: str) -> float:
    """As peft reads its own configuration."""
    return next((alpha for key, alpha in config.alpha_pattern.items()
                 if re.match(rf"(.*\.)?({key})$", target)), config.lora_alpha)


def _of_stack(full: Mapping[str, Tensor], place: str) -> tuple[Tensor, Tensor]:
    """(a [E, I, R], b [E, R, O]) of a stack; gates come before the others in O."""
    a, bs, _ = PLACES[place]
    return full[f"experts.{a}"], torch.cat(
        [full[f"experts.{b}"] for b in reversed(bs) if f"experts.{b}" in full], -1)


def _pairs(name: str, layer: MoELayer, rest: dict[str, Tensor]
           ) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Place and `lora_A`, `lora_B` of a layer's stacks, which are taken out of `rest`.

    Which adapter is inside of which depends on peft; shapes tell them apart.
    """
    config = layer.config
    sizes = {"in": (config.row_dim, 2 * config.hidden_dim), "out": (config.hidden_dim,
                                                                   config.row_dim)}
    for depth in range(len(sizes)):
        key = f"{_START}{name}.experts{'.base_layer' * depth}.lora_"
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
