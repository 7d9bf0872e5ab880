"""Differentiable collectives for ranks whose losses differ (data and expert parallelism).

An all-to-all takes an `anchor`: a parameter of the layer. Where the data itself needs no gradient
on one rank (an input that is not trained, for example), the anchor keeps the node in the graph, so
that either all ranks run the backward collective or none does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm
from moe_plugin.comm.compiled import COLLECTIVES, collective
from moe_plugin.comm.exchange import Exchange


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
            return _AllToAll.apply(grad, None, ctx.comm, ctx.algorithm, ctx.recv,
                                   ctx.send), None, None, None, None, None
        return ctx.algorithm(ctx.comm, grad.contiguous(), ctx.recv,
                             ctx.send), None, None, None, None, None


def all_to_all(x: Tensor, comm: Comm, algorithm: Exchange, send: Sequence[int] | None = None,
               recv: Sequence[int] | None = None, anchor: Tensor | None = None) -> Tensor:
    """All-to-all along dimension 0; its gradient is the reverse exchange.

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
