"""The gradient norm of models of which every rank stores a part."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.torch_comm import default_comm
from moe_plugin.experts.marks import is_expert
from moe_plugin.hosts.plain import multi_tensor
from moe_plugin.hosts.plain.replicas import replicas_of


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, *,
                    world: Comm | None = None) -> Tensor:
    """Scale gradients so that their L2 norm, over all parameters of all ranks, is at most
    `max_norm`.

    As `torch.nn.utils.clip_grad_norm_`, for models of which every rank stores a part: shards
    (DTensors) and experts of all ranks count, each once. Collective.

    Args:
        parameters: of this rank, after backward; gradients as `fully_shard_model` and `ddp_model`
            of `moe_plugin.hosts.plain.sharding` leave them.
        max_norm: bound; infinite: gradients stay as they are.
        world: all data-parallel ranks; None: those of the default group.
    Returns: the norm before clipping, float32 (float64 for float64 gradients), equal on all ranks;
        not finite where a gradient of any rank is not.
    """
    world = default_comm() if world is None else world
    owners = [p for p in parameters if p.grad is not None]
    alike = [p.grad for p in owners if not is_expert(p) and not isinstance(p, DTensor)]
    parts = [p for p in owners if is_expert(p) or isinstance(p, DTensor)]
    squared = multi_tensor.squared_norm([p.grad for p in parts], world.device,
                                        [_copies(p) for p in parts])
    squared = world.all_reduce(squared) + multi_tensor.squared_norm(alike, world.device)
    gradients = [p.grad for p in owners]
    norm = squared.sqrt().to(functools.reduce(torch.promote_types, [g.dtype for g in gradients],
                                              torch.float32))
    multi_tensor.scale_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(parameter: nn.Parameter) -> int:
    """How many ranks store, and count, this part of a parameter."""
    if not isinstance(parameter, DTensor):
        return replicas_of(parameter)
    mesh, copies = parameter.device_mesh, 1
    for size, placement in zip(mesh.shape, parameter.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return copies
