"""The state of a layer in checkpoints: plain state dicts, and the measurements of the layout tuner.

The keys of a state dict are Megatron's parameter names (`router.*`, `experts.*`). The parameters
are also registered in `moe`, the `MoELayer` that runs the router and the experts. The keys that
begin with `moe` are left out, because they refer to the same parameters. The description of the
current rank's experts is also left out. Megatron's sharded tensors store experts by their global
index, so that a checkpoint can be loaded with any expert-parallel size.

The tuner state (with `parallel: auto`) is optional. Each layer's tuner state is stored as one
object, under the global number of the layer. Every pipeline stage saves the objects of its own
layers. If the replicas of the experts have learned different layouts, only the state of the first
replica is saved. Tuner state for a different number of ranks is left out.

If `load_without_missing` is active, the state of a predicted layout is saved and loaded in the same
way. Without `load_without_missing`, Megatron raises an error if a checkpoint lacks a requested
object. For example, checkpoints of other layers or of fixed layouts lack the tuner state.

Checkpoints of Megatron's own experts can be loaded into this package's layers. Checkpoints of this
package's experts can be loaded into Megatron's own layers. `checkpoint.formats.megatron.experts`
defines how the parameter names and the order of dimensions correspond. If a checkpoint does not
contain a sharded tensor with the requested name, the tensor is replaced with a factory. The factory
requests the tensor by its name in the other format, and converts the loaded values. Optimizer state
is converted in the same way as the corresponding parameter.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import Tensor

from moe_plugin.checkpoint.formats.megatron.common import (
    METADATA,
    NATIVE_EXPERTS,
    fitted,
    optimizer_parts,
)
from moe_plugin.checkpoint.formats.megatron.format import GATES, PAIRS
from moe_plugin.checkpoint.formats.megatron.torch_dist import DistributedFiles
from moe_plugin.checkpoint.source import CheckpointError
from moe_plugin.hosts.megatron import frozen, parameters, restricted
from moe_plugin.hosts.megatron.compat.checkpointing import changed, is_wrapped
from moe_plugin.hosts.megatron.compat.core import MegatronGroups
from moe_plugin.hosts.megatron.compat.names import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    dict_list_map_outplace,
    make_sharded_object_for_checkpoint,
    sharded_state_dict_default,
)
from moe_plugin.layer import MoELayer
from moe_plugin.utils.messages import short

logger = logging.getLogger(__name__)
TUNER = "tuner"
LATENT = "fc1_latent_proj", "fc2_latent_proj"  # Megatron's names of `moe.latent.down` and `up`
_BY_BUCKET = ".dp_group_idx_"  # in the keys of optimizer state that is stored by buckets
_THEIRS = {name: (theirs, swap) for theirs, (ours, swap) in PAIRS.items() for name in ours}
Shapes = Mapping[str, tuple[int, ...]]


def tuner_state(moe: MoELayer) -> dict[str, Any] | None:
    """Return the state of the layer's tuner, or None if the layer has no tuner."""
    return moe.get_extra_state().get(TUNER)


