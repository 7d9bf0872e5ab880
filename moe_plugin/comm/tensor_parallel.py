"""Differentiable collectives for ranks whose losses are one and the same (tensor parallelism).

They mark the borders of a region in which each rank computes a part, as Megatron's f and g do. A
gradient outside the region is equal on all ranks and is never summed over them; the gradients of
parts are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.functional import with_backward


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
                comm: Comm) -> tuple[Tensor, Tensor]:
        ctx.comm, ctx.dtypes = comm, (x_TD.dtype, weights_TK.dtype)
        return x_TD.view_as(x_TD), weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor, grad_TK: Tensor) -> tuple[Any, ...]:
        both = torch.cat([grad_TD, grad_TK.to(grad_TD.dtype)], dim=1)  # one all-reduce for both
        total = ctx.comm.collectives.all_reduce(ctx.comm, both)
        x_TD, weights_TK = total.split([grad_TD.shape[1], grad_TK.shape[1]], dim=1)
        return x_TD.to(ctx.dtypes[0]), weights_TK.to(ctx.dtypes[1]), None, None


def split(x: Tensor, comm: Comm) -> Tensor:
    """This rank's part of a tensor that is equal on all ranks: [size * n, ...] to [n, ...].

    Backward gathers the parts.
    """
    return with_backward(x, comm, "own_part", "all_gather")


def gather(x: Tensor, comm: Comm) -> Tensor:
    """All ranks' parts along dimension 0: [n, ...] to [size * n, ...].

    Backward takes this rank's part.
    """
    return with_backward(x, comm, "all_gather", "own_part")


def sum_parts(x: Tensor, comm: Comm) -> Tensor:
    """Sum of the ranks' parts, any shape (Megatron's g).

    The gradient of each part is that of the sum.
    """
    return with_backward(x, comm, "all_reduce", "identity")


def enter(x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
          comm: Comm) -> tuple[Tensor, Tensor]:
    """Both tensors unchanged; backward sums the ranks' parts of both gradients (Megatron's f).

    One all-reduce in x's dtype serves both.

    Args:
        x_TD: tokens, equal on all ranks. weights_TK: their routing weights.
        anchor: a parameter, see `comm.functional`.
    """
    return (x_TD, weights_TK) if comm.size == 1 else _Enter.apply(x_TD, weights_TK, anchor, comm)
