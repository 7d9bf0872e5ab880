"""Non-tensor entries of a distributed checkpoint: parameter groups of optimizers, and objects of
modules.

Megatron uses one optimizer for shared parameters and another optimizer for expert parameters. The
parameters of this package's experts always belong to the second optimizer. The parameters of
Megatron's own experts belong to the second optimizer only with expert parallelism. Without expert
parallelism, these parameters belong to the parameter groups of the first optimizer.
"""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_plugin.checkpoint.derived import item_of
from moe_plugin.checkpoint.neutral import OPTIMIZER_VALUES
from moe_plugin.checkpoint.source import MODEL, MODEL_ONLY, CheckpointError, Derived, Key, Source
from moe_plugin.utils.messages import short

# Names in Megatron's distributed checkpoints: of files, and of tensors as stored and by layer.
#
# If all layers are equal, Megatron stores one tensor for all of them: its first axis counts layers,
# and the name has no number (`decoder.layers.mlp.router.weight`). Otherwise each layer has separate
# tensors. Optimizer state is named `optimizer.state.FIELD.` and the parameter's name. In sources,
# tensors are separated by layer and every name has a number (`decoder.layers.3.mlp.router.weight`).
LATEST, METADATA = "latest_checkpointed_iteration.txt", ".metadata"
META, COMMON, BACKEND = "moe_plugin.json", "common.pt", "metadata.json"
OURS, NATIVE = "megatron", "megatron_native"  # names of the formats

LAYERS = "decoder.layers."
# Megatron's names of float32 master weights: in the distributed optimizer, and in other optimizers
MASTERS = ("param", "fp32_param")
MASTER = "master"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.(.+)")
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
NATIVE_EXPERTS = "mlp.experts.experts."
# Settings of `TransformerConfig` and arguments of the script that Megatron has renamed: the name
# that this package uses -> the newer name.
RENAMED = {"cuda_graph_scope": "cuda_graph_modules"}  # 0.18 and newer accept both names


def by_layer(tensors: Mapping[str, Derived]) -> Iterator[Derived]:
    """Yield the tensors of a checkpoint. Each key consists of a field and a name with the layer
    index.
    """
    for stored, tensor in tensors.items():
        field, name = split_field(stored)
        if is_stacked(name):
            for layer in range(tensor.entry.shape[0]):
                key = (field, f"{LAYERS}{layer}.{name.removeprefix(LAYERS)}")
                yield replace(item_of(tensor, layer), key=key)
        else:
            yield replace(tensor, key=(field, name))


def is_stacked(name: str) -> bool:
    """Return true if the tensor of this name contains the values of all layers."""
    return name.startswith(LAYERS) and not _NUMBERED.fullmatch(name)


def split_field(stored: str) -> tuple[str, str]:
    """Split the name of a stored tensor into the field and the parameter name."""
    match = _OPTIMIZER.fullmatch(stored)
    if not match:
        return MODEL, stored
    return MASTER if match[1] in MASTERS else match[1], match[2]


def stored_name(key: Key, master: str) -> str:
    """Return the name, including the layer index, under which a tensor is stored.

    master: one of `MASTERS`.
    """
    field, name = key
    if field == MODEL:
        return name
    return f"optimizer.state.{master if field == MASTER else field}.{name}"


def without_number(name: str) -> tuple[str, int | None]:
    """Remove the layer index from a tensor name, and return the shortened name and the index. If
    the name contains no layer index, return None as the index.
    """
    match = _NUMBERED.fullmatch(name)
    return (LAYERS + match[2], int(match[1])) if match else (name, None)


def layer_numbers(names: Iterable[str]) -> list[int]:
    """Return the sorted indices of the layers that occur in `names`."""
    return sorted({int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match})


def moe_layers(tensors: Iterable[Derived]) -> dict[str, dict[str, Any]]:
    """Return the number of experts in every MoE layer, keyed by the layer's name prefix. The layers
    may contain this package's experts or Megatron's own experts.
    """
    layers: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        prefix, experts, _ = tensor.key[1].partition("experts.")
        if tensor.key[0] == MODEL and experts and prefix.endswith("mlp."):
            layers[prefix] = {"num_experts": tensor.entry.shape[0]}
    return layers


def is_native(names: Iterable[str]) -> bool:
    """Return true if any of the names belongs to Megatron's own experts."""
    return any(NATIVE_EXPERTS in name for name in names)


def object_name(key: str, offsets: Iterable[int] = (0,), shape: Iterable[int] = (1,)) -> str:
    """Return the name of one object that belongs to a module. Objects with the same key are
    arranged in a grid of shape `shape`. `offsets` is the position of the object in this grid.
    """
    return f"{key}/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, shape))}"


def is_checkpoint(path: Path) -> bool:
    """Return true if a folder is, or contains, a distributed checkpoint of Megatron."""
    if (path / LATEST).is_file():
        if (path / LATEST).stat().st_size > 16:
            return False
        path = folder_of(path)
    return (path / METADATA).is_file() and (path / BACKEND).is_file()


