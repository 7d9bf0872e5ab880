"""Differentiable collectives for ranks that hold the same tensor and whose losses are the same loss
(tensor parallelism).

Each is its partner's mirror: what one does forward the other does backward. A gradient that arrives
here is the same on all ranks and is never summed over them unless it is a part (Megatron's f and
g).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.chunk(comm.size)[comm.rank].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.comm.all_gather(grad.contiguous()), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_gather(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad.chunk(ctx.comm.size)[ctx.comm.rank].contiguous(), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
                comm: Comm) -> tuple[Tensor, Tensor]:
        ctx.comm, ctx.dtypes = comm, (x_TD.dtype, weights_TK.dtype)
        return x_TD.view_as(x_TD), weights_TK.view_as(weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor, grad_TK: Tensor) -> tuple[Any, ...]:
        both = torch.cat([grad_TD, grad_TK.to(grad_TD.dtype)], dim=1)  # one all-reduce for both
        x_TD, weights_TK = ctx.comm.all_reduce(both).split([grad_TD.shape[1], grad_TK.shape[1]],
                                                           dim=1)
        return x_TD.to(ctx.dtypes[0]), weights_TK.to(ctx.dtypes[1]), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, comm: Comm, root: int) -> Tensor:
        ctx.comm, ctx.mine = comm, comm.rank == root
        return comm.broadcast(x, root)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        total = ctx.comm.all_reduce(grad.contiguous())
        return total if ctx.mine else torch.zeros_like(total), None, None, None


def split(x: Tensor, comm: Comm) -> Tensor:
    """This rank's 1/size of a tensor that all ranks hold (dimension 0, a multiple of size);
    backward gathers the parts.
    """
    return x if comm.size == 1 else _Split.apply(x, comm)


def gather(x: Tensor, comm: Comm) -> Tensor:
    """All ranks' parts along dimension 0; backward keeps this rank's."""
    return x if comm.size == 1 else _Gather.apply(x, comm)


def sum_parts(x: Tensor, comm: Comm) -> Tensor:
    """Sum of the ranks' parts; the gradient of each part is that of the sum (Megatron's g)."""
    return x if comm.size == 1 else _Sum.apply(x, comm)


def enter(x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
          comm: Comm) -> tuple[Tensor, Tensor]:
    """Both as they are; backward sums the ranks' parts of both gradients in one all-reduce
    (Megatron's f), in x's dtype.
    """
    return (x_TD, weights_TK) if comm.size == 1 else _Enter.apply(x_TD, weights_TK, anchor, comm)


def broadcast(x: Tensor, anchor: Tensor | None, comm: Comm, root: int) -> Tensor:
    """`x` of rank root on all ranks, whose losses differ: backward sums their gradients at the
    root.
    """
    return x if comm.size == 1 else _Broadcast.apply(x, anchor, comm, root)
