"""Convert a layer of this package back to the `transformers` MoE block that it has replaced.

This file also contains helper functions that both directions of the conversion use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.families import family_of
from moe_plugin.checkpoint.formats.huggingface.family import Block
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.formats.huggingface.names import SWAPPED, family_tensors
from moe_plugin.checkpoint.layers import LAYER_NAMES, full_state
from moe_plugin.checkpoint.source import CheckpointError, Source, View
from moe_plugin.experts.lora import ADAPTER_AXIS
from moe_plugin.layer import MoELayer

ADAPTERS = tuple(f"experts.{name}" for name in ADAPTER_AXIS)  # names within a layer


def block_of(config: Mapping[str, Any]) -> Block:
    block = family_of(config).block
    assert block is not None, "refused before a model is swapped"
    return block


def below_block(name: str, config: Mapping[str, Any]) -> str:
    """Convert the name of a tensor in a complete checkpoint to its name within the MoE block."""
    return name.split(f".{block_of(config).module}.", 1)[1]


def of_experts(block: nn.Module) -> nn.Parameter:
    """Return a parameter of the experts in a block. Parameters of the router are not suitable,
    because they may have a different dtype.
    """
    return next(cast(nn.Module, block.experts).parameters())


def all_alike(source: nn.Module, target: nn.Module) -> bool:
    """If `requires_grad` is equal in all of `source`, copy it to `target` and return True."""
    flags = {parameter.requires_grad for parameter in source.parameters()}
    if len(flags) == 1:
        target.requires_grad_(flags.pop())
        return True
    return False


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module of `transformers` that shares the model's configuration, so that
    `set_experts_implementation` also affects the copy.
    """
    configs = [part.config for part in module.modules() if hasattr(part, "config")]
    return copy.deepcopy(module, {id(config): config for config in configs})


def restored(moe: MoELayer, original: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return the model's own block with the weights of this package's layer. The weights are
    gathered from all ranks. This is a collective operation.

    Args:
        moe: the layer of this package.
        original: the model's own block on the meta device.
        config: configuration of the model.
    """
    state = {name: value for name, value in full_state(moe).items()
             if not name.startswith(ADAPTERS)}
    # a weight of an expert, because `router.fp32` keeps the router's weight in another dtype
    block, weight = copied(original), next(moe.experts.parameters())
    view = _theirs(state, config)
    _allocate(block, view, weight)
    _load(block, view)
    _carry_back(moe, block, state, config)
    for parameter in _buffers(moe, block, config):
        parameter.requires_grad_(False)
    return block


def _buffers(moe: MoELayer, block: nn.Module, config: dict[str, Any]) -> Iterator[nn.Parameter]:
    """Yield the block's parameters that are buffers in this package's layer (without gradients)."""
    parameters, names = dict(block.named_parameters()), block_of(config).names
    ours = {f"router.{name}" for name, _ in moe.router.named_buffers()}
    return (parameters[theirs] for neutral, theirs in names.items()
            if LAYER_NAMES.get(neutral) in ours and theirs in parameters)


def _allocate(block: nn.Module, view: Source, like: Tensor) -> None:
    """Allocate memory for a block on the meta device, with the dtype and device of `like`.

    If `transformers` or `view` requires float32 for a tensor, the tensor is allocated in float32 or
    in a more precise dtype.
    """
    usual = of_experts(block).dtype
    config = view.values["config"]
    kept = {below_block(name, config) for (_, name), entry in view.entries.items()
            if entry.keeps_float32}
    wide = {id(value) for name, value in (*block.named_parameters(), *block.named_buffers())
            if name in kept or value.dtype.itemsize > usual.itemsize}

    def made(value: Tensor) -> Tensor:
        if usual == like.dtype and value.dtype.itemsize < usual.itemsize:
            # transformers keeps this router in float32 although the experts are in float64
            return torch.empty_like(value, device=like.device)
        dtype = torch.promote_types(like.dtype, torch.float32) if id(value) in wide else like.dtype
        return torch.empty_like(value, dtype=dtype if value.is_floating_point() else value.dtype,
                                device=like.device)

    block._apply(made)


def _theirs(state: Mapping[str, Tensor], config: dict[str, Any]) -> Source:
    module = block_of(config).module
    neutral = to_neutral(state_source({f"model.layers.0.{module}.{SWAPPED}{name}": value
                                      for name, value in state.items()}, config))
    return View(neutral, family_tensors(neutral, family_of(config), files=False))


def _carry_back(moe: MoELayer, block: nn.Module, state: Mapping[str, Tensor],
                config: dict[str, Any]) -> None:
    """Make each parameter of the block trainable if the corresponding parameter of the layer is
    trainable, and freeze it otherwise. Inverse of `_carry_frozen`.

    state: dict of the layer's tensors, with all experts.
    """
    if all_alike(moe, block):
        return
    trains = {name: value.requires_grad for name, value in moe.named_parameters()}
    flags = _theirs({name: torch.tensor(trains.get(name, True)).expand(value.shape)
                     for name, value in state.items()}, config)
    parameters = dict(block.named_parameters())
    for key in flags.entries:
        if (name := below_block(key[1], config)) in parameters:
            parameters[name].requires_grad_(bool(flags.read(key).any()))


def _load(block: nn.Module, view: Source) -> None:
    config = view.values["config"]
    values = {below_block(key[1], config): view.read(key) for key in view.entries}
    missing, unexpected = block.load_state_dict(values, strict=False)
    if missing or unexpected:
        raise CheckpointError(
            f"the weights of {type(block).__name__} differ from those of this package's layer: "
            f"{[*missing, *unexpected]}. Use a version of transformers that the extra `hf` allows")
