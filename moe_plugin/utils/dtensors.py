"""Utilities for parameters that are sharded by FSDP2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor.

    The DTensor module is not imported for this check, because importing it is slow; if it has not
    been imported, there are no DTensors.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def sharded_as(whole: Tensor, like: DTensor) -> DTensor:
    """Shard a full tensor in the same way as `like`, which must have the same shape. This function
    is collective: all ranks receive shards of rank 0's tensor.
    """
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


@torch.no_grad()
def fill_(parameter: Tensor, whole: Tensor) -> None:
    """Copy a full tensor into a parameter. This function is collective if the parameter is sharded.
    """
    if is_sharded(parameter):
        parameter.to_local().copy_(sharded_as(whole, parameter).to_local())
    else:
        parameter.copy_(whole)


def xavier_(weight_ED: Tensor) -> None:
    """Initialize `weight_ED` from a Xavier uniform distribution. The values are drawn in float32.
    """
    bound = (6 / sum(weight_ED.shape)) ** 0.5
    fill_(weight_ED, torch.empty(weight_ED.shape, dtype=torch.float32).uniform_(-bound, bound))
