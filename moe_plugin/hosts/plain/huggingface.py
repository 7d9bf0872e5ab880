"""Our layer in place of the MoE blocks of a model of Hugging Face's `transformers`.

    model = AutoModelForCausalLM.from_pretrained(path)
    swap_moe_blocks(model, settings={"losses": {"switch": 0.01}})
    loss = model(ids, labels=ids).loss + auxiliary_loss(model)     # train
    model.save_pretrained(out)                                     # in the model's own format
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES, family_of
from moe_plugin.checkpoint.formats.huggingface.family import Block
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
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
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.hosts.plain.blocks import MoEBlock, use_model_masks
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

# settings with which a block computes more than its weights and our settings say
_BLOCK_SETTINGS = dict.fromkeys(("router_jitter_noise", "input_jitter_noise"),
                                "router.input_jitter is close to it, but leaves the experts' input "
                                "alone")


class SwappedBlock(MoEBlock):
    """A block that is called as the MoE block of a `transformers` model.

    Attributes:
        original: the model's own block, without memory, for `restore_moe_blocks`.
        family: how the model's family names and stores what is in the block.
    """

    def __init__(self, moe: MoELayer, block: nn.Module, family: Block) -> None:
        super().__init__(moe)
        # in a tuple, so that it is not a part of this module
        self.original: tuple[nn.Module] = (block.to_empty(device="meta"),)
        self.family = family

    def forward(self, x: Tensor) -> Any:
        """As the model's own block; without logits where that returns them, too."""
        y = super().forward(x)
        return (y, None) if self.family.pair else y

    def train(self, mode: bool = True) -> SwappedBlock:
        """As of every module. A model that was loaded for evaluation and now is trained needs
        balanced experts: it is warned of here.
        """
        if mode and not self.training:
            check_balance(self.moe.router, self.moe.config, self.moe.comm, HostContext())
        return super().train(mode)


@replaces_parameters
def swap_moe_blocks(model: nn.Module, comm: Comm | None = None,
                    settings: Mapping[str, Any] | None = None) -> list[str]:
    """Put our layer, with the same weights, in place of every MoE block of a model.

    What the model computes stays the same up to rounding, what is frozen stays frozen, and routers
    that `transformers` keeps in float32 stay there (`router.fp32`). Each rank of `comm` keeps its
    share of the experts. Collective. `save_pretrained` (collective, too) writes the model's own
    format with all experts, and `load_state_dict` takes what it wrote. Padding by the model's
    `attention_mask` is not routed and gets zeros from the blocks. Until `restore_moe_blocks`, calls
    with `output_router_logits=True` are a `ValueError`.

    Args:
        model: a decoder of `transformers` of a known family (docs/huggingface.md), with or
            without a head. Every rank has the same weights.
        comm: the expert-parallel group; None: the default group, or this rank alone without one.
        settings: of our layers, dotted paths, beyond what the model's configuration says:
            losses, dispatch, parallel.
    Returns: names of the new modules.
    Raises:
        ValueError: the model is of another kind, is swapped already, has quantized weights, or has
            a setting that our layer cannot have; it names it.
    """
    config = _checked(model)
    comm = default_comm() if comm is None else comm
    start, decoder = _decoder_in(model)
    family = block_of(config)
    child = family.module
    swapped = []
    for index, layer in enumerate(decoder.layers):
        block = getattr(layer, child, None)
        if not hasattr(block, "experts"):
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
        setattr(layer, child, SwappedBlock(moe, block, family).train(block.training))
        swapped.append(f"{start}layers.{index}.{child}")
    if not swapped:
        raise ValueError(f"{type(model).__name__} has no MoE block to swap: its layers are dense")
    use_model_masks(model)
    model.register_forward_pre_hook(_refuse_logits, with_kwargs=True)
    model.register_load_state_dict_pre_hook(_load_theirs)
    if hasattr(model, "save_pretrained"):
        cast(Any, model).save_pretrained = _SaveTheirs(model)
    return swapped


