"""Gradients of experts over ranks: sum over replicas, norm over all experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.hosts.plain import multi_tensor


def mark_replicas(parameter: Tensor, ranks: int) -> None:
    """Mark an expert parameter with the number of ranks that store it."""
    parameter.expert_replicas = ranks  # type: ignore[attr-defined]


def replicas_of(parameter: Tensor) -> int:
    """Number of ranks that store this expert parameter; 1 where it carries no mark."""
    return getattr(parameter, "expert_replicas", 1)


def sum_over_replicas(parameters: list[torch.nn.Parameter], group: Any) -> None:
    """Sum the gradients of experts over the ranks that store the same experts, in place.

    Each replica's gradient is already divided by the number of all data-parallel ranks
    (`layers.ExpertFFN`). group: those ranks; None: no replicas.
    """
    if group is not None:
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=group)


def expert_norm_squared(parameters: list[torch.nn.Parameter], group: Any,
                        device: torch.device) -> Tensor:
    """Sum over all experts of all ranks of squared gradient entries, float64, equal on every rank.

    An expert stored by R ranks (`replicas_of`) is counted once: its sum is divided by R before
    ranks are added up. A NaN or Inf of any rank reaches every rank this way.
    """
    squared = multi_tensor.squared_norm([p.grad for p in parameters], device,
                                        [replicas_of(p) for p in parameters])
    if group is not None:
        dist.all_reduce(squared, group=group)
    return squared
