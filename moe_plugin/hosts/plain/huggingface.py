"""Our layer in place of the MoE blocks of a model of Hugging Face's `transformers`.

    model = AutoModelForCausalLM.from_pretrained(path)
    swap_moe_blocks(model, settings={"losses": {"switch": 0.01}})
    loss = model(ids, labels=ids).loss + auxiliary_loss(model)     # train
    model.save_pretrained(out)                                     # in the model's own format
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from moe_plugin.checkpoint.formats.huggingface.families import FAMILIES, family_of
from moe_plugin.checkpoint.formats.huggingface.family import Block
from moe_plugin.checkpoint.formats.huggingface.format import state_source, to_neutral
from moe_plugin.checkpoint.formats.huggingface.names import SWAPPED, family_tensors
from moe_plugin.checkpoint.formats.huggingface.quantization import (
    PLAIN_IN_TRANSFORMERS,
    quantization_of,
)
from moe_plugin.checkpoint.layers import (
    LAYER_NAMES,
    NEUTRAL_NAMES,
    full_state,
    layer_settings,
    load_layer,
    local_window,
)
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source, View
from moe_plugin.comm import Comm, default_comm
from moe_plugin.config import from_dict, with_overrides
from moe_plugin.experts.lora import ADAPTER_AXIS
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.hosts.plain.blocks import MoEBlock, use_model_masks
from moe_plugin.layer import MoELayer
from moe_plugin.records import HostContext
from moe_plugin.routing.registry import check_balance

# settings with which a block computes more than its weights and our settings say
_BLOCK_SETTINGS = dict.fromkeys(("router_jitter_noise", "input_jitter_noise"),
                                "router.input_jitter is close to it, but leaves the experts' input "
                                "alone")


_ADAPTERS = tuple(f"experts.{name}" for name in ADAPTER_AXIS)  # in a layer


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
    family = _block_of(config)
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
        weight = _narrowest(block)
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


def _narrowest(block: nn.Module) -> nn.Parameter:
    """A parameter in the model's data type; some may be kept in float32."""
    return min(block.parameters(), key=lambda parameter: parameter.dtype.itemsize)


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
            block = _restored(swapped, _config_of(model))
            state |= {f"{name}.{key}": value for key, value in block.state_dict().items()}
            state |= {f"{name}.moe.{key}": value
                      for key, value in full_state(swapped.moe, _ADAPTERS).items()}
        writes = kwargs.pop("is_main_process", True) and default_comm().rank == 0
        type(model).save_pretrained(model, *args, state_dict=state, is_main_process=writes,
                                    **kwargs)


