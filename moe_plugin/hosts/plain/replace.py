"""MoE blocks in place of the feed-forward modules of any PyTorch model.

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
    """Where a feed-forward module is, and how a block takes its place."""

    name: str
    module: nn.Module
    ffn: FeedForward
    put: Callable[[MoEBlock], None]


@replaces_parameters
def replace_ffn(model: nn.Module, num_experts: int = 8, *, every: int = 1,
                match: Match | None = None, upcycle: bool = True, comm: Comm | None = None,
                **settings: Any) -> list[str]:
    """Put an MoE block in place of a model's feed-forward modules.

    A feed-forward module is found by what it computes (`read_feed_forward`): two linear maps and an
    activation, or three with a gate, with `nn.Dropout` after the activation, at the end, or none,
    and nothing else that acts in training only; those inside `nn.TransformerEncoderLayer` and
    `nn.TransformerDecoderLayer`, too. Its width, inner width, activation, biases and dropouts
    become the block's. Every expert begins as a copy of it (Komatsuzaki et al. 2023, Sparse
    Upcycling), so that with top_k > 1 and no dropped tokens the model computes at first what it
    did before; copies of what is frozen are frozen. Padding by the model's own masks
    (`routing.model_masks`) is not routed. Collective over `comm`.

    Args:
        model: is changed. Every rank has the same weights.
        num_experts: E, in the whole expert-parallel group.
        every: each so many feed-forward modules one is replaced, the last of each run; 1: all.
        match: which modules: a regular expression that the whole name matches, or
            `f(name, module) -> bool`; None: all.
        upcycle: False: experts begin with random weights.
        comm: the expert-parallel group; None: the default group, or this rank alone without one.
        settings: of the layers, see `moe_plugin.config.named.named_config`.
    Returns: names of the modules that were replaced, in the model's order. A module under several
        names counts as one, is replaced under all of them, and is named by the first.
    Raises:
        ValueError: nothing matches; a module that `match` names is no feed-forward module; two
            modules share parameters; a setting does not fit; it names value, bound and remedy.
    """
    if every < 1:
        raise ValueError(f"every={every} must be >= 1; use 1 to replace all")
    places = list(_places(model, match))[every - 1::every]
    if not places:
        wanted = "" if match is None else f" with match={short(match)}"
        raise ValueError(
            f"{type(model).__name__} has no feed-forward module to replace{wanted} and "
            f"every={every}: {_why_none(model, every)}")
    _refuse_tied(places)
    refuse_timeout(comm, settings)
    first = _config(places[0].ffn, num_experts, settings)
    comm = default_comm(first.comm.timeout_s) if comm is None else comm
    # all are built before the first is put in: an error leaves the model as it was
    blocks = [_block(place, number, num_experts, settings, comm, upcycle)
              for number, place in enumerate(places)]
    for place, block in zip(places, blocks, strict=True):
        place.put(block)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(blocks_in(module)):
            module.use_nested_tensor = False  # blocks take tensors that are not nested
    use_model_masks(model)
    if comm.size == 1:
        _leave_out_of_files(model)
    return [place.name for place in places]


def _leave_out_of_files(model: Any) -> None:
    """Let transformers' `save_pretrained` leave out what is not a tensor: where experts come from.

    Of several ranks it would write the experts of one, so there it fails as it does.
    """
    if hasattr(model, "save_pretrained"):
        model._keys_to_ignore_on_save = {
            *(getattr(model, "_keys_to_ignore_on_save", None) or ()),
            *(f"{name}.moe._extra_state" for name, _ in blocks_in(model))}


def _refuse_tied(places: list[_Place]) -> None:
    """`ValueError` for modules that share parameters, whose blocks would each have their own."""
    seen: dict[tuple[int, int], str] = {}
    for place in places:
        for weight in place.ffn.weights.values():
            where = weight.untyped_storage().data_ptr(), int(weight.storage_offset())
            other = seen.setdefault(where, place.name)
            if other != place.name:
                raise ValueError(
                    f"modules {other!r} and {place.name!r} share parameters, which their blocks "
                    "would not: use one module in both places, whose block is then shared, or "
                    "leave one of them out by `match`")


def _why_none(model: nn.Module, every: int) -> str:
    if any(parameter.is_meta for parameter in model.parameters()):
        return ("a module is known by what it computes, and this model is on the meta device; "
                "replace before it is moved there, or after its weights are loaded")
    if not isinstance(model, MoEBlock) and read_feed_forward(model) is not None:
        return ("the model is one itself, and a module cannot be replaced in itself; give the "
                "model that holds it, e.g. nn.Sequential(module)")
    if every > 1:
        return f"it has fewer than {every}; use a smaller number, or 1 to replace all"
    return ("none of its modules is two linear maps and an activation, or three with a gate, where "
            "nn.Dropout alone acts in training (layers in a row of one nn.Sequential are not a "
            "module: put them into one of their own); build MoEBlock(dim, ...) where you want one")


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
                    "two linear maps and an activation, or three with a gate, that one of our "
                    "activations reproduces, with nn.Dropout alone acting in training; leave it "
                    "out, or put MoEBlock(dim, ...) there yourself")
            continue
        own = names[id(module)]
        taken += own
        put = _put_into(module) if transformer else _put_at(model, own)
        yield _Place(own[0], module, ffn, put)


def _matches(match: Match, name: str, module: nn.Module) -> bool:
    return bool(re.fullmatch(match, name)) if isinstance(match, str) else match(name, module)


class _FFNPart(nn.Module):
    """The feed-forward part of a layer of `nn.Transformer`, in which it is a method."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.linear1, self.dropout, self.linear2 = layer.linear1, layer.dropout, layer.linear2
        self.activation = layer.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return y


