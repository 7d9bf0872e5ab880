"""Build the settings, names and weights of `MoELayer`s from a framework-independent source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_plugin.checkpoint.derived import part_of
from moe_plugin.checkpoint.formats.base import convert
from moe_plugin.checkpoint.formats.huggingface.files import write_safetensors
from moe_plugin.checkpoint.neutral import DecoderSettings
from moe_plugin.checkpoint.reshard import merge, window_of_rank
from moe_plugin.checkpoint.source import MODEL, CheckpointError, Source
from moe_plugin.checkpoint.torch_files import SealedWriter
from moe_plugin.comm.group import advice
from moe_plugin.comm.placement import Placement
from moe_plugin.experts.ffn import PART_AXIS, SHARD_AXIS
from moe_plugin.experts.lora import ADAPTER_AXIS
from moe_plugin.layer import MoELayer
from moe_plugin.memory.experts.stored import stored_names, without_values
from moe_plugin.utils.regular_files import check_output, half_of, write_remedy


def write_experts(source: Source, path: str | os.PathLike[str],
                  advance: Callable[[int], None] = lambda _: None) -> None:
    """Write the experts of all layers to a safetensors file. Only one block of a tensor is in
    memory at any time.

    The file is written under a temporary name and renamed to `path` when it is complete.

    Args:
        source: an open checkpoint of any format. See `formats.open_source`.
        path: path of the file, which must end with `.safetensors`.
        advance: function that is called after each write, with the number of bytes written.
    Raises:
        CheckpointError: If the checkpoint has no feed-forward experts, or if the file cannot be
            written.
    """
    view, path = convert(source, "plain"), check_output(path)
    names = [name for field, name in view.entries if field == MODEL
             and name.rpartition(".")[2] in SHARD_AXIS and ".experts." in f".{name}"]
    if not names:
        raise CheckpointError(f"the {source.format} checkpoint has no feed-forward experts to "
                              f"write to {str(path)!r}; use a checkpoint of a model with MoE "
                              "layers")
    half = half_of(path)
    try:
        with SealedWriter(advance) as writer:
            write_safetensors(writer, half, view, names)
        os.replace(half, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}); "
                              f"{write_remedy(error, Path(path).parent)}") from error
    finally:
        half.unlink(missing_ok=True)


# names below a layer: neutral name -> name in `MoELayer.state_dict()`; includes the biases of the
# shared expert
LAYER_NAMES = {
    "router.weight": "router.weight_ED", "router.bias": "router.logit_bias_E",
    "router.expert_bias": "router.bias_E",
    **{f"experts.{name}": f"experts.{name}" for name in SHARD_AXIS},
    **{f"shared.{theirs}.{kind}": f"shared_expert.{ours}.{kind}" for kind in ("weight", "bias")
       for theirs, ours in (("w_in", "fc_in"), ("w_gate", "fc_gate"), ("w_out", "fc_out"))},
    "shared.gate.weight": "shared_expert.gate.weight",
    **{f"latent.{name}.{kind}": f"latent.{name}.{kind}" for kind in ("weight", "bias")
       for name in ("down", "up")},
}
NEUTRAL_NAMES = {ours: theirs for theirs, ours in LAYER_NAMES.items()}


def layer_settings(source: Source, prefix: str) -> dict[str, Any]:
    """Return settings for which an `MoELayer` computes the same function as an MoE layer of a
    framework-independent source.

    Args:
        source: a source with framework-independent names.
        prefix: prefix `layers.N.moe.` of the layer's tensor names. The prefix must be a key of
            `source.layers`.
    Returns: settings for `moe_plugin.config.from_dict`. The settings contain no balance losses.
    Raises:
        CheckpointError: If an `MoELayer` cannot compute the same function. The error message names
            the setting that is not supported.
    """
    s = DecoderSettings.from_dict(source.values["model"])
    shapes = {name.removeprefix(prefix): entry.shape for (field, name), entry
              in source.entries.items() if field == MODEL and name.startswith(prefix)}
    if unknown := sorted(set(shapes) - set(LAYER_NAMES)):
        raise CheckpointError(f"MoELayer has no tensor {prefix + unknown[0]!r}; known tensors: "
                              f"{', '.join(LAYER_NAMES)}")
    experts, row, inner = shapes["experts.w_in_LDF"]
    bias = "experts.bias_in_LF" in shapes
    shared = shapes.get("shared.w_in.weight", (0,))[0]
    for other in ("shared.w_in", "latent.down"):
        if f"{other}.weight" in shapes and bias != (f"{other}.bias" in shapes):
            raise CheckpointError(f"only {prefix}{other} or only the experts have biases, but "
                                  "MoELayer needs biases in both or in neither")
    return {
        "model_dim": shapes["router.weight"][1], "num_experts": experts, "losses": {},
        "router": {**_router(s, "router.expert_bias" in shapes), "bias": "router.bias" in shapes},
        "experts": {
            "kind": "gated_ffn" if s.gated else "ffn", "hidden_dim": inner,
            "activation": s.activation, "bias": bias, "shared_hidden_dim": shared,
            "shared_gate": "shared.gate.weight" in shapes,
            "latent_dim": row if "latent.down.weight" in shapes else 0, "clamp": s.gate_clamp,
            "linear_offset": s.linear_offset, "weights_first": s.weights_first,
        },
    }


def _router(s: DecoderSettings, biased: bool) -> dict[str, Any]:
    if s.router == "sparsemixer":
        return {"name": s.router, "top_k": s.top_k, "mixer_eps": s.mixer_eps,
                "scaling": s.router_scale}
    if s.groups and s.router == "sigmoid" and not biased:
        raise CheckpointError("the router combines expert groups with sigmoid scores but has no "
                              "expert_bias; MoELayer's router group_limited supports softmax "
                              "scores only")
    name = f"{s.router}_bias" if biased else "group_limited" if s.groups else "topk"
    groups = {"groups": s.groups, "group_top_k": s.group_top_k, "group_scores": s.group_scores}
    normalize = "none" if not s.normalize_top_k else "always" if s.top_k == 1 else "before_drop"
    return {"name": name, "top_k": s.top_k, "score": s.router, "scaling": s.router_scale,
            "normalize": normalize,
            **({"normalize_add": s.normalize_add, "normalize_min": s.normalize_min}
               if s.normalize_top_k else {}),
            **(groups if s.groups else {})}


def local_window(name: str, shape: tuple[int, ...], place: Placement) -> tuple[slice, ...]:
    """Return the part of an expert tensor that a rank stores, as a window.

    Args:
        name: name of the tensor without the prefix `experts.`. The name must be a key of
            `PART_AXIS`.
        shape: shape of the tensor with all experts.
        place: placement that determines which experts each rank stores.
    """
    return window_of_rank(shape, place.comm.rank, place.local, place.shards, PART_AXIS[name])


@torch.no_grad()
def load_layer(layer: MoELayer, source: Source, prefix: str) -> None:
    """Copy the weights of an MoE layer in a framework-independent source into an `MoELayer`. Each
    rank reads only its own experts.

    Adapters are not changed.

    Raises:
        CheckpointError: If the names or shapes of the tensors do not match.
    """
    theirs = {name.removeprefix(prefix): entry for (field, name), entry in source.entries.items()
              if field == MODEL and name.startswith(prefix)}
    with without_values(layer):
        state: dict[str, Tensor] = {
            name: value for name, value in layer.state_dict().items()
            if isinstance(value, torch.Tensor) and name.rpartition(".")[2] not in ADAPTER_AXIS}
    on_disk, stored = stored_names(layer), {}
    wanted = {LAYER_NAMES[name]: name for name in theirs}
    if odd := sorted(set(wanted) ^ set(state)):
        raise CheckpointError(f"layer {prefix}: tensor {odd[0]!r} is missing in either the source "
                              "or the layer; build the layer with the settings from "
                              "layer_settings()")
    for ours, name in wanted.items():
        window = None
        if name.startswith("experts."):
            window = local_window(name.removeprefix("experts."), theirs[name].shape,
                                  layer.placement)
        if ours in on_disk:
            whole = source.tensor((MODEL, prefix + name))
            assert window is not None  # only experts are stored on disk
            stored[ours.removeprefix("experts.")] = part_of(whole, window)
            continue
        value = source.read((MODEL, prefix + name), window)
        if value.shape != state[ours].shape:
            raise CheckpointError(f"{prefix + name!r} has shape {tuple(value.shape)} in the source "
                                  f"and {tuple(state[ours].shape)} in the layer; build the layer "
                                  "with the settings from layer_settings()")
        if not value.is_meta:  # models without values are traced by `moe-plugin plan`
            state[ours].copy_(value)
    if stored:
        layer.experts.load_state_dict(stored)
    layer.ddp_check.begin(layer.experts)


def full_state(layer: MoELayer, below: str | tuple[str, ...] = "") -> Mapping[str, Tensor]:
    """Return the state dict of a layer, including the experts of all ranks. The result is equal to
    the state dict of the same layer on a single rank.

    If the experts are distributed over several ranks, all ranks must call this function.

    Args:
        layer: the layer.
        below: prefix or tuple of prefixes. Only tensors whose names start with one of them are
            returned. By default, all tensors are returned.
    """
    state = {name: value.detach() for name, value in layer.state_dict().items()
             if isinstance(value, torch.Tensor) and name.startswith(below)}
    place = layer.placement
    if place.comm.size == 1:
        return state
    parts: list[dict[str, Tensor]] = [{} for _ in range(place.comm.size)]
    for name, value in state.items():
        if name.startswith("experts."):
            with advice(f"each of the {place.comm.size} ranks stores a part of the experts, so "
                        "all ranks must gather them together: call save_pretrained, "
                        "restore_moe_blocks or full_state on every rank, not only on rank 0"):
                gathered = place.comm.all_gather(value.contiguous())
            for rank, part in enumerate(gathered.chunk(place.comm.size)):
                parts[rank][name] = part
    origin = {"num_experts": place.experts, "shards": place.shards}
    return {**state, **merge(parts, {"": origin})}
