"""Parameters that FSDP2 shards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor. Their module is slow to import and not imported for this:
    where nothing has imported it, there are none.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def sharded_as(whole: Tensor, like: DTensor) -> DTensor:
    """A whole tensor sharded as another one of its shape. Collective: all get rank 0's values."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


@torch.no_grad()
def fill_(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into a parameter, sharded or not; collective where it is."""
    if is_sharded(parameter):
        parameter.to_local().copy_(sharded_as(whole, parameter).to_local())
    else:
        parameter.copy_(whole)
