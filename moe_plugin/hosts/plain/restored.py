"""A model's own MoE block of `transformers`, made again from our layer, and what both directions
read of a block.
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

ADAPTERS = tuple(f"experts.{name}" for name in ADAPTER_AXIS)  # in a layer


def block_of(config: Mapping[str, Any]) -> Block:
    block = family_of(config).block
    assert block is not None, "refused before a model is swapped"
    return block


def below_block(name: str, config: Mapping[str, Any]) -> str:
    """A name of a tensor of a whole checkpoint, in its MoE block."""
    return name.split(f".{block_of(config).module}.", 1)[1]


def of_experts(block: nn.Module) -> nn.Parameter:
    """A parameter of a block's experts; routers may have another data type."""
    return next(cast(nn.Module, block.experts).parameters())


def all_alike(source: nn.Module, target: nn.Module) -> bool:
    """Carry `requires_grad` over where it is the same of all parameters; whether it is."""
    found = {parameter.requires_grad for parameter in source.parameters()}
    if len(found) == 1:
        target.requires_grad_(found.pop())
        return True
    return False


def restored(moe: MoELayer, original: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Return the model's own block with the weights of our layer, of all ranks. Collective.

    Args:
        moe: our layer.
        original: the block without memory.
        config: of the model.
    """
    state = {name: value for name, value in full_state(moe).items()
             if not name.startswith(ADAPTERS)}
    # not the router's, which `router.fp32` keeps in another dtype
    block, weight = copy.deepcopy(original), next(moe.experts.parameters())
    view = _theirs(state, config)
    _allocate(block, view, weight)
    _load(block, view)
    _carry_back(moe, block, state, config)
    for parameter in _buffers(moe, block, config):
        parameter.requires_grad_(False)
    return block


def _buffers(moe: MoELayer, block: nn.Module, config: dict[str, Any]) -> Iterator[nn.Parameter]:
    """Parameters of a block that no gradient moves: they are buffers in our layer."""
    own, names = dict(block.named_parameters()), block_of(config).names
    ours = {f"router.{name}" for name, _ in moe.router.named_buffers()}
    return (own[theirs] for neutral, theirs in names.items()
            if LAYER_NAMES.get(neutral) in ours and theirs in own)


def _allocate(block: nn.Module, view: Source, like: Tensor) -> None:
    """Memory for a block without any, in the dtype and on the device of `like`. In float32 is what
    `transformers` keeps there, and what `view` says.
    """
    usual = of_experts(block).dtype
    config = view.values["config"]
    kept = {below_block(name, config) for (_, name), entry in view.entries.items()
            if entry.keeps_float32}
    wide = {id(value) for name, value in (*block.named_parameters(), *block.named_buffers())
            if name in kept or value.dtype.itemsize > usual.itemsize}

    def made(value: Tensor) -> Tensor:
        if usual == like.dtype and value.dtype.itemsize < usual.itemsize:
            # a router that transformers keeps in float32, of experts in float64
            return torch.empty_like(value, device=like.device)
        dtype = torch.promote_types(like.dtype, torch.float32) if id(value) in wide else like.dtype
        return torch.empty_like(value, dtype=dtype if value.is_floating_point() else value.dtype,
                                device=like.device)

    block._apply(made)


def _theirs(state: Mapping[str, Tensor], config: dict[str, Any]) -> Source:
    """A layer's tensors by the names of `transformers`."""
    module = block_of(config).module
    neutral = to_neutral(state_source({f"model.layers.0.{module}.{SWAPPED}{name}": value
                                      for name, value in state.items()}, config))
    return View(neutral, family_tensors(neutral, family_of(config), files=False))


def _carry_back(moe: MoELayer, block: nn.Module, state: Mapping[str, Tensor],
                config: dict[str, Any]) -> None:
    """The reverse of `carry_frozen`. state: of the layer, with all experts."""
    if all_alike(moe, block):
        return
    trains = {name: value.requires_grad for name, value in moe.named_parameters()}
    flags = _theirs({name: torch.tensor(trains.get(name, True)).expand(value.shape)
                     for name, value in state.items()}, config)
    own = dict(block.named_parameters())
    for key in flags.entries:
        if (name := below_block(key[1], config)) in own:
            own[name].requires_grad_(bool(flags.read(key).any()))


def _load(block: nn.Module, view: Source) -> None:
    config = view.values["config"]
    values = {below_block(key[1], config): view.read(key) for key in view.entries}
    missing, unexpected = block.load_state_dict(values, strict=False)
    if missing or unexpected:
        raise CheckpointError(
            f"{type(block).__name__} has other weights than our layer: {[*missing, *unexpected]}; "
            "use a version of transformers that the extra `hf` names")
