"""Differentiable collectives, for ranks with different losses (data and expert parallelism) and for
ranks that share one loss (tensor parallelism).

An all-to-all accepts an `anchor`, a parameter of the layer. If the data itself needs no gradient on
one rank (for example because the input is not trained), the anchor keeps the node in the autograd
graph. Either all ranks or no ranks then run the backward collective.

`split`, `gather`, `sum_parts` and `enter` mark the borders of a region in which each rank computes
a part, as Megatron's f and g do. Gradients outside the region are equal on all ranks and are never
summed over ranks. Gradients of the parts are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import COLLECTIVES, Comm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.graph_ops import collective


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, comm: Comm, algorithm: Exchange,
                send: Any, recv: Any) -> Tensor:
        ctx.comm, ctx.algorithm, ctx.send, ctx.recv = comm, algorithm, send, recv
        return algorithm(comm, x.contiguous(), send, recv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # with create_graph=True the gradient is differentiated again, so it needs an autograd node
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _AllToAll.apply(grad, None, ctx.comm, ctx.algorithm.back, ctx.recv,
                                   ctx.send), None, None, None, None, None
        return ctx.algorithm.back(ctx.comm, grad.contiguous(), ctx.recv,
                                  ctx.send), None, None, None, None, None


def all_to_all(x: Tensor, comm: Comm, algorithm: Exchange, send: Sequence[int] | None = None,
               recv: Sequence[int] | None = None, anchor: Tensor | None = None) -> Tensor:
    """Exchange pieces along dimension 0. The gradient is the reverse exchange with
    `algorithm.back`.

    Args:
        x: [sum(send), ...].
        comm: the group.
        algorithm: the exchange that runs.
        send: optional. Lengths of the pieces to each rank, see `Comm.all_to_all`.
        recv: optional. Lengths of the pieces from each rank, see `Comm.all_to_all`.
        anchor: optional. A parameter, see the module docstring.
    Returns:
        [sum(recv), ...], pieces in rank order; `x` itself in a group of one rank.
    """
    if comm.size == 1:
        return x
    return _AllToAll.apply(x, anchor, comm, algorithm, send, recv)


class _Pair(torch.autograd.Function):
    """One collective in forward and another one in backward, see `with_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, forward: str, backward: str) -> Tensor:
        ctx.comm, ctx.backward_name = comm, backward
        return COLLECTIVES[forward][0](comm, x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.backward_name != "identity":
            grad = COLLECTIVES[ctx.backward_name][0](ctx.comm, grad.contiguous())
        return grad, None, None, None


def with_backward(x: Tensor, comm: Comm, forward: str, backward: str) -> Tensor:
    """Run one collective whose gradient is another collective. Returns `x` itself in a group of one
    rank.

    Args:
        x: [n, ...].
        comm: the group.
        forward: `all_gather`, `reduce_scatter`, `all_reduce` or `own_part` (this rank's 1/size
            along dimension 0).
        backward: same choices as `forward`, or `identity`.
    """
    if comm.size == 1:
        return x
    if comm.key is not None and torch.compiler.is_compiling():
        return collective(x, comm.key, comm.size, forward, backward)
    return _Pair.apply(x, comm, forward, backward)


def all_gather(x: Tensor, comm: Comm) -> Tensor:
    """Concatenate all ranks' `x` along dimension 0: [n, ...] to [size * n, ...].

    The gradient is a reduce-scatter, because each rank's loss depends on the whole result.
    """
    return with_backward(x, comm, "all_gather", "reduce_scatter")


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
    """Return this rank's part of a tensor that is equal on all ranks: [size * n, ...] to [n, ...].

    The backward pass gathers the parts.
    """
    return with_backward(x, comm, "own_part", "all_gather")


def gather(x: Tensor, comm: Comm) -> Tensor:
    """Concatenate all ranks' parts along dimension 0: [n, ...] to [size * n, ...].

    The backward pass returns this rank's part of the gradient.
    """
    return with_backward(x, comm, "all_gather", "own_part")


def sum_parts(x: Tensor, comm: Comm) -> Tensor:
    """Return the sum of the ranks' parts, any shape (Megatron's g).

    The gradient of each part equals the gradient of the sum.
    """
    return with_backward(x, comm, "all_reduce", "identity")


def enter(x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
          comm: Comm) -> tuple[Tensor, Tensor]:
    """Return both tensors unchanged. The backward pass sums the ranks' parts of both gradients
    (Megatron's f).

    One all-reduce, in the dtype of x, sums both gradients.

    Args:
        x_TD: tokens, equal on all ranks.
        weights_TK: routing weights of the tokens.
        anchor: optional. A parameter, see the docstring of `comm.functional`.
        comm: the group.
    """
    return (x_TD, weights_TK) if comm.size == 1 else _Enter.apply(x_TD, weights_TK, anchor, comm)
