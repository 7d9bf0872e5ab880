"""Differentiable collectives: for ranks whose losses differ (data and expert parallelism), and for
ranks whose losses are one and the same (tensor parallelism).

An all-to-all takes an `anchor`: a parameter of the layer. Where the data itself needs no gradient
on one rank (an input that is not trained, for example), the anchor keeps the node in the graph, so
that either all ranks run the backward collective or none does.

`split`, `gather`, `sum_parts` and `enter` mark the borders of a region in which each rank computes
a part, as Megatron's f and g do. A gradient outside the region is equal on all ranks and is never
summed over them; the gradients of parts are.
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
        # under create_graph the gradient is itself differentiated
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _AllToAll.apply(grad, None, ctx.comm, ctx.algorithm.back, ctx.recv,
                                   ctx.send), None, None, None, None, None
        return ctx.algorithm.back(ctx.comm, grad.contiguous(), ctx.recv,
                                  ctx.send), None, None, None, None, None


def all_to_all(x: Tensor, comm: Comm, algorithm: Exchange, send: Sequence[int] | None = None,
               recv: Sequence[int] | None = None, anchor: Tensor | None = None) -> Tensor:
    """All-to-all along dimension 0; its gradient is the reverse exchange, by `algorithm.back`.

    Args:
        x: [sum(send), ...].
        send, recv: lengths of the pieces, see `Comm.all_to_all`.
        anchor: a parameter, see the module.
    Returns: [sum(recv), ...], pieces in rank order; `x` itself in a group of one.
    """
    if comm.size == 1:
        return x
    return _AllToAll.apply(x, anchor, comm, algorithm, send, recv)


class _Pair(torch.autograd.Function):
    """One operation forward, another one backward, see `with_backward`."""

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
    """Run one collective whose gradient is another one; `x` itself in a group of one.

    Args:
        x: [n, ...].
        forward, backward: `all_gather`, `reduce_scatter`, `all_reduce`, `own_part` (this rank's
            1/size along dimension 0); backward also `identity`.
    """
    if comm.size == 1:
        return x
    if comm.key is not None and torch.compiler.is_compiling():
        return collective(x, comm.key, comm.size, forward, backward)
    return _Pair.apply(x, comm, forward, backward)


def all_gather(x: Tensor, comm: Comm) -> Tensor:
    """All ranks' `x` along dimension 0: [n, ...] to [size * n, ...].

    The gradient is a reduce-scatter, because each rank's loss depends on all of it.
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
        x_TD: tokens, equal on all ranks.
        weights_TK: their routing weights.
        anchor: a parameter, see `comm.functional`.
    """
    return (x_TD, weights_TK) if comm.size == 1 else _Enter.apply(x_TD, weights_TK, anchor, comm)
