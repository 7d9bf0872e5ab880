"""The norm of gradients of which every rank has a part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_plugin.comm.host_collectives import named
from moe_plugin.gradients import multi_tensor
from moe_plugin.gradients.replicas import replicas_of


def norm_squared(parameters: list[torch.nn.Parameter], group: Any,
                 device: torch.device) -> Tensor:
    """Sum over all ranks of squared gradient entries, float64, equal on every rank.

    What R ranks store (`replicas_of`) is counted once: its sum is divided by R before ranks are
    added up. A NaN or Inf of any rank reaches every rank this way.

    Raises: CommError: the collective failed or timed out.
    """
    squared = multi_tensor.squared_norm([p.grad for p in parameters], device,
                                        [replicas_of(p) for p in parameters])
    if group is not None:
        with named("all_reduce of the gradient norm", group):
            dist.all_reduce(squared, group=group)
    return squared
