"""Differentiable collectives for data, expert and tensor parallelism.

An all-to-all accepts an `anchor`, which is one of the layer's parameters. On some ranks, the input
of the all-to-all may not need a gradient, for example because it is not trained. On ranks where the
input needs no gradient, the anchor keeps the all-to-all in the autograd graph. As a result, either
all ranks run the backward collective or no rank does.

In data and expert parallelism, each rank has its own loss. In tensor parallelism, all ranks share
one loss. For tensor parallelism, `split`, `gather`, `sum_parts` and `enter` are applied at the
boundaries of a region in which each rank computes a part of the output. `split`, `gather`,
`sum_parts` and `enter` correspond to the functions f and g of Megatron. Outside a tensor-parallel
region, gradients are equal on all ranks and are never summed over ranks. Inside a tensor-parallel
region, the gradients of the ranks' parts are summed over ranks.
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
    """Exchange pieces of a tensor along dimension 0. The backward pass exchanges the gradients in
    the opposite direction with `algorithm.back`.

    Args:
        x: [sum(send), ...].
        comm: the group.
        algorithm: all-to-all algorithm to use.
        send: optional. Lengths of the pieces sent to each rank; see `Comm.all_to_all`.
        recv: optional. Lengths of the pieces received from each rank; see `Comm.all_to_all`.
        anchor: optional. Parameter that keeps the all-to-all in the autograd graph; see the module
            docstring.
    Returns:
        The received pieces in rank order, [sum(recv), ...]. In a group with one rank, `x` itself is
        returned.
    """
    if comm.size == 1:
        return x
    return _AllToAll.apply(x, anchor, comm, algorithm, send, recv)


class _Pair(torch.autograd.Function):
    """An autograd function that runs one collective in the forward pass and another in the backward
    pass; see `with_backward`.
    """

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
    """Run a collective whose gradient is computed with a different collective. In a group of one
    rank, `x` itself is returned.

    Args:
        x: [n, ...].
        comm: the group.
        forward: name of the collective to run: `all_gather`, `reduce_scatter`, `all_reduce` or
            `own_part`. `own_part` returns this rank's part (1/size) along dimension 0.
        backward: name of the collective that computes the gradient: any name that `forward`
            accepts, or `identity`.
    """
    if comm.size == 1:
        return x
    if comm.key is not None and torch.compiler.is_compiling():
        return collective(x, comm.key, comm.size, forward, backward)
    return _Pair.apply(x, comm, forward, backward)


def all_gather(x: Tensor, comm: Comm) -> Tensor:
    """Concatenate the tensors `x` [n, ...] of all ranks to a tensor [size * n, ...].

    The backward pass is a reduce-scatter, because each rank's loss depends on the whole tensor.
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
    """Return this rank's part [n, ...] of a tensor [size * n, ...] that is equal on all ranks.

    The backward pass gathers the gradients of all parts.
    """
    return with_backward(x, comm, "own_part", "all_gather")


def gather(x: Tensor, comm: Comm) -> Tensor:
    """Concatenate the parts [n, ...] of all ranks along dimension 0 to a tensor [size * n, ...].

    The backward pass returns this rank's part of the gradient.
    """
    return with_backward(x, comm, "all_gather", "own_part")


def sum_parts(x: Tensor, comm: Comm) -> Tensor:
    """Sum the parts of all ranks (the function g of Megatron). The parts may have any shape.

    The gradient of each part is the gradient of the sum.
    """
    return with_backward(x, comm, "all_reduce", "identity")


def enter(x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
          comm: Comm) -> tuple[Tensor, Tensor]:
    """Return the tokens and the routing weights unchanged. The backward pass sums the gradients of
    both tensors over ranks (the function f of Megatron).

    Both gradients are summed by a single all-reduce in the dtype of `x`.

    Args:
        x_TD: tokens, which must be equal on all ranks.
        weights_TK: routing weights of the tokens, which must be equal on all ranks.
        anchor: optional. A parameter that keeps this operation in the autograd graph; see the
            docstring of `comm.functional`.
        comm: the group.
    """
    return (x_TD, weights_TK) if comm.size == 1 else _Enter.apply(x_TD, weights_TK, anchor, comm)
