"""Differentiable collectives over a `Comm`.

Every function takes an `anchor`: a parameter of the layer. Where the data itself needs no gradient
on one rank (an input that is not trained, say), the anchor keeps the node in the graph, so that all
ranks run the backward collective or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.comm.base import Comm, Exchange
from moe_plugin.comm.coalesce import pack, unpack
from moe_plugin.comm.handles import Handle, start

__all__ = [
    "Exchange", "PendingAllToAll", "all_reduce_sum", "all_to_all", "all_to_all_many",
    "start_all_to_all"
]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, comm: Comm, algorithm: Exchange,
                send: Any, recv: Any) -> Tensor:
        ctx.comm, ctx.algorithm, ctx.send, ctx.recv = comm, algorithm, send, recv
        return algorithm(comm, x.contiguous(), send, recv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # it is itself to be differentiated
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _AllToAll.apply(grad, None, ctx.comm, ctx.algorithm, ctx.recv,
                                   ctx.send), None, None, None, None, None
        return ctx.algorithm(ctx.comm, grad.contiguous(), ctx.recv,
                             ctx.send), None, None, None, None, None


def all_to_all(x: Tensor, comm: Comm, algorithm: Exchange, send: Sequence[int] | None = None,
               recv: Sequence[int] | None = None, anchor: Tensor | None = None) -> Tensor:
    """All-to-all along dimension 0 by the given algorithm; its gradient is the reverse exchange."""
    if comm.size == 1:
        return x
    return _AllToAll.apply(x, anchor, comm, algorithm, send, recv)


class _Mirrored(torch.autograd.Function):
    """One collective of a `Comm` forward, another one backward; by name, so that a compiler sees
    plain values.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, there: str, back: str) -> Tensor:
        ctx.comm, ctx.back = comm, back
        return getattr(comm, there)(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return getattr(ctx.comm, ctx.back)(grad.contiguous()), None, None, None


def all_gather(x: Tensor, comm: Comm) -> Tensor:
    """All ranks' `x` along dimension 0; the gradient is a reduce-scatter (each rank's loss depends
    on all of it).
    """
    return x if comm.size == 1 else _Mirrored.apply(x, comm, "all_gather", "reduce_scatter")


def reduce_scatter(x: Tensor, comm: Comm) -> Tensor:
    """This rank's 1/size (dimension 0, a multiple of size) of the sum over ranks; the gradient is
    an all-gather.
    """
    return x if comm.size == 1 else _Mirrored.apply(x, comm, "reduce_scatter", "all_gather")


def all_reduce_sum(x: Tensor, comm: Comm) -> Tensor:
    """Sum over ranks; the gradient is the sum of the ranks' gradients (each rank's loss depends on
    the sum).
    """
    return x if comm.size == 1 else _Mirrored.apply(x, comm, "all_reduce", "all_reduce")


class PendingAllToAll:
    """A differentiable all-to-all under way; made by `start_all_to_all`. Call `wait` exactly once.

    Backward mirrors it: the gradient's exchange starts where `wait` was called and is awaited where
    the exchange was started, so that what was computed in between hides it again.
    """

    def __init__(self, comm: Comm, algorithm: Exchange, send: Sequence[int] | None,
                 recv: Sequence[int] | None) -> None:
        self.comm, self.algorithm, self.send, self.recv = comm, algorithm, send, recv
        self.forward_handle: Handle | None = None
        self.backward_handle: Handle | None = None
        self.token: Tensor | None = None

    def wait(self) -> Tensor:
        """The received rows."""
        return _Wait.apply(self.token, self)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, pending: PendingAllToAll) -> Tensor:
        ctx.pending = pending
        pending.forward_handle = start(pending.comm, pending.algorithm, x.contiguous(),
                                       pending.send, pending.recv)
        return x.new_empty(0)  # carries the graph from here to `wait`; the rows do not exist yet

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Any, ...]:
        return ctx.pending.backward_handle.wait(), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: PendingAllToAll) -> Tensor:
        ctx.pending = pending
        return pending.forward_handle.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        pending = ctx.pending
        pending.backward_handle = start(pending.comm, pending.algorithm, grad.contiguous(),
                                        pending.recv, pending.send)
        return grad.new_empty(0), None


def start_all_to_all(x: Tensor, comm: Comm, algorithm: Exchange, send: Sequence[int] | None = None,
                     recv: Sequence[int] | None = None,
                     anchor: Tensor | None = None) -> PendingAllToAll:
    """Begin an all-to-all along dimension 0; compute, then `wait` for it. All ranks start and wait
    in one order.
    """
    pending = PendingAllToAll(comm, algorithm, send, recv)
    pending.token = _Start.apply(x, anchor, pending)
    return pending


class _Many(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, comm: Comm, algorithm: Exchange, send: Any,
                recv: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.algorithm, ctx.send, ctx.recv = comm, algorithm, send, recv
        packed, layout = pack(tensors)
        out = unpack(algorithm(comm, packed, send, recv), layout)
        ctx.floating = [x.is_floating_point() for x in tensors]
        ctx.mark_non_differentiable(
            *[x for x, is_float in zip(out, ctx.floating, strict=True) if not is_float])
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        wanted = [grad for grad, is_float in zip(grads, ctx.floating, strict=True) if is_float]
        packed, layout = pack(wanted)
        back = iter(unpack(ctx.algorithm(ctx.comm, packed, ctx.recv, ctx.send), layout))
        return (None,) * 5 + tuple(next(back) if is_float else None for is_float in ctx.floating)


def all_to_all_many(tensors: Sequence[Tensor], comm: Comm, algorithm: Exchange,
                    send: Sequence[int] | None = None, recv: Sequence[int] | None = None,
                    anchor: Tensor | None = None) -> list[Tensor]:
    """Exchange several tensors (rows, weights, ids: [R, ...] of any dtypes) in the messages of one;
    gradients of floating ones likewise.
    """
    if comm.size == 1:
        return list(tensors)
    return list(_Many.apply(anchor, comm, algorithm, send, recv, *tensors))
