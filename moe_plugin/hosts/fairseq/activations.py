"""`--moe-activations` in fairseq: its transformer layers keep, recompute or swap."""

from __future__ import annotations

from typing import Any

from torch import nn

from moe_plugin.checkpoint.formats.fairseq.translate import setting
from moe_plugin.comm import Comm
from moe_plugin.hosts.fairseq.layers import moe_layers
from moe_plugin.hosts.plain.activations import manage_layers
from moe_plugin.memory.activations.offload import Activations


def activations_of(cfg: Any, model: nn.Module, comm: Comm) -> Activations | None:
    """The layers of encoder and decoder under the settings of a model with experts; None: all keep.

    comm: all ranks. Raises: ValueError: a setting of fairseq does not fit.
    """
    layers = moe_layers(model)
    if not layers:
        return None
    config = layers[0].moe_layer.moe.config
    found = {f"{stack}.layers.{i}": layer for stack in ("encoder", "decoder")
             if (part := dict(model.named_children()).get(stack)) is not None
             for i, layer in enumerate(part.layers)}
    return manage_layers(config.offload, found, comm, refused={
        "--checkpoint-activations": bool(setting(cfg.model, "checkpoint_activations", False)),
        "--ddp-backend fully_sharded":
            cfg.distributed_training.ddp_backend == "fully_sharded",
        "--moe-check-twins": config.guard.twins > 0,
        "--moe-votes": config.guard.votes > 0,
    })
