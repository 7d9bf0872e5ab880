"""Replace the MoE blocks of a Hugging Face `transformers` model with this package's layers.

    model = AutoModelForCausalLM.from_pretrained(path)
    swap_moe_blocks(model, settings={"losses": {"switch": 0.01}})
    loss = model(ids, labels=ids).loss + auxiliary_loss(model)     # training
    model.save_pretrained(out)                                     # writes the model's own format
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.families import moe_block_of
from moe_plugin.checkpoint.formats.huggingface.family import Block
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.formats.huggingface.kept_families import refusal
from moe_plugin.checkpoint.formats.huggingface.names import SWAPPED
from moe_plugin.checkpoint.formats.huggingface.quantization import (
    PLAIN_IN_TRANSFORMERS,
    quantization_of,
)
from moe_plugin.checkpoint.layers import (
    NEUTRAL_NAMES,
    full_state,
    layer_settings,
    load_layer,
    local_window,
)
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.comm import Comm, default_comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import from_dict, with_overrides
from moe_plugin.experts.frozen import FrozenExperts
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.hosts.plain.blocks import MoEBlock, use_model_masks
from moe_plugin.hosts.plain.kept_router import SwappedExperts, kept_experts, swap_experts
from moe_plugin.hosts.plain.restored import (
    ADAPTERS,
    all_alike,
    below_block,
    block_of,
    of_experts,
    restored,
)
from moe_plugin.layer import MoELayer
from moe_plugin.routing.registry import check_balance

# settings that make a block compute something our layers cannot reproduce, with the explanation
_BLOCK_SETTINGS = dict.fromkeys(("router_jitter_noise", "input_jitter_noise"),
                                "router.input_jitter is similar, but does not change the input of "
                                "the experts")


class SwappedBlock(MoEBlock):
    """A block that is called in the same way as the MoE block in a `transformers` model.

    Attributes:
        original: the model's own block on the meta device. `restore_moe_blocks` uses this block.
        family: describes the names and formats of the block's parameters in this model family.
        settings: configuration of the model's decoder.
    """

    def __init__(self, moe: MoELayer, block: nn.Module, family: Block,
                 settings: dict[str, Any]) -> None:
        super().__init__(moe)
        self.settings = settings
        # a tuple keeps the module from being registered as a submodule
        self.original: tuple[nn.Module] = (block.to_empty(device="meta"),)
        self.family = family

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]  # transformers passes no mask
        """Apply the MoE layer to `x`.

        Return a tensor, or a tuple (tensor, None) if the model's block also returns router logits.
        """
        y = super().forward(x)
        return (y, None) if self.family.pair else y

    def restored(self) -> nn.Module:
        """Return the model's own block with the weights of all ranks. Collective."""
        return restored(self.moe, self.original[0], self.settings).train(self.training)

    def train(self, mode: bool = True) -> SwappedBlock:
        """Set training or evaluation mode, as in `nn.Module.train`.

        During training, the load of the experts should be balanced. If the block is set to training
        mode and no setting balances the load, a warning is logged.
        """
        if mode and not self.training:
            check_balance(self.moe.router, self.moe.config, self.moe.comm, HostContext())
        return super().train(mode)


