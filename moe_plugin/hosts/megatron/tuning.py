"""What the tuners of `parallel: auto` have learned, in Megatron's checkpoints: one object a layer,
by the layer's global number.

Every pipeline stage saves its own layers' objects; replicas of the experts may have learned
different things, the first one's are kept. A checkpoint without them loads as well, and what was
learned on another number of ranks is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from moe_plugin.hosts.megatron.compat import Groups
from moe_plugin.tuning.layout_tuner import LayoutTuner

logger = logging.getLogger(__name__)
KEY = "tuner"


def restore(auto: LayoutTuner | None, saved: Mapping[str, Any], layer: int | None) -> None:
    """Take over what a checkpoint says of a layer; where it cannot be used, the log says so."""
    if auto is None:
        logger.info(
            "layer %s: the checkpoint's layout choices are not used: parallel.mode is 'fixed'",
            layer)
    else:
        auto.load_state(saved)


def shard(auto: LayoutTuner, groups: Groups, key: str,
          offsets: tuple[Any, ...]) -> dict[str, ShardedObject]:
    """The layer's entry of a distributed checkpoint. offsets: axes that Megatron puts before ours
    (layers).
    """
    replica = (0, dist.get_rank(groups.tensor), dist.get_rank(groups.data))
    return {key: make_sharded_object_for_checkpoint(auto.state(), key, offsets, replica)}


def without_missing(models: Iterable[dict[str, Any]], path: str) -> None:
    """Take out of the state dicts to be loaded the tuners that the checkpoint at `path` does not
    have.
    """
    from megatron.core import dist_checkpointing

    wanted = [(model, key, entry) for model in models for key, entry in model.items()
              if isinstance(entry, ShardedObject) and key.endswith(f".{KEY}")]
    known = dist_checkpointing.serialization.load_sharded_metadata(path) if wanted else {}
    for model, key, entry in wanted:
        if entry.unique_key not in known:
            del model[key]
            logger.info("the checkpoint has no layout choices for %s: they are found anew",
                        key.removesuffix(f".{KEY}"))
