"""The state of the layer in checkpoints, which consists of plain state dicts and the results of the
layout tuner.

The keys of a state dict are Megatron's parameter names (`router.*`, `experts.*`). The parameters
also belong to `moe`, the `MoELayer` that runs them. The keys under `moe` are left out, because they
refer to the same parameters. The description of the current rank's experts is left out as well,
because Megatron's sharded tensors store experts by global index, so a checkpoint can be loaded at
any expert-parallel size.

The tuner state (of `parallel: auto`) is optional. The tuner state is stored as one object per layer
under the global number of the layer. Every pipeline stage saves the objects of its own layers. If
replicas of the experts have learned different layouts, the state of the first replica is saved.
Tuner results for a different number of ranks are left out.

If `load_without_missing` is active, the state of a predicted layout is stored in the same way.
Without this function Megatron raises an error for a checkpoint that lacks a requested object, and
checkpoints of a different layer or of fixed layouts lack the tuner state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

from moe_plugin.hosts.megatron import expert_layouts
from moe_plugin.hosts.megatron.compat.checkpointing import is_wrapped
from moe_plugin.hosts.megatron.compat.core import MegatronGroups
from moe_plugin.hosts.megatron.compat.names import ShardedObject, make_sharded_object_for_checkpoint
from moe_plugin.layer import MoELayer

logger = logging.getLogger(__name__)
TUNER = "tuner"
LATENT = "fc1_latent_proj", "fc2_latent_proj"  # Megatron's names of `moe.latent.down` and `up`


def tuner_state(moe: MoELayer) -> dict[str, Any] | None:
    """Return the results of the layer's tuner, or None if the layer has no tuner."""
    return moe.get_extra_state().get(TUNER)


def drop_repeated(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook that runs after `state_dict`, removes the keys that `layer.moe` repeats, and adds the
    tuner's state.
    """
    for key in [key for key in state if key.startswith(f"{prefix}moe.")]:
        del state[key]
    tuner = tuner_state(layer.moe)
    if tuner is not None:
        state[prefix + TUNER] = tuner


def add_repeated(layer: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Hook that runs before `load_state_dict` and reverses the changes made by `drop_repeated`.

    Tuner state in the state dict is optional. It is ignored if the layer has no tuner.
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
    """Wrap `dist_checkpointing.load` so that it accepts checkpoints with either layout of experts.

    Tuner state that the checkpoint does not contain is not requested. The wrapper also works in
    Megatron's own training script.
    """
    # the models are under `model`, or `model0`, `model1`, ...
    without_missing((part for key, part in given["sharded_state_dict"].items()
                     if key.startswith("model") and isinstance(part, dict)),
                    given["checkpoint_dir"])
    return expert_layouts.load(load, given)


def tuner_shards(moe: MoELayer, groups: MegatronGroups, key: str,
                 offsets: tuple[Any, ...]) -> dict[str, ShardedObject]:
    """Return the entry of the tuner for a distributed checkpoint, or {} if there is no tuner.

    offsets: leading axes that Megatron adds, such as the layer axis.
    """
    tuner = tuner_state(moe)
    if tuner is None or not (moe.config.parallel.mode == "auto" or is_wrapped(
            "load", load_without_missing)):
        return {}
    replica = (0, dist.get_rank(groups.tensor), dist.get_rank(groups.data))
    return {key: make_sharded_object_for_checkpoint(tuner, key, offsets, replica)}


def without_missing(models: Iterable[dict[str, Any]], path: str) -> None:
    """Remove tuner states that the checkpoint at `path` does not contain from the state dicts to be
    loaded.
    """
    wanted = [(model, key, entry) for model in models for key, entry in model.items()
              if isinstance(entry, ShardedObject) and key.endswith(f".{TUNER}")]
    known = dist_checkpointing.serialization.load_sharded_metadata(path) if wanted else {}
    for model, key, entry in wanted:
        if entry.unique_key not in known:
            del model[key]
            logger.info("the checkpoint has no layout choices for %s: the tuner will search for "
                        "them again", key.removesuffix(f".{TUNER}"))
