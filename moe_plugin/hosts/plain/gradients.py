"""Gradient reduction for plain PyTorch training loops (hosts bring their own)."""

from __future__ import annotations

from torch import nn

from moe_plugin.comm.base import Comm
from moe_plugin.experts.marks import expert_parameters, is_expert


def sync_gradients(model: nn.Module, world: Comm, expert_group: Comm | None = None,
                   replicas: Comm | None = None) -> None:
    """Make every rank's gradients those of the mean over ranks of the ranks' losses.

    Shared parameters are averaged over `world`. An expert's gradient already is the sum over the
    ranks of its expert-parallel group; it is summed over `replicas` (the ranks that store the same
    experts, where there are several such groups) and divided by the size of `world` once.

    Args:
        model: after backward. Every parameter without a gradient must be without one on all ranks.
        world: all data-parallel ranks.
        expert_group: the layer's group; a group of one means that experts are replicated like any
            parameter.
        replicas: see above; None where `expert_group` is `world`.
    Raises:
        ValueError: the groups do not make up the world.
    """
    ep = world if expert_group is None else expert_group
    copies = replicas.size if replicas is not None else 1
    if ep.size > 1 and ep.size * copies != world.size:
        raise ValueError(
            f"expert group of {ep.size} times {copies} replicas is not the world of {world.size} "
            "ranks; pass `replicas`, the ranks "
            "that store the same experts")
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        reducer = world if not is_expert(parameter) or ep.size == 1 else replicas
        total = parameter.grad if reducer is None else reducer.all_reduce(parameter.grad)
        parameter.grad.copy_(total / world.size)


def exclude_experts(model: nn.Module) -> None:
    """Call before `DistributedDataParallel(model)`, so that it leaves experts alone.

    Otherwise DDP overwrites a rank's experts by rank 0's and averages their gradients.

    After backward, `sync_gradients` does what remains to be done for the experts.
    """
    # torch's own function for this overwrites the names that were left out before
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    model._ddp_params_and_buffers_to_ignore = [*ignored, *expert_parameters(model)]  # type: ignore[assignment]
