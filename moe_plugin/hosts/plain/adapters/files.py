"""Files of `peft` for adapters on experts of a model of `transformers` with our layers.

`peft` adapts the stacks of experts as parameters (`target_parameters`): a file has, for each stack,
`lora_A` [r * E, in], expert after expert, and `lora_B` [out, r * E], in which an expert's columns
are E apart (`ParamWrapper` of `peft.tuners.lora`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import full_state
from moe_plugin.comm import default_comm
from moe_plugin.experts.lora import PLACES, ExpertRanks
from moe_plugin.hosts.plain.adapters.merge import adapted_layers
from moe_plugin.hosts.plain.huggingface import SwappedBlock, swapped_blocks
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import half_of, make_folder, write_remedy

TENSORS = "adapter_model.safetensors"
START = "base_model.model."  # of all names in a file, and of those in a model of peft


@dataclass(frozen=True)
class PeftStack:
    """How `transformers` stores one of the two stacks of a block's experts, and how `peft` stores
    the adapters on it.

    Attributes:
        name: the name of the stack's parameter in the module of the experts.
        parts: how many of our weights are along its output axis: 2 for gates and inputs, or 1.
        in_turn: gates and inputs take turns along the output axis; otherwise all gates come first.
        flipped: `peft` reads the stack's output axis as its input axis, because the stack is
            transposed and its module lacks `is_transposed` (Llama 4). Both factors then change
            places.
    """

    name: str
    parts: int
    in_turn: bool
    flipped: bool

    def to_peft(self, a_EIR: Tensor, bs_ERO: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return `lora_A` and `lora_B` for our a and for the b of each part, gates first."""
        b_ERO = torch.stack(bs_ERO, -1).flatten(-2) if self.in_turn else torch.cat(bs_ERO, -1)
        first, second = (b_ERO, a_EIR.mT) if self.flipped else (a_EIR.mT, b_ERO)
        return first.flatten(0, 1), second.permute(2, 1, 0).flatten(1)

    def from_peft(self, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, list[Tensor]]:
        """The inverse of `to_peft`."""
        factors = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 1, 0)
        first, b_ERO = reversed(factors) if self.flipped else factors
        if self.in_turn:
            return first.mT, list(b_ERO.unflatten(-1, (-1, self.parts)).unbind(-1))
        return first.mT, list(b_ERO.chunk(self.parts, -1))

    def shapes(self, inner: int, outer: int) -> tuple[int, int]:
        """The sizes that `lora_A` has as its input and `lora_B` as its output."""
        outer *= self.parts
        return (outer, inner) if self.flipped else (inner, outer)


def stacks_of(block: SwappedBlock) -> dict[str, PeftStack]:
    """The stacks of a block's experts, by the names of `PLACES`, in the order of its module."""
    family, experts = block.family, block.original[0].experts
    flipped = family.transposed and not getattr(experts, "is_transposed", False)
    gated = family.gated
    return {"in": PeftStack(family.gate_up.rpartition(".")[2], 2 if gated else 1,
                            gated and family.in_turn, flipped),
            "out": PeftStack(family.down.rpartition(".")[2], 1, False, flipped)}


def save_adapter(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters of `add_lora` as `peft` does, for the model before `swap_moe_blocks`:
    `PeftModel.from_pretrained(model, folder)`. Collective; the first rank writes.

    Of a model that `peft` has wrapped, its own adapters are in the same file. Experts of one layer
    have one rank and scale there: others get columns of zeros, and their scale moves into b.

    Args:
        model: with blocks of `swap_moe_blocks`, or `peft`'s model around it.
    Raises:
        ValueError: there are no adapters, they are not in such blocks, or they have lengths (DoRA),
            which `peft` has on no stack of experts. Or the folder cannot be written.
    """
    import peft
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    layers, config = adapted_layers(model), _config(model)
    blocks = {f"{name}.moe": (name.removeprefix(START), stacks_of(block))
              for name, block in swapped_blocks(model)}
    ours = [layer.experts.adapters for layer in layers.values()]
    if odd := sorted(set(layers) - set(blocks)):
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
    _refuse_inside(state, [theirs for theirs, _ in blocks.values()])
    targets = list(config.target_parameters or ())
    for name, layer in layers.items():
        ranks: ExpertRanks = layer.experts.adapters
        full, (theirs, stacks) = full_state(layer, "experts.lora_"), blocks[name]
        for depth, place in enumerate(reversed(sorted(ranks.ranks, key=list(PLACES).index))):
            r, target = max(ranks.ranks[place]), f"{theirs}.experts.{stacks[place].name}"
            a, bs, _ = PLACES[place]
            scaled = [full[f"experts.{b}"] for b in reversed(bs) if f"experts.{b}" in full]
            scaled = [b * ranks.scale_LR(place, 0, b)[..., None] / ranks.scale(place, r)
                      for b in scaled]
            key = f"{START}{theirs}.experts{'.base_layer' * depth}.lora_"
            state[f"{key}A.weight"], state[f"{key}B.weight"] = stacks[place].to_peft(
                full[f"experts.{a}"], scaled)
            targets.append(target)
            if ranks.rooted != config.use_rslora:
                raise ValueError(f"use_rslora={ranks.rooted} in layer {name!r} and "
                                 f"{config.use_rslora} in others: must be the same; call add_lora "
                                 "with it alike")
            config.rank_pattern = _noted(config.rank_pattern, target, r, config.r)
            config.alpha_pattern = _noted(config.alpha_pattern, target, ranks.alphas[place],
                                          config.lora_alpha)
    config.target_parameters, config.inference_mode = targets, True
    if default_comm().rank == 0:
        tensors = {name: value.cpu().contiguous() for name, value in state.items()}
        file = make_folder(folder) / TENSORS
        half = half_of(file)
        try:
            save_file(tensors, half, metadata={"format": "pt", **checksums.METADATA})
            checksums.seal(half)
            os.replace(half, file)
            config.save_pretrained(str(folder))
        except (OSError, SafetensorError) as error:
            half.unlink(missing_ok=True)
            raise ValueError(f"{file} cannot be written ({short(error)}); a file that was there "
                             f"is untouched; {write_remedy(error, folder)}") from error


def _refuse_inside(state: Mapping[str, Tensor], blocks: Collection[str]) -> None:
    """`ValueError` for adapters of `peft` on modules that only our layers have."""
    inside = tuple(f"{START}{block}.moe." for block in blocks)
    if found := sorted(name for name in state if name.startswith(inside)):
        raise ValueError(f"{found[0]!r} adapts a module of our layer, which the model before "
                         "swap_moe_blocks does not have: must be none; give LoraConfig "
                         r"exclude_modules=r'.*\.moe\..*'")


def _config(model: nn.Module) -> Any:
    """Of the adapters that `peft` has in a model; of none."""
    import peft

    if not hasattr(model, "peft_config"):
        return peft.LoraConfig(target_modules=[])
    [config] = model.peft_config.values()
    return copy.deepcopy(config)


def by_pattern(pattern: Mapping[str, Any], target: str, usual: Any) -> Any:
    """The value that `peft` reads for a target: the first pattern that matches its end counts."""
    return next((value for key, value in pattern.items()
                 if re.match(rf"(.*\.)?({key})$", target)), usual)


def _noted(pattern: dict[str, Any], target: str, value: float, usual: float) -> dict[str, Any]:
    """`pattern`, so that `peft` reads `value` for the target. It stores patterns in the order of
    their characters: the space, which the pattern repeats zero times, comes before all others.
    """
    if by_pattern(pattern, target, usual) == value:
        return pattern
    return {f" {{0}}{re.escape(target)}": value, **pattern}