def _of_transformer(layer: Any) -> FeedForward | None:
    return read_feed_forward(_FFNPart(layer)) if isinstance(layer.linear1, nn.Linear) else None


def _put_at(model: nn.Module, names: list[str]) -> Callable[[MoEBlock], None]:
    """names: all that the module has: where it is shared, the block is."""
    ends = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in names]

    def put(block: MoEBlock) -> None:
        for parent, child in ends:
            setattr(parent, child, block)
    return put


def _put_into(layer: Any) -> Callable[[MoEBlock], None]:
    def put(block: MoEBlock) -> None:
        # the layer calls linear2(dropout(activation(linear1(x))))
        layer.linear1, layer.activation = block, nn.Identity()
        layer.dropout, layer.linear2 = nn.Identity(), nn.Identity()
        # of an encoder's layer: its fused path in evaluation reads the weights of linear1
        layer.activation_relu_or_gelu = 0
    return put


def _block(place: _Place, number: int, num_experts: int, settings: dict[str, Any], comm: Comm,
           upcycle: bool) -> MoEBlock:
    ffn = place.ffn
    weight = ffn.weights["w_in_DF"]
    moe = MoELayer(_config(ffn, num_experts, settings), comm,
                   host=HostContext(layer_number=number), dtype=weight.dtype, device=weight.device)
    if upcycle:
        if moe.latent is not None:
            raise ValueError(f"experts.latent_dim={moe.config.experts.latent_dim} does not fit "
                             f"{place.name}, whose weights become the experts': must be 0, or use "
                             "upcycle=False")
        if moe.config.router.top_k == 1 and number == 0:
            logger.info("router.top_k=1: an expert's output is multiplied by its score, so the "
                        "model does not compute at first what it did before; top_k=2 does")
        _copy(ffn, moe, place.name)
        moe.ddp_check.begin(moe.experts)
    after = nn.Dropout(ffn.after) if ffn.after else None
    return MoEBlock(moe, after=after).train(place.module.training)


def _config(ffn: FeedForward, num_experts: int, settings: dict[str, Any]) -> MoEConfig:
    found = from_dict({"model_dim": ffn.width, "num_experts": num_experts, "experts": {
        "kind": "gated_ffn" if ffn.gated else "ffn", "hidden_dim": ffn.hidden,
        "activation": ffn.activation, "dropout": ffn.dropout,
        "bias": any(name.startswith("b_") for name in ffn.weights)}})
    return with_overrides(found, overrides(settings))


@torch.no_grad()
def _copy(ffn: FeedForward, moe: MoELayer, name: str) -> None:
    own = dict(moe.experts.named_parameters())
    for ours in SHARD_AXIS:
        if ours not in own:
            continue
        whole = ffn.weights.get(_FFN_NAMES[ours])
        own[ours].requires_grad_(
            (_FFN_NAMES[ours] if whole is not None else "w_in_DF") not in ffn.frozen)
        if whole is None:
            own[ours].zero_()  # a bias that the module has on one of its maps only
            continue
        copies = whole.expand(moe.config.num_experts, *whole.shape)
        part = copies[local_window(ours, tuple(copies.shape), moe.placement)]
        if part.shape != own[ours].shape:
            raise ValueError(
                f"{name}: {ours} has shape {tuple(part.shape)} in the module and "
                f"{tuple(own[ours].shape)} in the layer; give expert widths and kinds as they are, "
                "or upcycle=False")
        own[ours].copy_(part)
