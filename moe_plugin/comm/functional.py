"""Differentiable collectives for data, expert and tensor parallelism.

An all-to-all accepts an `anchor`, which is a parameter of the layer. If the input of the all-to-all
needs no gradient on one rank (for example because it is not trained), the anchor keeps the node in
the autograd graph. As a result, the backward collective runs either on all ranks or on no rank.

In data and expert parallelism, ranks have different losses. In tensor parallelism, the ranks share
one loss. `split`, `gather`, `sum_parts` and `enter` are applied at the boundaries of a region in
which each rank computes a part of the result, like the functions f and g of Megatron. Gradients
outside the region are equal on all ranks and are never summed over ranks. Gradients of each rank's
part are summed over ranks.
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
    """Exchange pieces of a tensor along dimension 0. The gradient is the reverse exchange with
    `algorithm.back`.

    Args:
        x: [sum(send), ...].
        comm: the group.
        algorithm: the exchange algorithm that is used.
        send: optional. Length of the piece sent to each rank; see `Comm.all_to_all`.
        recv: optional. Length of the piece received from each rank; see `Comm.all_to_all`.
        anchor: optional. Parameter that keeps the node in the autograd graph; see the module
            docstring.
    Returns:
        The received pieces in rank order, [sum(recv), ...]. In a group of one rank, `x` itself is
        returned.
    """
    if comm.size == 1:
        return x
    return _AllToAll.apply(x, anchor, comm, algorithm, send, recv)


class _Pair(torch.autograd.Function):
    """An autograd function that runs one collective in forward and a different one in backward; see
    `with_backward`.
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
    """Run a collective whose gradient is computed by a different collective. In a group of one
    rank, `x` itself is returned.

    Args:
        x: [n, ...].
        comm: the group.
        forward: name of the collective: `all_gather`, `reduce_scatter`, `all_reduce` or `own_part`
            (this rank's 1/size along dimension 0).
        backward: name of the collective for the gradient: one of the choices for `forward`, or
            `identity`.
    """
    if comm.size == 1:
        return x
    if comm.key is not None and torch.compiler.is_compiling():
        return collective(x, comm.key, comm.size, forward, backward)
    return _Pair.apply(x, comm, forward, backward)


def all_gather(x: Tensor, comm: Comm) -> Tensor:
    """Concatenate the tensors `x` [n, ...] of all ranks along dimension 0 to [size * n, ...].

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
    """Given a tensor [size * n, ...] that is equal on all ranks, return this rank's part [n, ...].

    The backward pass gathers the parts.
    """
    return with_backward(x, comm, "own_part", "all_gather")


def gather(x: Tensor, comm: Comm) -> Tensor:
    """Concatenate the parts [n, ...] of all ranks along dimension 0 to [size * n, ...].

    The backward pass returns this rank's part of the gradient.
    """
    return with_backward(x, comm, "all_gather", "own_part")


def sum_parts(x: Tensor, comm: Comm) -> Tensor:
    """Return the sum over ranks of each rank's part, which may have any shape (the function g of
    Megatron).

    The gradient of each part equals the gradient of the sum.
    """
    return with_backward(x, comm, "all_reduce", "identity")


def enter(x_TD: Tensor, weights_TK: Tensor, anchor: Tensor | None,
          comm: Comm) -> tuple[Tensor, Tensor]:
    """Return the tokens and the routing weights unchanged. The backward pass sums the gradients of
    both tensors over ranks (the function f of Megatron).

    A single all-reduce, in the dtype of `x`, sums both gradients.

    Args:
        x_TD: tokens, which are equal on all ranks.
        weights_TK: routing weights of the tokens, which are equal on all ranks.
        anchor: optional. A parameter that keeps the node in the autograd graph; see the docstring
            of `comm.functional`.
        comm: the group.
    """
    return (x_TD, weights_TK) if comm.size == 1 else _Enter.apply(x_TD, weights_TK, anchor, comm)