def folder_of(path: Path) -> Path:
    """Return the folder of a checkpoint. If `path` contains several checkpoints, return the folder
    of the newest checkpoint.

    Raises:
        CheckpointError: If the file that contains the iteration of the newest checkpoint is
            damaged.
    """
    if not (path / LATEST).is_file():
        return path
    text = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return path / text
    if not text.isdecimal() or len(text) > 15:
        raise CheckpointError(
            f"{str(path / LATEST)!r} contains {short(text)}, but it must contain the number of an "
            "iteration; write the number of one of the iter_... folders into the file")
    return path / f"iter_{int(text):07d}"


def format_of(path: Path) -> str:
    """Return `megatron_native` if the checkpoint contains Megatron's own experts, otherwise
    `megatron`. Only the index of the checkpoint is read.
    """
    content = (folder_of(path) / METADATA).read_bytes()
    return NATIVE if NATIVE_EXPERTS.encode() in content else OURS


BY_PARAMETER = "fully_reshardable"  # sharding type of an optimizer's state
# values that distinguish groups, in addition to `is_expert_parallel`
_GROUP_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr")
# modules whose `_extra_state` Megatron requests for each layer, including those of Transformer
# Engine
_MODULES = ("input_layernorm", "self_attention.linear_qkv", "self_attention.core_attention",
            "self_attention.q_layernorm", "self_attention.k_layernorm",
            "self_attention.linear_proj", "pre_mlp_layernorm")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
# modules in MoE layers, if the name of a tensor contains the key
_OF_MOE = {".shared_experts.": ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
           "_latent_proj.": ("mlp.fc1_latent_proj", "mlp.fc2_latent_proj")}


def refuse_other_optimizers(source: Source) -> None:
    """Raise `CheckpointError` if Megatron's optimizer state is not stored by parameter name."""
    kept = source.values.get("megatron") or {}
    if kept.get("sharding_type") not in (None, BY_PARAMETER) and not source.values.get(MODEL_ONLY):
        raise CheckpointError(
            f"the checkpoint has optimizer state of the sharding type {kept['sharding_type']!r}, "
            "which only the ranks that wrote it can read. Supported are the sharding type "
            f"{BY_PARAMETER!r} and optimizers without --use-distributed-optimizer. Load the "
            "checkpoint with the original ranks and save it with "
            "--dist-ckpt-optim-fully-reshardable, or convert only the model (--model-only, into "
            "format megatron or megatron_native)")


def optimizer_parts(state: Any) -> list[dict[Any, Any]]:
    """Return the list of optimizers in the common state. The common state contains either one
    optimizer or a chain of several optimizers.
    """
    if not isinstance(state, dict) or not state:
        return []
    if all(isinstance(key, int) for key in state):
        return [state[key] for key in sorted(state)]
    return [state]


def regrouped(state: Any, own_optimizer: bool, biases: bool) -> Any:
    """Return the entry "optimizer" of the common state, with or without a separate optimizer for
    experts.

    Args:
        state: entry "optimizer" of `common.pt`. The entry is either the state of a single
            optimizer, or a mapping from the index of each optimizer in a chain to its state.
        own_optimizer: whether experts have a separate optimizer.
        biases: whether the experts have parameters without weight decay, such as the biases of
            Megatron's own experts.
    """
    parts = optimizer_parts(state)
    if not parts:
        return state
    groups = [group for part in parts for group in _groups(part)]
    dense = [group for group in groups if not group.get("is_expert_parallel")]
    if not own_optimizer:
        return _with_groups(parts[0], dense)
    experts = _expert_groups(groups, dense, biases)
    return {0: _with_groups(parts[0], dense), 1: _with_groups(parts[-1], experts)}


def fitted(state: Any, wanted: Any) -> Any:
    """Return the entry "optimizer" of the common state, converted to the current run's optimizers
    and parameter groups.

    Args:
        state: entry "optimizer" of the checkpoint.
        wanted: optimizer state of the current run, which contains all entries of the parameter
            groups.
    """
    parts, targets = optimizer_parts(state), optimizer_parts(wanted)
    if not parts or not targets or [list(map(_identity, _groups(part))) for part in parts] == [
            list(map(_identity, _groups(part))) for part in targets]:
        return state
    stored = [group for part in parts for group in _groups(part)]
    new = []
    for index, target in enumerate(targets):
        groups = [_stored_group(group, stored) for group in _groups(target)]
        new.append(_with_groups(parts[min(index, len(parts) - 1)], groups))
    several = all(isinstance(key, int) for key in wanted)
    return dict(enumerate(new)) if several else new[0]


def group_value(group: Mapping[str, Any], key: str) -> Any:
    """Return a value of a parameter group, or None if it is missing. The value may be stored under
    Megatron's key or under NeMo's key.
    """
    return group.get(key, group.get(f"pre_{key}"))


