"""Expert parameters gathered from other ranks for one call.

The local ones stay where they are; backward returns their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.functional import all_gather
from moe_plugin.experts.ffn import SHARD_AXIS


def gather_parameters(local: Mapping[str, Tensor], comm: Comm, shards: int) -> dict[str, Tensor]:
    """All parameters of `comm`'s ranks in one all-gather; backward is one reduce-scatter (ZeRO's
    way).

    Args:
        local: this rank's parameters by name, expert axis first.
        comm: the ranks to gather from.
        shards: how many consecutive ranks hold shards of the same expert; these are put together
            along the inner axis.
    Returns: the same names; [L * size / shards, ...] with inner axes `shards` times as long.
    """
    flat = torch.cat([value.reshape(-1) for value in local.values()])
    all_WN = all_gather(flat, comm).view(comm.size, -1)
    parts = all_WN.split([value.numel() for value in local.values()], dim=1)
    return {
        name: _together(part, local[name], SHARD_AXIS[name], shards)
        for (name, part) in zip(local, parts, strict=True)
    }


def _together(part_WN: Tensor, like: Tensor, axis: int, shards: int) -> Tensor:
    rest = like.shape[1:]
    if shards == 1:
        return part_WN.reshape(-1, *rest)
    # runs of ranks with the same experts, their shards, the experts
    split = part_WN.reshape(-1, shards, *like.shape)
    whole = list(rest)
    whole[axis - 1] *= shards
    return split.movedim(1, axis + 1).reshape(-1, *whole)
