"""Parameters that FSDP2 shards, as the whole tensors that a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.dtensors import is_sharded, sharded_as


def whole(state: Any, comm: Comm) -> Any:
    """A state dict with whole tensors; collective over the ranks that share them.

    Args:
        state: nested mappings; its sharded tensors are in the same order on all ranks.
        comm: the ranks that write the checkpoint.
    Raises:
        ValueError: other ranks than these share a tensor.
    """
    if isinstance(state, Mapping):
        return {key: whole(value, comm) for key, value in state.items()}
    if not is_sharded(state):
        return state
    ranks = state.device_mesh.size()
    if ranks != comm.size:
        raise ValueError(
            f"parameters are sharded over {ranks} ranks and the checkpoint is written by "
            f"{comm.size}: must be the same ranks, and those that share the experts; keep the "
            "parameters on every rank (ddp_model), or spread the experts over all of them")
    return state.full_tensor().cpu()  # not the whole model on a device


def as_stored(value: Any, mine: Any) -> Any:
    """What `whole` made of a tensor, sharded like the one in its place; other values as they are.
    """
    if is_sharded(mine) and isinstance(value, Tensor) and value.shape == mine.shape:
        return sharded_as(value, mine)
    return value
