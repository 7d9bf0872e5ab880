"""Write expert adapters to `peft` files, for `transformers` models with this package's layers.

`peft` treats a stack of expert weights as a parameter that has adapters (`target_parameters`). For
each stack of weights, a file contains two tensors. In `lora_A` [r * E, in], the rows of one expert
are adjacent. In `lora_B` [out, r * E], the columns of one expert are E columns apart (see
`ParamWrapper` in `peft.tuners.lora`).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.layers import full_state
from moe_plugin.comm import default_comm
from moe_plugin.experts.ffn import FFNExperts
from moe_plugin.experts.lora import PLACES, ExpertRanks
from moe_plugin.hosts.plain.adapters import serving
from moe_plugin.hosts.plain.huggingface import SwappedBlock, swapped_blocks
from moe_plugin.hosts.plain.kept_router import kept_experts
from moe_plugin.layer import MoELayer, named_layers_in
from moe_plugin.utils import checksums
from moe_plugin.utils.messages import short
from moe_plugin.utils.regular_files import half_of, make_folder, write_remedy

TENSORS = "adapter_model.safetensors"
FORMATS = ("peft", "vllm", "sglang")
START = "base_model.model."  # prefix of all names in a file and in a peft model


@dataclass(frozen=True)
class PeftStack:
    """Describes how `transformers` stores one stack of expert weights, and how `peft` stores the
    adapters of this stack.

    Attributes:
        name: name of the parameter that contains the stack, in the experts module.
        parts: number of this package's weights that are combined along the output axis. Gate and
            input weights have 2 parts, and output weights have 1 part.
        in_turn: True if gate columns and input columns alternate along the output axis. If False,
            all gate columns precede all input columns.
        flipped: True if `peft` uses the output axis of the stack as the input axis, and therefore
            exchanges the two factors. `peft` exchanges the factors of transposed stacks if their
            module has no attribute `is_transposed` (Llama 4).
    """

    name: str
    parts: int
    in_turn: bool
    flipped: bool

    def to_peft(self, a_EIR: Tensor, bs_ERO: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Convert this package's factors to `lora_A` and `lora_B`. If the gate has a factor `b`,
        this factor must be the first in the list.
        """
        b_ERO = torch.stack(bs_ERO, -1).flatten(-2) if self.in_turn else torch.cat(bs_ERO, -1)
        first, second = (b_ERO, a_EIR.mT) if self.flipped else (a_EIR.mT, b_ERO)
        return first.flatten(0, 1), second.permute(2, 1, 0).flatten(1)

    def from_peft(self, a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, list[Tensor]]:
        """Convert `lora_A` and `lora_B` to this package's factor `a` and a list of factors `b`.
        This method is the inverse of `to_peft`.
        """
        factors = a.unflatten(0, (experts, -1)), b.unflatten(1, (-1, experts)).permute(2, 1, 0)
        first, b_ERO = reversed(factors) if self.flipped else factors
        if self.in_turn:
            return first.mT, list(b_ERO.unflatten(-1, (-1, self.parts)).unbind(-1))
        return first.mT, list(b_ERO.chunk(self.parts, -1))

    def shapes(self, inner: int, outer: int) -> tuple[int, int]:
        """Return two sizes: the input width of `lora_A` and the output width of `lora_B`."""
        outer *= self.parts
        return (outer, inner) if self.flipped else (inner, outer)


def blocks_with_stacks(model: nn.Module) -> Iterator[tuple[str, str, dict[str, PeftStack]]]:
    """Iterate over the modules inserted by `swap_moe_blocks` whose experts `peft` can adapt. Yield
    the name of the module, the name of the model's own block, and the block's weight stacks.
    """
    for name, block in swapped_blocks(model):
        yield name, name.removeprefix(START), stacks_of(block)
    for name, kept in kept_experts(model):
        if name.endswith(".experts") and kept.one_matrix_each:
            yield name, name.removeprefix(START).removesuffix(".experts"), {
                key: PeftStack(stack.name, len(stack.parts), stack.in_turn, False)
                for key, stack in zip(("in", "out"), kept.stacks[:2], strict=True)}


def stacks_of(block: SwappedBlock) -> dict[str, PeftStack]:
    """Return a dict of the weight stacks of a block's experts. The keys are the names in `PLACES`,
    in the order in which the module defines the stacks.
    """
    family, experts = block.family, block.original[0].experts
    flipped = family.transposed and not getattr(experts, "is_transposed", False)
    gated = family.gated
    return {"in": PeftStack(family.gate_up.rpartition(".")[2], 2 if gated else 1,
                            gated and family.in_turn, flipped),
            "out": PeftStack(family.down.rpartition(".")[2], 1, False, flipped)}