@replaces_parameters
def swap_moe_blocks(model: nn.Module, comm: Comm | None = None,
                    settings: Mapping[str, Any] | None = None) -> list[str]:
    """Replace every MoE block of a model with a layer of this package that has the same weights.
    This is a collective operation.

    The outputs of the model stay the same up to rounding errors. Frozen parameters stay frozen.
    Routers that `transformers` keeps in float32 also stay in float32 (`router.fp32`). Each rank of
    `comm` stores a subset of the experts. After the replacement, `save_pretrained` is a collective
    operation. `save_pretrained` writes the model's own format with all experts, and
    `load_state_dict` accepts the names in this format. Tokens that are masked by the model's
    `attention_mask` are not routed. The blocks return zeros for these tokens. Until
    `restore_moe_blocks` is called, calling the model with `output_router_logits=True` raises a
    `ValueError`.

    In families whose router has no counterpart among our settings (docs/families.md), only the
    experts are replaced, and the model keeps its own routers. `output_router_logits` then works as
    before, and `settings` cannot contain losses and settings of the router.

    Args:
        model: a `transformers` model of a supported family (docs/families.md), with or without
            a head. The weights must be identical on all ranks.
        comm: communicator of the expert-parallel group. Optional. Defaults to the default process
            group. If there is no default process group, each process stores all experts.
        settings: additional settings of the layers (losses, dispatch, parallel), by dotted path.
            These settings are added to the settings that follow from the model's configuration.
    Returns: the names of the new modules.
    Raises:
        ValueError: If the model is not supported, its blocks were replaced before, its weights are
            quantized, or this package's layer does not support one of its settings.
    """
    config = _checked(model)
    comm = default_comm() if comm is None else comm
    if moe_block_of(config) is None:
        names = swap_experts(model, comm, settings or {})
        if not names:
            raise ValueError(refusal(config))
        _follow(model)
        return names
    start, decoder = _decoder_in(model)
    family = block_of(config)
    child = family.module
    swapped = []
    for index, layer in enumerate(decoder.layers):
        block = getattr(layer, child, None)
        if block is None or not hasattr(block, "experts"):
            continue
        state = {f"model.layers.{index}.{child}.{name}": value
                 for name, value in block.state_dict().items()}
        prefix = f"layers.{index}.moe."
        source = to_neutral(state_source(state, config))
        weight = of_experts(block)
        wide = source.entries[MODEL, f"{prefix}router.weight"].dtype != weight.dtype
        chosen = with_overrides(from_dict(layer_settings(source, prefix)),
                                {**({"router.fp32": True} if wide else {}), **(settings or {})})
        moe = MoELayer(chosen, comm, host=HostContext(training=block.training),
                       dtype=weight.dtype, device=weight.device)
        load_layer(moe, source, prefix)
        _carry_frozen(block, moe, state, config, index)
        setattr(layer, child, SwappedBlock(moe, block, family, config).train(block.training))
        swapped.append(f"{start}layers.{index}.{child}")
    if not swapped:
        raise ValueError(f"{type(model).__name__} has no MoE block to replace, because all of its "
                         "layers are dense. Pass a model with MoE blocks")
    model.register_forward_pre_hook(_refuse_logits, with_kwargs=True)
    _follow(model)
    return swapped


def _follow(model: nn.Module) -> None:
    """Read the masks of the model, and save and load in the model's own format."""
    use_model_masks(model)
    model.register_load_state_dict_pre_hook(_load_theirs)
    if hasattr(model, "save_pretrained"):
        cast(Any, model).save_pretrained = _SaveTheirs(model)