def drop_repeated(layer: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook that removes the duplicate keys of `layer.moe` from a state dict and adds tuner state.
    """
    for key in [key for key in state if key.startswith(f"{prefix}moe.")]:
        del state[key]
    tuner = tuner_state(layer.moe)
    if tuner is not None:
        state[prefix + TUNER] = tuner


def add_repeated(layer: Any, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Hook that runs before `load_state_dict`. The hook reverses the changes made by
    `drop_repeated`.

    The state dict may lack the tuner state. If the layer has no tuner, tuner state in the state
    dict is ignored.
    """
    saved = state.pop(prefix + TUNER, None)
    extra_state = layer.moe.get_extra_state()
    if saved is not None and TUNER not in extra_state:
        logger.info("layer %s: the checkpoint's layout choices are not used, because "
                    "parallel.mode is 'fixed'", layer.layer_number)
    inner = {part: name for name, part in layer.moe.named_modules()}
    for name in ("router", "experts", *(LATENT if layer.moe.latent is not None else ())):
        own_prefix, repeated = f"{prefix}{name}.", f"{prefix}moe.{inner[getattr(layer, name)]}."
        for key in [key for key in state if key.startswith(own_prefix)]:
            state[repeated + key.removeprefix(own_prefix)] = state[key]
    state[f"{prefix}moe._extra_state"] = {**extra_state, TUNER: saved}


def load_without_missing(load: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call `dist_checkpointing.load` so that it accepts checkpoints of Megatron's own experts as
    well as checkpoints of this package's experts.

    If the checkpoint does not contain the tuner state of a layer, this state is not requested. This
    function also works in Megatron's own training script.
    """
    # the models are under `model`, or `model0`, `model1`, ...
    models = [part for key, part in given["sharded_state_dict"].items()
              if key.startswith("model") and isinstance(part, dict)]
    without_missing(models, given["checkpoint_dir"])
    return load_either_layout(load, given, models)


def tuner_shards(moe: MoELayer, groups: MegatronGroups, key: str,
                 offsets: tuple[Any, ...]) -> dict[str, ShardedObject]:
    """Return the object that stores the tuner state in a distributed checkpoint, as a dict with one
    key. The dict is empty if there is no tuner.

    offsets: leading axes that Megatron adds to the tensors, for example the layer axis.
    """
    tuner = tuner_state(moe)
    if tuner is None or not (moe.config.parallel.mode == "auto" or is_wrapped(
            "load", load_without_missing)):
        return {}
    replica = (0, dist.get_rank(groups.tensor), dist.get_rank(groups.data))
    return {key: make_sharded_object_for_checkpoint(tuner, key, offsets, replica)}


def without_missing(models: Iterable[dict[str, Any]], path: str) -> None:
    """Remove tuner states from state dicts if the checkpoint at `path` does not contain them."""
    wanted = [(model, key, entry) for model in models for key, entry in model.items()
              if isinstance(entry, ShardedObject) and key.endswith(f".{TUNER}")]
    known = dist_checkpointing.serialization.load_sharded_metadata(path) if wanted else {}
    for model, key, entry in wanted:
        if entry.unique_key not in known:
            del model[key]
            logger.info("the checkpoint has no layout choices for %s: the tuner will search for "
                        "them again", key.removesuffix(f".{TUNER}"))


def load_either_layout(original: Callable[..., Any], given: dict[str, Any],
                       models: Sequence[dict[str, Any]] = ()) -> Any:
    """Call `megatron.core.dist_checkpointing.load`. The experts in the checkpoint may have
    Megatron's format or this package's format.

    Args:
        original: Megatron's `load`.
        given: arguments of `dist_checkpointing.load`. If the optimizers and parameter groups under
            "optimizer" in the sharded state dict differ from those in the checkpoint's common
            state, the common state is adapted to the sharded state dict.
        models: sharded state dicts of models whose experts may be frozen. See `frozen.fill`.
    Raises:
        CheckpointError: If the experts must be converted, and the requested optimizer state is
            stored by buckets. Optimizer state in buckets cannot be converted, because the
            parameters have different positions in the buckets of the other format.
    """
    state, path = given["sharded_state_dict"], given["checkpoint_dir"]
    if not (Path(path) / METADATA).is_file():  # not written by torch's backend
        return original(**given)
    files = DistributedFiles(Path(path), trusted=restricted.trusts_files())
    tensors = files.tensors()
    frozen.fill(models, path, tensors, state.get("optimizer") is not None)
    shapes = {name: tensor.entry.shape for name, tensor in tensors.items()}
    known = {*shapes, *files.objects()}
    other, buckets = set[str](), set[str]()

    def replaced(leaf: Any) -> Any:
        new = _replaced(leaf, known, shapes)
        if new is not leaf and isinstance(new, ShardedTensorFactory):
            other.add(leaf.key)
        if _BY_BUCKET in getattr(leaf, "key", ""):
            buckets.add(leaf.key)
        return new

    state = dict_list_map_outplace(replaced, state)
    if other and buckets:
        raise CheckpointError(
            "The checkpoint's experts must be converted, because the checkpoint does not contain "
            f"{short(min(other))}. Its optimizer state is stored by buckets (dp_reshardable), "
            "which cannot be converted. Load it with --no-load-optim, or save it again with "
            "--dist-ckpt-optim-fully-reshardable in the run that wrote it.")
    with_strategy = given.get("common_strategy") is not None
    with changed(functools.partial(_with_optimizer, state.get("optimizer")), with_strategy) as more:
        return original(**{**given, "sharded_state_dict": state, **more})


def _with_optimizer(wanted: Any, common: dict[str, Any]) -> dict[str, Any]:
    """Return the common state with the optimizers and parameter groups of the current run."""
    # state stored as objects (dp_reshardable) can be read only by the ranks that wrote it, with
    # the same optimizers, so it needs no adaptation
    whole = not any(isinstance(value, ShardedObject) for part in optimizer_parts(wanted)
                    for value in part.values())
    if wanted is not None and "optimizer" in common and whole:
        common["optimizer"] = fitted(common["optimizer"], wanted)
    return common


def _replaced(leaf: Any, known: set[str], shapes: Shapes) -> Any:
    if isinstance(leaf, ShardedObject):
        # only the modules of Megatron's own experts have these objects
        missing = NATIVE_EXPERTS in leaf.key and leaf.unique_key not in known
        return LocalNonpersistentObject(leaf.data) if missing else leaf
    if not isinstance(leaf, ShardedTensor | ShardedTensorFactory) or leaf.key in known:
        return leaf
    prefix, _, name = leaf.key.rpartition(".")
    theirs = _THEIRS.get(name)
    if theirs is not None and isinstance(leaf, ShardedTensor):
        other = f"{prefix}.experts.{theirs[0]}"
        return _as_native(leaf, name, other, shapes[other]) if other in known else leaf
    prefix, native, name = leaf.key.partition(NATIVE_EXPERTS)
    if native and any(f"{prefix}mlp.experts.{ours}" in known for ours in ("w_in_LDF", "w_out_LFD")):
        return _as_ours(leaf, f"{prefix}mlp.experts.", name, known)
    return leaf


def _as_native(leaf: ShardedTensor, name: str, other: str,
               shape: tuple[int, ...]) -> ShardedTensorFactory:
    """Return a factory that loads this package's tensor from Megatron's format."""
    (theirs, swap), ahead = _THEIRS[name], leaf.prepend_axis_num
    order = _swapped if swap else tuple
    whole, offset, parts = (list(order(values)) for values in (
        leaf.global_shape, leaf.global_offset, leaf.axis_fragmentations))
    if len(PAIRS[theirs][0]) == 2 and shape[ahead + 1] == 2 * whole[ahead + 1]:
        if name not in GATES:
            offset[ahead + 1] += whole[ahead + 1]
        whole[ahead + 1] *= 2
        parts[ahead + 1] *= 2

    def build(key: str, value: Tensor, replica: Any, _flat: Any) -> ShardedTensor:
        value = _transposed(value) if swap else value
        return ShardedTensor(key, value, value.dtype, tuple(value.shape), tuple(whole),
                             tuple(offset), tuple(parts), replica, ahead)

    return ShardedTensorFactory(other, leaf.data, build, _transposed if swap else _same,
                                leaf.replica_id)


def _as_ours(leaf: ShardedTensor | ShardedTensorFactory, prefix: str, name: str,
             known: set[str]) -> ShardedTensorFactory:
    """Return a factory that loads Megatron's tensor from this package's format."""
    names, swap = PAIRS[name]  # the gate is the first of two
    gated = len(names) == 2 and prefix + names[0] in known

    def convert(shard: ShardedTensor) -> ShardedTensor:
        ours = names[-1]
        axis = len(shard.global_shape) - (2 if swap else 1)  # the axis of the FFN's inner width
        whole: Any
        offset: Any
        parts: Any
        whole, offset, parts = (list(values) for values in (
            shard.global_shape, shard.global_offset, shard.axis_fragmentations))
        if gated:
            whole[axis] //= 2
            parts[axis] //= 2
            if offset[axis] < whole[axis]:
                ours = names[0]
            else:
                offset[axis] -= whole[axis]
        if swap:
            whole, offset, parts = _swapped(whole), _swapped(offset), _swapped(parts)
        value = _transposed(shard.data) if swap else shard.data
        return replace(shard, key=prefix + ours, data=value, local_shape=tuple(value.shape),
                       global_shape=tuple(whole), global_offset=tuple(offset),
                       axis_fragmentations=tuple(parts))

    inner_build, inner_merge = _factory_parts(leaf)

    def build(_key: str, value: Tensor, replica: Any, flat: Any) -> Any:
        return dict_list_map_outplace(
            lambda item: convert(item) if isinstance(item, ShardedTensor) else item,
            inner_build(value, replica, flat))

    def merge(loaded: Any) -> Tensor:
        back = _transposed if swap else _same
        return inner_merge(dict_list_map_outplace(
            lambda item: back(item) if isinstance(item, Tensor) else item, loaded))

    return ShardedTensorFactory(prefix + names[-1], leaf.data, build, merge, leaf.replica_id)


def _factory_parts(leaf: Any) -> tuple[Callable[..., Any], Callable[[Any], Tensor]]:
    if isinstance(leaf, ShardedTensorFactory):
        return functools.partial(leaf.build_fn, leaf.key), leaf.merge_fn
    return lambda value, *_: replace(leaf, data=value), _same


def _swapped(values: Any) -> tuple[int, ...]:
    *ahead, first, second = values
    return (*ahead, second, first)


@torch.no_grad()
def _transposed(value: Tensor) -> Tensor:
    return value.transpose(-1, -2).contiguous()


def _same(value: Tensor) -> Tensor:
    return value


def layer_shards(layer: Any, prefix: str, sharded_offsets: tuple[Any, ...],
                 metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return the sharded tensors of a layer; see `PluginMoELayer.sharded_state_dict`."""
    groups = layer.groups
    sharded: dict[str, Any] = parameters.expert_shards(layer.experts, layer.moe.placement, groups,
                                                       f"{prefix}experts.", sharded_offsets)
    if layer.plan.native_router:
        sharded.update(sharded_state_dict_default(layer.router, f"{prefix}router.",
                                                  sharded_offsets, metadata))
    else:  # saved under the native router's name, so that either router loads it
        for name, tensor in layer.router.state_dict(keep_vars=True).items():
            saved = f"{prefix}router." + ("weight" if name == "weight_ED" else name)
            sharded.update(
                parameters.replicated_shard(f"{prefix}router.{name}", saved, tensor, groups,
                                            sharded_offsets))
    if layer.moe.latent is not None:
        for part in LATENT:
            for name, tensor in getattr(layer, part).named_parameters():
                key = f"{prefix}{part}.{name}"
                sharded.update(parameters.replicated_shard(key, key, tensor, groups,
                                                           sharded_offsets))
    if layer.shared_experts is not None:
        sharded.update(
            layer.shared_experts.sharded_state_dict(f"{prefix}shared_experts.", sharded_offsets,
                                                   metadata))
    sharded.update(tuner_shards(layer.moe, groups, prefix + TUNER, sharded_offsets))
    return sharded