def adapted_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Return a dict of all layers that have adapters, by name.

    Raises:
        ValueError: If the model has no adapters.
    """
    layers = {name: layer for name, layer in named_layers_in(model).items()
              if isinstance(layer.experts, FFNExperts) and layer.experts.adapters is not None}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no experts with adapters. Call "
                         "add_lora(model) first")
    return layers


def save_adapter(model: nn.Module, folder: str | Path, format: str = "peft") -> None:
    """Write the adapters that were added by `add_lora` to a file. This is a collective operation,
    so all ranks must call this function. Only the first rank writes the file.

    To load a file in `peft`'s format into a model that has not been changed by `swap_moe_blocks`,
    call `PeftModel.from_pretrained(model, folder)`. If the model is wrapped by `peft`, the file
    also contains the adapters that `peft` itself has added. In the file, all experts of a layer
    have the same rank and the same scaling factor. Factors with a lower rank are therefore padded
    with zeros, and differences in the scaling factor are multiplied into `b`.

    Args:
        model: model with blocks inserted by `swap_moe_blocks`, or a `peft` model around it.
        folder: path of the folder in which the file is written.
        format: "peft", or the layout that a server reads: "vllm" with separate tensors for each
            expert, or "sglang" with stacks of all experts. See `adapters.serving`.
    Raises:
        ValueError: If the model has no adapters, if an adapter belongs to a layer outside the
            blocks that `swap_moe_blocks` inserted, if an adapter uses DoRA (which `peft` does not
            support for stacks of experts), if a server cannot read the adapters of this model
            family, or if the folder is not writable.
    """
    import peft

    if format not in FORMATS:
        raise ValueError(f"format={short(format)} must be {', '.join(FORMATS)}")
    layers, config = adapted_layers(model), _config(model)
    blocks = {f"{name}.moe": (theirs, stacks) for name, theirs, stacks in blocks_with_stacks(model)}
    stored: list[Any] = [layer.experts for layer in layers.values()]
    ours: list[ExpertRanks] = [experts.adapters for experts in stored]
    if odd := sorted(set(layers) - set(blocks)):
        raise ValueError(f"layer {odd[0]!r} is not in a block inserted by swap_moe_blocks, or its "
                         "model does not store its experts as stacks, so peft could not find its "
                         "experts. Use moe_plugin.checkpoint.save")
    if any(ranks.dora for ranks in ours):
        raise ValueError("adapters with use_dora=True cannot be saved, because peft does not "
                         "support DoRA on stacks of experts. Use moe_plugin.checkpoint.save, or "
                         "merge_lora(model) and save_pretrained")
    wrapped = hasattr(model, "peft_config")
    state = {} if not wrapped else dict(peft.get_peft_model_state_dict(model))
    _refuse_inside(state, [theirs for theirs, _ in blocks.values()])
    if format != "peft":
        state = serving.tensors(model, layers, {name: blocks[name][0] for name in layers}, config,
                                state, format)
    else:
        if not wrapped:
            config.r = max(r for lora in ours for each in lora.ranks.values() for r in each)
            config.lora_alpha = max(ours[0].alphas.values())
            config.use_rslora = ours[0].rooted
        _add_stacks(layers, blocks, config, state)
    config.inference_mode = True
    if default_comm().rank == 0:
        _write(state, config, folder)


def _add_stacks(layers: Mapping[str, MoELayer],
                blocks: Mapping[str, tuple[str, dict[str, PeftStack]]], config: Any,
                state: dict[str, Tensor]) -> None:
    """Add the adapters of all layers to `state` and to `config`, in `peft`'s format."""
    targets = list(config.target_parameters or ())
    for name, layer in layers.items():
        experts: Any = layer.experts
        ranks: ExpertRanks = experts.adapters
        full, (theirs, stacks) = full_state(layer, "experts.lora_"), blocks[name]
        for depth, weight in enumerate(reversed(sorted(ranks.ranks, key=list(PLACES).index))):
            r, target = max(ranks.ranks[weight]), f"{theirs}.experts.{stacks[weight].name}"
            a, bs, _ = PLACES[weight]
            scaled = [full[f"experts.{b}"] for b in reversed(bs) if f"experts.{b}" in full]
            scaled = [b * ranks.scale_LR(weight, 0, b)[..., None] / ranks.scale(weight, r)
                      for b in scaled]
            key = f"{START}{theirs}.experts{'.base_layer' * depth}.lora_"
            state[f"{key}A.weight"], state[f"{key}B.weight"] = stacks[weight].to_peft(
                full[f"experts.{a}"], scaled)
            targets.append(target)
            if ranks.rooted != config.use_rslora:
                raise ValueError(f"layer {name!r} has use_rslora={ranks.rooted}, but other layers "
                                 f"have use_rslora={config.use_rslora}. Call add_lora with the "
                                 "same use_rslora for all layers")
            config.rank_pattern = _noted(config.rank_pattern, target, r, config.r)
            config.alpha_pattern = _noted(config.alpha_pattern, target, ranks.alphas[weight],
                                          config.lora_alpha)
    config.target_parameters = targets


def _write(state: Mapping[str, Tensor], config: Any, folder: str | Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

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
        raise ValueError(f"{file} cannot be written ({short(error)}). An existing file was not "
                         f"changed; {write_remedy(error, folder)}") from error


def _refuse_inside(state: Mapping[str, Tensor], blocks: Collection[str]) -> None:
    """Raise a `ValueError` for `peft` adapters on modules of this package's layers."""
    inside = tuple(f"{START}{block}.moe." for block in blocks)
    if names := sorted(name for name in state if name.startswith(inside)):
        raise ValueError(f"{names[0]!r} adapts a module of this package's layer, which does not "
                         "exist in the model before swap_moe_blocks. Pass "
                         r"exclude_modules=r'.*\.moe\..*' to LoraConfig")


def _config(model: Any) -> Any:
    import peft

    if not hasattr(model, "peft_config"):
        return peft.LoraConfig(target_modules=[])
    [config] = model.peft_config.values()
    return copy.deepcopy(config)


def by_pattern(pattern: Mapping[str, Any], target: str, usual: Any) -> Any:
    """Return the value that `peft` uses for a target. `peft` uses the value of the first pattern
    that matches the end of the target's name.
    """
    return next((value for key, value in pattern.items()
                 if re.match(rf"(.*\.)?({key})$", target)), usual)


def _noted(pattern: dict[str, Any], target: str, value: float, usual: float) -> dict[str, Any]:
    """Add an entry to `pattern` so that `peft` uses `value` for this target.

    `peft` sorts patterns alphabetically. The new pattern begins with a space that is repeated zero
    times, so that it precedes all other patterns.
    """
    if by_pattern(pattern, target, usual) == value:
        return pattern
    return {f" {{0}}{re.escape(target)}": value, **pattern}
