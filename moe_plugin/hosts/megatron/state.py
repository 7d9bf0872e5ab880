"""The layer's state in checkpoints: plain state dicts, and what the tuner of `parallel: auto` has
learned.

A state dict names each parameter as Megatron does (`router.*`, `experts.*`). They are also parts of
`moe`, the `MoELayer` that runs them; its keys repeat these and are left out, and so is its
description of this rank's experts: Megatron's sharded tensors store experts by global index, so a
checkpoint loads at any expert-parallel size.

Tuner state is one object per layer, under the layer's global number, and optional. Every pipeline
stage saves its own layers' objects; replicas of the experts may have learned different things, the
first one's are kept. What was learned on another number of ranks is left out.

So it is with a predicted layout, under `load_without_missing`. Megatron alone refuses a checkpoint
without an object that is asked for, and no checkpoint of another layer or of fixed layouts has one.
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
    """What the layer's tuner has learned; None where nothing is tuned."""
    return moe.get_extra_state().get(TUNER)


def drop_repeated(layer: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Hook after `state_dict`: leaves out what `layer.moe` repeats and adds the tuner's state."""
    for key in [key for key in state if key.startswith(f"{prefix}moe.")]:
        del state[key]
    tuner = tuner_state(layer.moe)
    if tuner is not None:
        state[prefix + TUNER] = tuner


def add_repeated(layer: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Hook before `load_state_dict`: the inverse of `drop_repeated`.

    Tuner state is optional, and not used where nothing is tuned.
    """
    saved = state.pop(prefix + TUNER, None)
    own = layer.moe.get_extra_state()
    if saved is not None and TUNER not in own:
        logger.info("layer %s: the checkpoint's layout choices are not used: parallel.mode is "
                    "'fixed'", layer.layer_number)
    inner = {part: name for name, part in layer.moe.named_modules()}
    for name in ("router", "experts", *(LATENT if layer.moe.latent is not None else ())):
        own_prefix, repeated = f"{prefix}{name}.", f"{prefix}moe.{inner[getattr(layer, name)]}."
        for key in [key for key in state if key.startswith(own_prefix)]:
            state[repeated + key.removeprefix(own_prefix)] = state[key]
    state[f"{prefix}moe._extra_state"] = {**own, TUNER: saved}


def load_without_missing(load: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Around `dist_checkpointing.load`: of checkpoints in either layout of experts, and without
    asking for a tuner that the checkpoint does not have, also in Megatron's own script.
    """
    # the models are under `model`, or `model0`, `model1`, ...
    without_missing((part for key, part in given["sharded_state_dict"].items()
                     if key.startswith("model") and isinstance(part, dict)),
                    given["checkpoint_dir"])
    return expert_layouts.load(load, given)


def tuner_shards(moe: MoELayer, groups: MegatronGroups, key: str,
                 offsets: tuple[Any, ...]) -> dict[str, ShardedObject]:
    """The tuner's entry of a distributed checkpoint, where there is one.

    offsets: axes that Megatron puts before ours (layers).
    """
    tuner = tuner_state(moe)
    if tuner is None or not (moe.config.parallel.mode == "auto" or is_wrapped(
            "load", load_without_missing)):
        return {}
    replica = (0, dist.get_rank(groups.tensor), dist.get_rank(groups.data))
    return {key: make_sharded_object_for_checkpoint(tuner, key, offsets, replica)}


def without_missing(models: Iterable[dict[str, Any]], path: str) -> None:
    """Take tuners that the checkpoint at `path` does not have out of the state dicts to load."""
    wanted = [(model, key, entry) for model in models for key, entry in model.items()
              if isinstance(entry, ShardedObject) and key.endswith(f".{TUNER}")]
    known = dist_checkpointing.serialization.load_sharded_metadata(path) if wanted else {}
    for model, key, entry in wanted:
        if entry.unique_key not in known:
            del model[key]
            logger.info("the checkpoint has no layout choices for %s: they are found again",
                        key.removesuffix(f".{TUNER}"))