def _refuse_logits(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_router_logits")
    if cast(Any, model).config.to_dict().get("output_router_logits") if wanted is None else wanted:
        raise ValueError(
            "output_router_logits=True requests the logits of transformers' own routers, which "
            "swap_moe_blocks has replaced. Leave it out (in TRL, router_aux_loss_coef=0.0), pass "
            "`losses` in `settings` and add auxiliary_loss(model) to the loss, or call "
            "restore_moe_blocks(model) first")


def refuse_one_of_several(layers: Iterable[MoELayer], kwargs: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if a `Trainer` calls `save_pretrained` on its first rank, but experts
    are distributed over several ranks. `Trainer` is the only caller that passes `state_dict`.
    """
    ranks = max(layer.comm.size for layer in layers)
    if "state_dict" in kwargs and ranks > 1:
        raise ValueError(
            f"save_pretrained(state_dict=...) does not work with experts on {ranks} ranks. Call "
            "save_pretrained(folder) without state_dict on all ranks. A Trainer saves on its first "
            "rank only: use save_strategy='no' and call model.save_pretrained(folder) after "
            "training, or select the experts by name with "
            "DistributedConfig(ep_implementation='moe_plugin')")


class _SaveTheirs:
    """A `save_pretrained` that writes the model's own format for this package's layers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Save like `PreTrainedModel.save_pretrained`. Call this method on all ranks. Rank 0 writes
        the files.

        If the experts have adapters (`add_lora`), the file also contains these adapters. The
        adapters have the names of this package, which `load_state_dict` accepts.

        Raises:
            ValueError: If there are several ranks and a `Trainer` saves only on the first rank, or
                if experts are frozen (`freeze_experts`).
        """
        model = cast(Any, self.model)
        _refuse_frozen(model)
        refuse_one_of_several((swapped.moe for _, swapped in _replaced(model)), kwargs)
        kwargs.pop("state_dict", None)
        state = dict(model.state_dict())
        for name, swapped in _replaced(model):
            for key in [key for key in state if key.startswith(f"{name}.")]:
                del state[key]
            block = swapped.restored()
            state |= {f"{name}.{key}": value for key, value in block.state_dict().items()}
            state |= {f"{name}.moe.{key}": value
                      for key, value in full_state(swapped.moe, ADAPTERS).items()}
        writes = kwargs.pop("is_main_process", True) and default_comm().rank == 0
        type(model).save_pretrained(model, *args, state_dict=state, is_main_process=writes,
                                    **kwargs)


def _load_theirs(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Convert tensors with `transformers` names to tensors of this package's layers. This function
    is a hook that runs before `load_state_dict`.

    The tensors can have either the names in the model or the names in its files. The tensors of a
    model that keeps its routers must have the names in the model.
    """
    for name, kept in kept_experts(model):
        kept.take(state, f"{prefix}{name}.")
    if not any(swapped_blocks(model)):
        return
    (start, decoder), config = _decoder_in(model), settings_of(model)
    start, block = prefix + start, block_of(config)
    for index, layer in enumerate(decoder.layers):
        at, swapped = f"{start}layers.{index}.", getattr(layer, block.module, None)
        modules = {block.module, block.module_in_files or block.module}
        names = [name for name in state if name.startswith(tuple(f"{at}{m}." for m in modules))]
        adapters = [name for name in names if name.endswith(ADAPTERS)]
        names = [name for name in names if name not in adapters]
        if not names or not isinstance(swapped, SwappedBlock) or any(
                name.startswith(f"{at}{block.module}.{SWAPPED}") for name in names):
            continue
        whole = {name.rpartition(".")[2]: state.pop(name) for name in adapters}
        theirs = {f"model.{name.removeprefix(start)}": state.pop(name) for name in names}
        source = to_neutral(state_source(theirs, config))
        load_layer(swapped.moe, source, f"layers.{index}.moe.")
        state |= {f"{at}{block.module}.{name}": value
                  for name, value in swapped.state_dict().items()}
        placement = swapped.moe.placement
        state |= {f"{at}{block.module}.moe.experts.{name}":
                  value[local_window(name, tuple(value.shape), placement)]
                  for name, value in whole.items()}


def _carry_frozen(block: nn.Module, moe: MoELayer, state: Mapping[str, Tensor],
                  config: dict[str, Any], index: int) -> None:
    """Make each parameter of the new layer trainable if the corresponding parameter of the replaced
    block is trainable, and freeze it otherwise.

    Args:
        block: the `transformers` block that was replaced.
        moe: the layer of this package.
        state: dict of the block's tensors, by their names in a complete checkpoint.
        config: configuration of the model.
        index: index of the decoder layer.
    """
    if all_alike(block, moe):
        return
    trains = {name: value.requires_grad for name, value in block.named_parameters()}
    flags = to_neutral(state_source({
        name: torch.tensor(trains.get(below_block(name, config), False)).expand(value.shape)
        for name, value in state.items()}, config))
    for name, parameter in moe.named_parameters():
        key = (MODEL, f"layers.{index}.moe.{NEUTRAL_NAMES[name]}")
        parameter.requires_grad_(bool(flags.read(key).any()))


def _checked(model: nn.Module) -> dict[str, Any]:
    if any(_replaced(model)):
        raise ValueError(f"swap_moe_blocks was already called for this {type(model).__name__}. "
                         "Call restore_moe_blocks(model) before you swap its blocks again")
    try:
        config = settings_of(model)
    except AttributeError as error:  # an unknown object declares nothing about its type
        raise ValueError(f"{type(model).__name__} is not a transformers model. The supported "
                         "families are listed in docs/families.md") from error
    if quantization_of(config) is not None:
        raise ValueError(f"{type(model).__name__} has float8 weights, which cannot be trained; "
                         f"{PLAIN_IN_TRANSFORMERS} (or, if its weights are not quantized, delete "
                         "model.config.quantization_config)")
    if (block := moe_block_of(config)) is None:
        return config
    for name, why in _BLOCK_SETTINGS.items():
        if config.get(name) and name not in block.keys.values():
            raise ValueError(f"{name}={config[name]} is not supported: {why}. Set it to 0")
    if config.get("output_router_logits"):
        raise ValueError(
            "output_router_logits=True requests the logits of transformers' own routers. Set it to "
            "False, pass `losses` in `settings` and add auxiliary_loss(model) to the loss")
    return config


def _decoder_in(model: nn.Module) -> tuple[str, Any]:
    """Return the module that contains the decoder layers, and the prefix of its parameter names.

    Raises:
        AttributeError: If the model contains no `transformers` decoder.
    """
    whole = cast(Any, model).get_decoder()
    decoder = next((module for module in whole.modules()
                    if isinstance(getattr(module, "layers", None), nn.ModuleList)), whole)
    names = {id(module): name for name, module in model.named_modules()}
    decoder.layers, decoder.config  # noqa: B018 - raises AttributeError if one is missing
    name = names[id(decoder)]
    return f"{name}." if name else "", decoder


def settings_of(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of the model's decoder, or of a model that has no decoder. A
    multimodal model has several configurations, one of which is that of the decoder.
    """
    try:
        config = _decoder_in(model)[1].config
    except AttributeError:
        config = cast(Any, model).config
    settings: dict[str, Any] = config.to_dict()
    return settings


def swapped_blocks(model: nn.Module) -> Iterator[tuple[str, SwappedBlock]]:
    """Iterate over the names and modules of all blocks that `swap_moe_blocks` has inserted."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, SwappedBlock))


def _replaced(model: nn.Module) -> list[tuple[str, SwappedBlock | SwappedExperts]]:
    return [*swapped_blocks(model), *kept_experts(model)]


@replaces_parameters
def restore_moe_blocks(model: nn.Module) -> None:
    """Undo `swap_moe_blocks`: put the model's own MoE blocks back, with the current weights of this
    package's layers. This is a collective operation.

    The restored weights have the same dtype and device as those of this package's layers. Frozen
    weights stay frozen. Afterwards, `model` is an ordinary `transformers` model that can be used
    with `save_pretrained` and `generate`. After this call, every rank stores all experts.
    """
    _refuse_frozen(model)
    for name, swapped in _replaced(model):
        if swapped.moe.routed_experts.experts.adapters is not None:
            raise ValueError(f"block {name!r} has adapters, which transformers' own block does not "
                             "support. Call merge_lora(model) first")
    for name, swapped in _replaced(model):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped.restored())
    _allow_again(model)


def _refuse_frozen(model: nn.Module) -> None:
    """Raise a `ValueError` if experts are stored as codes, which the model's own blocks lack."""
    for name, swapped in _replaced(model):
        if isinstance(built := swapped.moe.routed_experts.experts, FrozenExperts):
            raise ValueError(f"block {name!r} is frozen in the format {built.format}, which "
                             "transformers' own block does not support. Use save_adapter(model, "
                             "folder) for adapters, or moe_plugin.checkpoint.save for the model")


def _allow_again(model: nn.Module) -> None:
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_logits:
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
    if isinstance(model.__dict__.get("save_pretrained"), _SaveTheirs):
        del model.save_pretrained