def _refuse_logits(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = kwargs.get("output_router_logits")
    if cast(Any, model).config.to_dict().get("output_router_logits") if wanted is None else wanted:
        raise ValueError(
            "output_router_logits=True asks for logits of transformers' own routers, in whose "
            "place our layers are; leave it out, give losses in `settings` and add "
            "auxiliary_loss(model) to the loss, or call restore_moe_blocks(model) first")


class _SaveTheirs:
    """`save_pretrained` of a model with our layers: what it would write with its own blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`, on all ranks, of which the first writes. Adapters
        (`add_lora`) are in the file by our names, beside the weights; `load_state_dict` takes them.

        Raises:
            ValueError: a `Trainer` calls it, on the first of several ranks alone.
        """
        model = cast(Any, self.model)
        ranks = max(swapped.moe.comm.size for _, swapped in swapped_blocks(model))
        if "state_dict" in kwargs and ranks > 1:
            raise ValueError(
                f"save_pretrained(state_dict=...) of experts on {ranks} ranks: must be called on "
                "all of them, and without a state_dict, which has our names; a Trainer saves on "
                "its first rank alone: use save_strategy='no' and model.save_pretrained(folder) "
                "behind it, or experts by name, DistributedConfig(ep_implementation='moe_plugin')")
        kwargs.pop("state_dict", None)
        state = dict(model.state_dict())
        for name, swapped in swapped_blocks(model):
            for key in [key for key in state if key.startswith(f"{name}.")]:
                del state[key]
            block = restored(swapped.moe, swapped.original[0], _config_of(model))
            state |= {f"{name}.{key}": value for key, value in block.state_dict().items()}
            state |= {f"{name}.moe.{key}": value
                      for key, value in full_state(swapped.moe, ADAPTERS).items()}
        writes = kwargs.pop("is_main_process", True) and default_comm().rank == 0
        type(model).save_pretrained(model, *args, state_dict=state, is_main_process=writes,
                                    **kwargs)


def _load_theirs(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before `load_state_dict`: our layers take what has the names of `transformers`, in the model
    or in its files.
    """
    (start, decoder), config = _decoder_in(model), _config_of(model)
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
        place = swapped.moe.placement
        state |= {f"{at}{block.module}.moe.experts.{name}":
                  value[local_window(name, tuple(value.shape), place)]
                  for name, value in whole.items()}


def _carry_frozen(block: nn.Module, moe: MoELayer, state: Mapping[str, Tensor],
                  config: dict[str, Any], index: int) -> None:
    """Let our layer's parameters train where those of the block that it replaces do.

    Args:
        state: of the block, by the names of a whole checkpoint.
        index: of its layer.
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
    if any(swapped_blocks(model)):
        raise ValueError(f"{type(model).__name__} has our layers already: must be called once for "
                         "a model; call restore_moe_blocks(model) before you swap again")
    try:
        config = _config_of(model)
    except AttributeError as error:  # a foreign object: nothing declares what it is
        raise ValueError(f"{type(model).__name__} is not a decoder of transformers; its blocks "
                         f"known here are those of {', '.join(_kinds())}") from error
    if quantization_of(config) is not None:
        raise ValueError(f"{type(model).__name__} has float8 weights, which are not trained; "
                         f"{PLAIN_IN_TRANSFORMERS} (or, where its weights are plain, delete "
                         "model.config.quantization_config)")
    family = family_of(config)
    if family.block is None:
        raise ValueError(f"model_type={family.model_type!r} has no MoE blocks; known: "
                         f"{', '.join(_kinds())}")
    for name, why in _BLOCK_SETTINGS.items():
        if config.get(name) and name not in family.block.keys.values():
            raise ValueError(f"{name}={config[name]} is not supported: {why}; set it to 0")
    if config.get("output_router_logits"):
        raise ValueError(
            "output_router_logits=True asks for logits of transformers' own routers; set it to "
            "False, give losses in `settings` and add auxiliary_loss(model) to the loss")
    return config


def _decoder_in(model: nn.Module) -> tuple[str, Any]:
    """The module of a model of `transformers` that has its decoder's layers, and the beginning of
    the names of what is in it.

    Raises:
        AttributeError: it is none.
    """
    whole = cast(Any, model).get_decoder()
    found = next((module for module in whole.modules()
                  if isinstance(getattr(module, "layers", None), nn.ModuleList)), whole)
    names = {id(module): name for name, module in model.named_modules()}
    found.layers, found.config  # noqa: B018 - whether they are there
    name = names[id(found)]
    return f"{name}." if name else "", found


def _config_of(model: nn.Module) -> dict[str, Any]:
    """Of its decoder: a model that sees, too, has one for each."""
    config: dict[str, Any] = _decoder_in(model)[1].config.to_dict()
    return config


def _kinds() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.block is not None]


def swapped_blocks(model: nn.Module) -> Iterator[tuple[str, SwappedBlock]]:
    """Names and modules that `swap_moe_blocks` has put into a model."""
    return ((name, module) for name, module in model.named_modules()
            if isinstance(module, SwappedBlock))


@replaces_parameters
def restore_moe_blocks(model: nn.Module) -> None:
    """Put the model's own MoE blocks back, with the weights that our layers have now, in their
    dtype, on their device, and frozen where they are: `model` is one of `transformers` again, for
    `save_pretrained` and `generate`.

    Collective; every rank gets all experts.
    """
    config = _config_of(model)
    for name, swapped in swapped_blocks(model):
        if swapped.moe.routed_experts.experts.adapters is not None:
            raise ValueError(f"block {name!r} has adapters, which transformers' own block cannot "
                             "have: must be merged; call merge_lora(model) before")
    for name, swapped in list(swapped_blocks(model)):
        parent, _, child = name.rpartition(".")
        block = restored(swapped.moe, swapped.original[0], config)
        setattr(model.get_submodule(parent), child, block.train(swapped.training))
    _allow_again(model)


def _allow_again(model: nn.Module) -> None:
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_logits:
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
    if isinstance(model.__dict__.get("save_pretrained"), _SaveTheirs):
        del model.save_pretrained
