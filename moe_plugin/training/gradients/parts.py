"""If the optimizer state is sharded, each rank's optimizer updates only a part of each parameter.
This module determines the part of each parameter that a rank updates.

The optimizer receives plain tensors, so any elementwise optimizer can be used. Each part is a slice
along the first axis, and shares its storage with the parameter. For a DTensor, the part is a slice
of the rank's shard. A parameter that is not a DTensor is flattened and divided into one slice per
rank. The lengths of the slices are the same as those of `torch.chunk`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_plugin.comm.base import Comm
from moe_plugin.experts.base import is_expert, mark_expert
from moe_plugin.training.gradients.fused import local as local_part
from moe_plugin.training.gradients.replicas import (
    BUCKET_BYTES,
    in_buckets,
    mark_replicas,
    replicas_of,
)
from moe_plugin.utils.tensors import is_sharded


@dataclass(frozen=True)
class Part:
    """A parameter, and the part of this parameter that this rank updates.

    Attributes:
        parameter: the parameter of the model.
        local: the tensor that the optimizer updates. If this rank updates the whole parameter,
            `local` is `parameter` itself.
        shape: shape of the full parameter before it was split along its first axis.
        comm: the ranks that update the other parts, or None if this rank updates the whole
            parameter.
        stays: whether this part is stored on this rank only. If `stays` is True, `parameter` is a
            DTensor.
    """

    parameter: nn.Parameter
    local: nn.Parameter
    shape: torch.Size
    comm: Comm | None
    stays: bool = False

    def take_gradient(self) -> None:
        """Move the parameter's reduced gradient, or zeros if there is none, to `local`."""
        if self.local is self.parameter:
            return
        gradient = self.parameter.grad
        if gradient is not None and self.stays:
            self.local.grad, self.parameter.grad = local_part(gradient), None
        elif gradient is not None:
            self.local.grad = self.cut(gradient)
        elif self.local.grad is None:
            self.local.grad = torch.zeros_like(self.local)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor shaped like the parameter, as a view if possible."""
        if self.comm is None:
            return whole
        return piece(whole.reshape(self.shape), self.comm)

    def whole(self, part: Tensor) -> Tensor:
        """Gather the parts of all ranks into a tensor with the shape of the parameter. All ranks
        must call this method.

        A tensor whose shape differs from that of `local`, such as a step count, is returned
        unchanged.
        """
        if self.comm is None or part.shape != self.local.shape:
            return part
        padded = _padded(part, self.shape, self.comm)
        return self.comm.all_gather(padded)[:self.shape[0]].view(self.parameter.shape)


def piece(whole: Tensor, comm: Comm) -> Tensor:
    """Return this rank's slice along the first axis. The last slices may be shorter or empty."""
    rows = -(-whole.shape[0] // comm.size)
    first = min(comm.rank * rows, whole.shape[0])
    return whole[first:min(first + rows, whole.shape[0])]


def shards(parameters: Iterable[nn.Parameter], comm: Comm) -> list[Part]:
    """Return the parts that this rank updates in an FSDP2 model. For a DTensor, the part is this
    rank's shard. For any other parameter, the part is the whole parameter.

    Args:
        parameters: parameters of the model.
        comm: the ranks among which DTensors are sharded along their first axis.
    """
    parts: list[Part] = []
    for parameter in parameters:
        p: Any = parameter  # a DTensor is a Parameter, too
        parts.append(Part(p, _stand_in(p, p.detach().to_local()), p.shape, comm, stays=True)
                     if is_sharded(parameter) else Part(p, p, p.shape, None))
    return parts


def slices(parameters: Iterable[nn.Parameter], comm: Comm, replicas: Comm | None) -> list[Part]:
    """Return the parts that this rank updates if the parameters are not sharded (ZeRO stage 1).

    Args:
        parameters: contiguous parameters.
        comm: the ranks that store the dense parameters.
        replicas: the ranks that store the same experts as this rank, or None if no other rank
            stores them.
    """
    parts = []
    for parameter in parameters:
        ranks = replicas if is_expert(parameter) else comm
        if ranks is None:
            parts.append(Part(parameter, parameter, parameter.shape, None))
        else:
            flat_N = parameter.detach().view(-1)
            parts.append(Part(parameter, _stand_in(parameter, piece(flat_N, ranks)), flat_N.shape,
                              ranks))
    return parts


def _stand_in(parameter: nn.Parameter, storage: Tensor) -> nn.Parameter:
    local = nn.Parameter(storage, requires_grad=parameter.requires_grad)
    return mark_expert(local) if is_expert(parameter) else local


def publish(parts: Iterable[Part]) -> None:
    """Send each rank's updated parts to all other ranks, in buckets. All ranks must call this
    function.

    Shards of DTensors are not sent.
    """
    by_comm: dict[int, tuple[Comm, list[Part]]] = {}
    for part in parts:
        if part.comm is not None and not part.stays:
            by_comm.setdefault(id(part.comm), (part.comm, []))[1].append(part)
    for comm, sharing in by_comm.values():
        owners = {id(part.parameter): part for part in sharing}
        for bucket in in_buckets((part.parameter for part in sharing), BUCKET_BYTES):
            _publish([owners[id(parameter)] for parameter in bucket], comm)


@torch.no_grad()
def _publish(parts: list[Part], comm: Comm) -> None:
    padded = [_padded(part.local.detach(), part.shape, comm) for part in parts]
    all_WN = comm.all_gather(torch.cat(padded)).view(comm.size, -1)
    for part, each_WN in zip(parts, all_WN.split([len(x) for x in padded], dim=1), strict=True):
        values_N = each_WN.reshape(-1)[:part.parameter.numel()]
        part.parameter.copy_(values_N.view_as(part.parameter))


def _padded(part: Tensor, shape: torch.Size, comm: Comm) -> Tensor:
    rows = -(-shape[0] // comm.size)
    if part.shape[0] == rows:
        return part.contiguous()
    padded = part.new_zeros(rows, *part.shape[1:])
    padded[:part.shape[0]] = part
    return padded


def count_once(parts: Iterable[Part], ranks: int) -> None:
    """Mark each tensor of the optimizer with the number of ranks that store the same values, so
    that a norm counts it once.

    Args:
        parts: the parts that this rank updates.
        ranks: total number of data-parallel ranks.
    """
    for part in parts:
        if part.comm is not None:
            mark_replicas(part.local, 1)
        elif not is_expert(part.local):
            mark_replicas(part.local, ranks)
        else:
            mark_replicas(part.local, replicas_of(part.parameter))
