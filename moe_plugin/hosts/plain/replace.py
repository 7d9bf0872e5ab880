"""Replace the feed-forward modules in any PyTorch model with MoE blocks.

    names = moe_plugin.replace_ffn(model, num_experts=8, every=2)
    loss = criterion(model(x), y) + moe_plugin.auxiliary_loss(model)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_plugin.checkpoint.layers import local_window
from moe_plugin.comm import Comm, default_comm
from moe_plugin.comm.placement import HostContext
from moe_plugin.config import MoEConfig, from_dict, with_overrides
from moe_plugin.config.named import overrides, refuse_timeout
from moe_plugin.experts.ffn import SHARD_AXIS
from moe_plugin.experts.optimizers import replaces_parameters
from moe_plugin.hosts.plain.blocks import MoEBlock, blocks_in, use_model_masks
from moe_plugin.hosts.plain.feed_forward import FeedForward, read_feed_forward
from moe_plugin.layer import MoELayer
from moe_plugin.utils.messages import short

logger = logging.getLogger(__name__)
Match = str | Callable[[str, nn.Module], bool]
_FFN_NAMES = {"w_in_LDF": "w_in_DF", "bias_in_LF": "b_in_F", "w_gate_LDF": "w_gate_DF",
              "bias_gate_LF": "b_gate_F", "w_out_LFD": "w_out_FD", "bias_out_LD": "b_out_D"}


@dataclass(frozen=True)
class _Place:
    name: str
    module: nn.Module
    ffn: FeedForward
    put: Callable[[MoEBlock], None]


@replaces_parameters
def replace_ffn(model: nn.Module, num_experts: int = 8, *, every: int = 1,
                match: Match | None = None, upcycle: bool = True, comm: Comm | None = None,
                **settings: Any) -> list[str]:
    """Replace feed-forward modules of a model with MoE blocks. Collective over `comm`.

    To find feed-forward modules, this function runs each module of the model (see
    `read_feed_forward`). A feed-forward module has two linear layers and an activation, or three
    linear layers with a gate. A linear layer is a module of any class that computes the same output
    as `nn.Linear`. The activation function and the last linear layer may each be followed by
    `nn.Dropout`. Apart from dropout, the module must behave identically in training and
    evaluation mode. The feed-forward networks of `nn.TransformerEncoderLayer` and
    `nn.TransformerDecoderLayer` are also found.

    Each block has the same width, inner width, activation function, biases and dropouts as the
    module it replaces. Every expert starts as a copy of the replaced module (Sparse Upcycling,
    Komatsuzaki et al., 2023). As a result, the outputs of the model stay the same if `top_k` > 1
    and no tokens are dropped. Copies of frozen weights are also frozen. Padding tokens that are
    marked in the model's own masks (see `routing.model_masks`) are not routed.

    Args:
        model: the model, which is modified in place. The weights must be identical on all ranks.
        num_experts: total number of experts on all ranks of the expert-parallel group.
        every: interval between replaced modules. Every n-th feed-forward module is replaced,
            starting with the n-th. The default 1 replaces all feed-forward modules.
        match: regular expression or function that selects the modules to replace. A regular
            expression must match the complete name of a module. A function has the signature
            `f(name, module) -> bool`. Optional. By default, all feed-forward modules are selected.
        upcycle: True to initialize all experts as copies of the replaced module. If False, the
            experts are initialized with random weights.
        comm: communicator of the expert-parallel group. Optional. Defaults to the default process
            group. If there is no default process group, each process stores all experts.
        settings: settings of the MoE layers. See `moe_plugin.config.named.named_config`.
    Returns: the names of the replaced modules, in the order of the model. A module that has several
        names is replaced under all of its names. A module that has several names is counted once,
        and is listed with its first name.
    Raises:
        ValueError: If no module matches, if `match` selects a module that is not a feed-forward
            module, if two modules share parameters, or if a setting is not possible.
    """
    if every < 1:
        raise ValueError(f"every={every} must be >= 1. Use 1 to replace all feed-forward modules")
    found = list(_places(model, match))
    places = found[every - 1::every]
    if not places:
        wanted = "" if match is None else f" with match={short(match)}"
        raise ValueError(
            f"{type(model).__name__} has no feed-forward module to replace{wanted} and "
            f"every={every}: {_why_none(model, every, len(found))}")
    _refuse_tied(places)
    refuse_timeout(comm, settings)
    first = _config(places[0].ffn, num_experts, settings)
    comm = default_comm(first.comm.timeout_s) if comm is None else comm
    # all blocks are built before the first is inserted, so that an error leaves the model unchanged
    blocks = [_block(site, number, num_experts, settings, comm, upcycle)
              for number, site in enumerate(places)]
    for site, block in zip(places, blocks, strict=True):
        site.put(block)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(blocks_in(module)):
            module.use_nested_tensor = False  # blocks do not accept nested tensors
    use_model_masks(model)
    if comm.size == 1:
        _leave_out_of_files(model)
    return [site.name for site in places]


def _leave_out_of_files(model: Any) -> None:
    """Make `save_pretrained` of `transformers` skip the extra state of the layers.

    The extra state is not a tensor, so `save_pretrained` would fail. This function is not called if
    there are several ranks: `save_pretrained` should then fail, because the file would contain the
    experts of only one rank.
    """
    if hasattr(model, "save_pretrained"):
        model._keys_to_ignore_on_save = {
            *(getattr(model, "_keys_to_ignore_on_save", None) or ()),
            *(f"{name}.moe._extra_state" for name, _ in blocks_in(model))}


def _refuse_tied(places: list[_Place]) -> None:
    """Raise a `ValueError` if modules share parameters, because their MoE blocks would not."""
    seen: dict[tuple[int, int], str] = {}
    for site in places:
        for weight in site.ffn.weights.values():
            where = weight.untyped_storage().data_ptr(), int(weight.storage_offset())
            other = seen.setdefault(where, site.name)
            if other != site.name:
                raise ValueError(
                    f"modules {other!r} and {site.name!r} share parameters, but their MoE blocks "
                    "would not. Use the same module in both places, so that they share one block, "
                    "or exclude one of the modules with `match`")


def _why_none(model: nn.Module, every: int, found: int) -> str:
    if any(parameter.is_meta for parameter in model.parameters()):
        return ("feed-forward modules are detected by running them, and this model is on the meta "
                "device. Replace them before the model is moved there, or after its weights are "
                "loaded")
    if not isinstance(model, MoEBlock) and read_feed_forward(model) is not None:
        return ("the model itself is a feed-forward module, and a module cannot replace itself. "
                "Pass a model that contains it, e.g. nn.Sequential(module)")
    if found:
        return (f"it has fewer than {every} feed-forward modules ({found}). Use a smaller `every`, "
                "or 1 to replace all")
    return ("a feed-forward module has two linear maps and an activation, or three linear maps "
            "with a gate, and no training-only part except nn.Dropout. A linear map has a matrix "
            "`weight` and perhaps a `bias`, and computes what nn.Linear computes, without "
            "adapters, quantization or tensor parallelism. Consecutive layers of one "
            "nn.Sequential are not a module: wrap them in their own nn.Sequential. You can also "
            "insert MoEBlock(dim, ...) yourself")


def _places(model: nn.Module, match: Match | None) -> Iterator[_Place]:
    taken: list[str] = []
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    known: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if name == "" or id(module) in known:
            continue
        if any(name.startswith(f"{above}.") for above in taken):
            continue
        if isinstance(module, MoEBlock | MoELayer):
            taken.append(name)
            continue
        wanted = match is None or _matches(match, name, module)
        transformer = isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
        if not wanted:
            continue
        known.add(id(module))
        ffn = _of_transformer(module) if transformer else read_feed_forward(module)
        if ffn is None:
            if match is not None and not transformer:
                raise ValueError(
                    f"module {name!r} ({type(module).__name__}) matches {short(match)}, but is not "
                    "a feed-forward module, which has two linear layers and a known activation, or "
                    "three linear layers with a gate, and no training-only part except "
                    "nn.Dropout. Exclude the module, or insert MoEBlock(dim, ...) there yourself")
            continue
        module_names = names[id(module)]
        taken += module_names
        put = _put_into(module) if transformer else _put_at(model, module_names)
        yield _Place(module_names[0], module, ffn, put)


def _matches(match: Match, name: str, module: nn.Module) -> bool:
    return bool(re.fullmatch(match, name)) if isinstance(match, str) else match(name, module)


class _FFNPart(nn.Module):
    """The feed-forward network of an `nn.Transformer` layer as a separate module.

    In torch, this network is a method of the layer.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.linear1, self.dropout, self.linear2 = layer.linear1, layer.dropout, layer.linear2
        self.activation = layer.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return y


