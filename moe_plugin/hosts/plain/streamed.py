"""Create a trainer that stores a model's weights on the device or host (`offload.weights`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.config import OffloadConfig
from moe_plugin.experts.base import expert_parameters
from moe_plugin.layer import layers_in
from moe_plugin.memory.tiers import HostTier, tier_of
from moe_plugin.memory.weights.blocks import MakeOptimizer
from moe_plugin.memory.weights.streamed import Loss, StreamedTrainer
from moe_plugin.planner.units import parse_size
from moe_plugin.training.gradients.replicas import mark_replicas, replica_comm
from moe_plugin.training.gradients.sync import PartedClip, refuse_same_tokens, sync_gradients
from moe_plugin.utils.messages import short


def streamed_trainer(settings: OffloadConfig, blocks: Sequence[nn.Module | Callable[[], nn.Module]],
                     loss: Loss, optimizer: MakeOptimizer, *, device: torch.device | str = "cpu",
                     clip_norm: float | None = None, world: Comm | None = None,
                     **arguments: Any) -> StreamedTrainer:
    """Create a trainer for a sequence of blocks. `offload.weights` selects where the weights are
    stored.

    The losses and weights are bitwise identical for weights on the device and weights on the host.
    Each rank has its own batches. All ranks must have the same number of batches. The gradients are
    those of the mean loss over all ranks. Ranks can share experts, if the `MoELayer`s in the blocks
    have a `comm`. Each rank can choose separately where its weights are stored.

    Args:
        settings: offload settings. The offload settings contain `weights`, `path` (for weights in
            files) and `weights_memory`, which becomes the argument `limit` of `StreamedTrainer`.
        blocks: see `StreamedTrainer`.
        loss: see `StreamedTrainer`.
        optimizer: see `StreamedTrainer`.
        device: see `StreamedTrainer`.
        clip_norm: upper bound for the gradient norm over all parameters on all ranks. Each expert
            is counted once (see `moe_plugin.training.gradients.sync`). Optional. By default,
            gradients are not clipped.
        world: communicator of all data-parallel ranks. All ranks must start with identical weights.
            Optional. Defaults to the default process group.
        arguments: additional keyword arguments of `StreamedTrainer`.
    Raises:
        ValueError: If the settings contradict each other, or if `StreamedTrainer` does not accept
            an argument.
    """
    if settings.activations not in ("keep", "recompute"):
        raise ValueError(
            f"offload.activations={short(settings.activations)} cannot be used with "
            "streamed_trainer, which stores the input of each block and recomputes the block in "
            "the backward pass. Leave offload.activations out")
    world = default_comm() if world is None else world
    if world.size > 1:
        if arguments.get("main_weights"):
            raise ValueError(f"main_weights=True cannot be used on {world.size} ranks, because "
                             "their gradients are reduced in the dtype of the parameters. Use one "
                             "rank, or float32 weights")
        arguments.setdefault("gradients", BlockGradients(world))
    if clip_norm is not None:
        if not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm} must be > 0, or None for no clipping")
        arguments["clip"] = PartedClip(clip_norm, world)
    if settings.weights_memory is not None:
        arguments.setdefault("limit", parse_size(settings.weights_memory))
    if settings.weights == "host":
        return StreamedTrainer(blocks, loss, optimizer, tier_of(device, settings.path),
                               device=device, **arguments)
    if "resident" in arguments:
        raise ValueError(f"resident={short(arguments['resident'])} cannot be used with "
                         "offload.weights=device, which keeps all blocks on the device. Leave "
                         "resident out, or use offload.weights=host")
    return StreamedTrainer(blocks, loss, optimizer, HostTier(device), device=device,
                           resident=range(len(blocks)), **arguments)


class BlockGradients:
    """A callable for `StreamedTrainer` that reduces the gradients of one block over all ranks.

    Args:
        world: communicator of all data-parallel ranks.
    """

    def __init__(self, world: Comm) -> None:
        self.world = world
        self._replicas: dict[str, Comm | None] = {}  # by the name of the expert-parallel group

    def __call__(self, block: nn.Module) -> None:
        """Reduce the gradients of a block, so that they are the gradients of the mean loss over all
        ranks. This is a collective operation.

        Raises:
            ValueError: If the block's layers have different expert-parallel groups, these groups
                together do not contain all ranks, or ranks of one group have the same tokens.
        """
        layers = layers_in(block)
        groups = {layer.comm.name: layer.comm for layer in layers}
        if len(groups) > 1:
            raise ValueError(f"the layers of one block have the expert-parallel groups "
                             f"{', '.join(sorted(groups))}. Make a separate block for each group")
        if not groups:
            sync_gradients(block, self.world)
            return
        [(name, group)] = groups.items()
        if name not in self._replicas:
            for layer in layers:
                refuse_same_tokens(layer)
            self._replicas[name] = replica_comm(group, self.world)
        replicas = self._replicas[name]
        size = 0 if replicas is None else replicas.size
        for parameter in expert_parameters(block).values() if size else ():
            mark_replicas(parameter, size)  # so that the norm counts each expert once
        sync_gradients(block, self.world, group, replicas if group.size > 1 else None)