def _load_theirs(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Before `load_state_dict`: our layers take what has the names of `transformers`, in the model
    or in its files.
    """
    (start, decoder), config = _decoder_in(model), _config_of(model)
    start, block = prefix + start, _block_of(config)
    for index, layer in enumerate(decoder.layers):
        at, swapped = f"{start}layers.{index}.", getattr(layer, block.module, None)
        modules = {block.module, block.module_in_files or block.module}
        names = [name for name in state if name.startswith(tuple(f"{at}{m}." for m in modules))]
        adapters = [name for name in names if name.endswith(_ADAPTERS)]
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
    if _all_alike(block, moe):
        return
    trains = {name: value.requires_grad for name, value in block.named_parameters()}
    flags = to_neutral(state_source({
        name: torch.tensor(trains.get(_below_block(name, config), False)).expand(value.shape)
        for name, value in state.items()}, config))
    for name, parameter in moe.named_parameters():
        key = (MODEL, f"layers.{index}.moe.{NEUTRAL_NAMES[name]}")
        parameter.requires_grad_(bool(flags.read(key).any()))


def _all_alike(source: nn.Module, target: nn.Module) -> bool:
    """Carry `requires_grad` over where it is the same of all parameters; whether it is."""
    found = {parameter.requires_grad for parameter in source.parameters()}
    if len(found) == 1:
        target.requires_grad_(found.pop())
        return True
    return False


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


def _block_of(config: Mapping[str, Any]) -> Block:
    block = family_of(config).block
    assert block is not None, "refused before a model is swapped"
    return block


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
        if swapped.moe.layouts.experts.adapters is not None:
            raise ValueError(f"block {name!r} has adapters, which transformers' own block cannot "
                             "have: must be merged; call merge_lora(model) before")
    for name, swapped in list(swapped_blocks(model)):
        parent, _, child = name.rpartition(".")
        block = _restored(swapped, config)
        setattr(model.get_submodule(parent), child, block.train(swapped.training))
    _allow_again(model)


def _restored(swapped: SwappedBlock, config: dict[str, Any]) -> nn.Module:
    """The model's own block with the weights of our layer, of all ranks. Collective."""
    state = {name: value for name, value in full_state(swapped.moe).items()
             if not name.startswith(_ADAPTERS)}
    # not the router's, which `router.fp32` keeps in another dtype
    block, weight = copy.deepcopy(swapped.original[0]), next(swapped.moe.experts.parameters())
    view = _theirs(state, config)
    _allocate(block, view, weight)
    _load(block, view)
    _carry_back(swapped.moe, block, state, config)
    for parameter in _buffers(swapped.moe, block, config):
        parameter.requires_grad_(False)
    return block


def _buffers(moe: MoELayer, block: nn.Module, config: dict[str, Any]) -> Iterator[nn.Parameter]:
    """Parameters of a block that no gradient moves: they are buffers in our layer."""
    own, names = dict(block.named_parameters()), _block_of(config).names
    ours = {f"router.{name}" for name, _ in moe.router.named_buffers()}
    return (own[theirs] for neutral, theirs in names.items()
            if LAYER_NAMES.get(neutral) in ours and theirs in own)


def _allocate(block: nn.Module, view: Source, like: Tensor) -> None:
    """Memory for a block without any, in the dtype and on the device of `like`. In float32 is what
    `transformers` keeps there, and what `view` says.
    """
    usual = _narrowest(block).dtype
    config = view.values["config"]
    kept = {_below_block(name, config) for (_, name), entry in view.entries.items()
            if entry.keeps_float32}
    wide = {id(value) for name, value in (*block.named_parameters(), *block.named_buffers())
            if name in kept or value.dtype.itemsize > usual.itemsize}

    def made(value: Tensor) -> Tensor:
        dtype = torch.promote_types(like.dtype, torch.float32) if id(value) in wide else like.dtype
        return torch.empty_like(value, dtype=dtype if value.is_floating_point() else value.dtype,
                                device=like.device)

    block._apply(made)


def _allow_again(model: nn.Module) -> None:
    for number, hook in list(model._forward_pre_hooks.items()):
        if hook is _refuse_logits:
            del model._forward_pre_hooks[number], model._forward_pre_hooks_with_kwargs[number]
    if isinstance(model.__dict__.get("save_pretrained"), _SaveTheirs):
        del model.save_pretrained


def _theirs(state: Mapping[str, Tensor], config: dict[str, Any]) -> Source:
    """A layer's tensors by the names of `transformers`."""
    module = _block_of(config).module
    neutral = to_neutral(state_source({f"model.layers.0.{module}.{SWAPPED}{name}": value
                                      for name, value in state.items()}, config))
    return View(neutral, family_tensors(neutral, family_of(config), files=False))


def _below_block(name: str, config: Mapping[str, Any]) -> str:
    """A name of a tensor of a whole checkpoint, in its MoE block."""
    return name.split(f".{_block_of(config).module}.", 1)[1]


def _carry_back(moe: MoELayer, block: nn.Module, state: Mapping[str, Tensor],
                config: dict[str, Any]) -> None:
    """The reverse of `_carry_frozen`. state: of the layer, with all experts."""
    if _all_alike(moe, block):
        return
    trains = {name: value.requires_grad for name, value in moe.named_parameters()}
    flags = _theirs({name: torch.tensor(trains.get(name, True)).expand(value.shape)
                     for name, value in state.items()}, config)
    own = dict(block.named_parameters())
    for key in flags.entries:
        if (name := _below_block(key[1], config)) in own:
            own[name].requires_grad_(bool(flags.read(key).any()))


def _load(block: nn.Module, view: Source) -> None:
    config = view.values["config"]
    values = {_below_block(key[1], config): view.read(key) for key in view.entries}
    missing, unexpected = block.load_state_dict(values, strict=False)
    if missing or unexpected:
        raise CheckpointError(
            f"{type(block).__name__} has other weights than our layer: {[*missing, *unexpected]}; "
            "use a version of transformers that the extra `hf` names")