def _of_transformer(layer: Any) -> FeedForward | None:
    return read_feed_forward(_FFNPart(layer))


def _put_at(model: nn.Module, names: list[str]) -> Callable[[MoEBlock], None]:
    """Return a function that inserts a block in place of a module. If the module has several names,
    the block is inserted under all of them.
    """
    ends = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in names]

    def put(block: MoEBlock) -> None:
        for parent, child in ends:
            setattr(parent, child, block)
    return put


def _put_into(layer: Any) -> Callable[[MoEBlock], None]:
    def put(block: MoEBlock) -> None:
        # the layer calls linear2(dropout(activation(linear1(x)))), so only linear1 may act
        layer.linear1, layer.activation = block, nn.Identity()
        layer.dropout, layer.linear2 = nn.Identity(), nn.Identity()
        # disables the fused evaluation path of encoder layers, which reads the weights of linear1
        layer.activation_relu_or_gelu = 0
    return put


def _block(site: _Place, number: int, num_experts: int, settings: dict[str, Any], comm: Comm,
           upcycle: bool) -> MoEBlock:
    ffn = site.ffn
    weight = ffn.weights["w_in_DF"]
    moe = MoELayer(_config(ffn, num_experts, settings), comm,
                   host=HostContext(layer_number=number), dtype=weight.dtype, device=weight.device)
    if upcycle:
        if moe.latent is not None:
            raise ValueError(f"experts.latent_dim={moe.config.experts.latent_dim} cannot be used "
                             f"for module {site.name!r}, because its weights are copied to the "
                             "experts. Set experts.latent_dim to 0, or use upcycle=False")
        if moe.config.router.top_k == 1 and number == 0:
            logger.info("router.top_k=1 multiplies each expert's output by its score, so the "
                        "model's first results differ from those before the replacement; with "
                        "top_k=2 they are equal")
        _copy(ffn, moe, site.name)
        moe.ddp_check.begin(moe.experts)
    after = nn.Dropout(ffn.after) if ffn.after else None
    return MoEBlock(moe, after=after).train(site.module.training)