def optimizer_values(common: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values["optimizer"]` of a framework-independent source, given the common state."""
    for part in optimizer_parts(common.get("optimizer")):
        inner, groups = part.get("optimizer", part), _groups(part)
        if not groups:
            continue
        step = (inner.get("state") or {}).get("common_step", groups[0].get("step"))
        known = {name: value for name, value in groups[0].items() if name in OPTIMIZER_VALUES}
        return {**known, **({} if step is None else {"step": int(step)})}
    return {}


def new_optimizer(values: Mapping[str, Any], mixed: bool) -> dict[str, Any]:
    """Build the entry "optimizer" of the common state for optimizer state from another framework.

    Args:
        values: `values["optimizer"]` of a framework-independent source.
        mixed: whether the model has 16-bit parameters and float32 master weights.
    """
    step = values.get("step", 0)
    known = {"lr": 0.0, "weight_decay": 0.0, **values, "step": step}
    groups = [{**known, "wd_mult": decay, "lr_mult": 1.0, "is_expert_parallel": False,
               "is_decoupled_lr": False} for decay in (1.0, 0.0)]
    state = {"state": {"common_step": torch.tensor(float(step))}, "param_groups": groups}
    return {"optimizer": state} if mixed else state


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*(group_value(group, name) for name in _GROUP_KEYS),
            bool(group.get("is_expert_parallel")))


def _stored_group(group: Mapping[str, Any], stored: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the stored values of the same parameter group. If the checkpoint does not contain this
    group, return those of the corresponding group in the other optimizer (for shared or expert
    parameters).
    """
    same = {_identity(candidate): candidate for candidate in stored}
    *kind, expert = _identity(group)
    group_values = same.get((*kind, expert), same.get((*kind, not expert)))
    if group_values is None:
        return {name: value for name, value in group.items() if name != "params"}
    return {**copy.deepcopy(group_values), "is_expert_parallel": expert}


def _groups(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    inner = part.get("optimizer", part)
    return list(inner.get("param_groups", ()))


def _with_groups(part: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    new = copy.deepcopy(dict(part))
    (new["optimizer"] if "optimizer" in new else new)["param_groups"] = [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in groups]
    return new


def _expert_groups(groups: list[dict[str, Any]], dense: list[dict[str, Any]],
                   biases: bool) -> list[dict[str, Any]]:
    def decays(group: Mapping[str, Any]) -> bool:
        return bool(group.get("wd_mult", group.get("pre_wd_mult", 1.0)))

    own = [group for group in groups if group.get("is_expert_parallel")]
    found = [group for group in own if decays(group)] or [
        {**group, "is_expert_parallel": True} for group in dense if decays(group)][:1]
    if biases:
        found = found + ([group for group in own if not decays(group)] or [
            {**group, "is_expert_parallel": True} for group in dense if not decays(group)][:1])
    return found


def object_bytes() -> bytes:
    """Return the bytes that Megatron stores for an empty object."""
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


def expert_objects(layers: Mapping[str, Mapping[str, int]], count: int,
                   stacked: bool) -> Iterable[str]:
    """Yield the names of the objects that Megatron's own experts store.

    Args:
        layers: mapping from the prefix of every MoE layer to `{"num_experts": E}`.
        count: total number of layers in the model.
        stacked: whether one tensor contains the values of all layers.
    """
    for prefix, layer in layers.items():
        key, number = without_number(prefix + "experts.experts.")
        for module in ("linear_fc1", "linear_fc2"):
            for expert in range(layer["num_experts"]):
                if stacked and number is not None:
                    yield object_name(f"{key}{module}._extra_state", (number, expert),
                                            (count, layer["num_experts"]))
                else:
                    yield object_name(f"{prefix}experts.experts.{module}._extra_state",
                                            (expert,), (layer["num_experts"],))


def module_objects(numbers: Iterable[int], moe: Iterable[int], tensors: Iterable[str],
                   stacked: bool) -> Iterable[str]:
    """Yield the names of the objects that the modules of a GPT model store, except those of
    experts.

    These objects are empty unless the model uses an 8-bit number format.

    Args:
        numbers: indices of all layers.
        moe: indices of the layers that contain an MoE layer.
        tensors: names of the model's tensors. The names show which optional modules the model has.
        stacked: whether one tensor contains the values of all layers.
    """
    numbers, moe, tensors = list(numbers), set(moe), list(tensors)
    beside = [module for part, modules in _OF_MOE.items()
              if any(part in name for name in tensors) for module in modules]
    for number in numbers:
        more = beside if number in moe else _MLP
        for module in (*_MODULES, *more):
            if stacked:
                yield object_name(f"{LAYERS}{module}._extra_state", (number,),
                                        (len(numbers),))
            else:
                yield object_name(f"{LAYERS}{number}.{module}._extra_state")
    yield object_name("decoder.final_layernorm._extra_state")
