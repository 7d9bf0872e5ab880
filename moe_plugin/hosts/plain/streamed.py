"""Training as `offload.weights` says: the whole model on the device, or streaming through it."""

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
    """The trainer of a sequence of blocks with their weights where `offload.weights` says.

    Losses and weights are the same bits for both values. Several ranks have batches of their own,
    as many each; the gradients are those of the mean over ranks of their losses. They may share
    experts among them (a `comm` of the blocks' `MoELayer`s), and store them each where they like.

    Args:
        settings: `weights`; `path`, where they are files; `weights_memory`, the `limit`.
        blocks, loss, optimizer, device, arguments: see `StreamedTrainer`.
        clip_norm: gradients are scaled so that their norm over all parameters of all ranks, experts
            counted once, is at most this (`moe_plugin.training.gradients.sync`); None: they are
            not.
        world: all data-parallel ranks, which start with equal weights; None: those of the default
            group.
    Raises:
        ValueError: settings do not fit each other, and what `StreamedTrainer` raises.
    """
    if settings.activations not in ("keep", "recompute"):
        raise ValueError(
            f"offload.activations={short(settings.activations)} does not fit streamed_trainer, "
            "which keeps each block's input and computes the block again: leave it out")
    world = default_comm() if world is None else world
    if world.size > 1:
        if arguments.get("main_weights"):
            raise ValueError(f"main_weights=True does not fit {world.size} ranks, whose gradients "
                             "are reduced in the parameters' dtype: use one rank, or weights of "
                             "float32")
        arguments.setdefault("gradients", BlockGradients(world))
    if clip_norm is not None:
        if not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm}: must be > 0, or None for no clipping")
        arguments["clip"] = PartedClip(clip_norm, world)
    if settings.weights_memory is not None:
        arguments.setdefault("limit", parse_size(settings.weights_memory))
    if settings.weights == "host":
        return StreamedTrainer(blocks, loss, optimizer, tier_of(device, settings.path),
                               device=device, **arguments)
    if "resident" in arguments:
        raise ValueError(f"resident={short(arguments['resident'])} does not fit "
                         "offload.weights=device, where all blocks are: leave it out, or use host")
    return StreamedTrainer(blocks, loss, optimizer, HostTier(device), device=device,
                           resident=range(len(blocks)), **arguments)


class BlockGradients:
    """Reduces the gradients of one block after another over ranks, for `StreamedTrainer`.

    Args:
        world: all data-parallel ranks.
    """

    def __init__(self, world: Comm) -> None:
        self.world = world
        self._replicas: dict[str, Comm | None] = {}  # by name of the expert-parallel group

    def __call__(self, block: nn.Module) -> None:
        """Make a block's gradients those of the mean over ranks of their losses. Collective.

        Raises:
            ValueError: layers of the block have different expert-parallel groups, the groups do not
                make up the world, or ranks of a group hold the same tokens.
        """
        layers = layers_in(block)
        groups = {layer.comm.name: layer.comm for layer in layers}
        if len(groups) > 1:
            raise ValueError(f"layers of one block have the expert-parallel groups "
                             f"{', '.join(sorted(groups))}: make a block of each")
        if not groups:
            sync_gradients(block, self.world)
            return
        [(name, group)] = groups.items()
        if name not in self._replicas:
            for layer in layers:
                refuse_same_tokens(layer)
            self._replicas[name] = replica_comm(group, self.world)
        replicas = self._replicas[name]
        for parameter in expert_parameters(block).values() if replicas is not None else ():
            mark_replicas(parameter, replicas.size)  # for the norm
        sync_gradients(block, self.world, group, replicas if group.size > 1 else None)