def _config(ffn: FeedForward, num_experts: int, settings: dict[str, Any]) -> MoEConfig:
    config = from_dict({"model_dim": ffn.width, "num_experts": num_experts, "experts": {
        "kind": "gated_ffn" if ffn.gated else "ffn", "hidden_dim": ffn.hidden,
        "activation": ffn.activation, "dropout": ffn.dropout,
        "bias": any(name.startswith("b_") for name in ffn.weights)}})
    return with_overrides(config, overrides(settings))


@torch.no_grad()
def _copy(ffn: FeedForward, moe: MoELayer, name: str) -> None:
    params = dict(moe.experts.named_parameters())
    for ours in SHARD_AXIS:
        if ours not in params:
            continue
        whole = ffn.weights.get(_FFN_NAMES[ours])
        params[ours].requires_grad_(
            (_FFN_NAMES[ours] if whole is not None else "w_in_DF") not in ffn.frozen)
        if whole is None:
            params[ours].zero_()  # the module has a bias on some of its linear maps only
            continue
        copies = whole.expand(moe.config.num_experts, *whole.shape)
        part = copies[local_window(ours, tuple(copies.shape), moe.placement)]
        if part.shape != params[ours].shape:
            raise ValueError(
                f"module {name!r}: {ours} has the shape {tuple(part.shape)} in the module and "
                f"{tuple(params[ours].shape)} in the MoE layer. Leave the width and kind of the "
                "experts unset, or use upcycle=False")
        params[ours].copy_(part)
