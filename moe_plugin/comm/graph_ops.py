# ruff: noqa: UP006, UP035, UP045  (torch.library reads List and Optional)
"""Collectives defined as torch operations, so that `torch.compile` can include them in a graph.

A compiler cannot trace the implementation of a collective, because the implementation uses process
groups, counters, timeouts and timers. The compiler does not look inside the operations of this
module. The compiler only uses the output shapes and gradients of an operation, and includes each
operation in its graphs unchanged. Torch operations accept only tensors, numbers and strings. Groups
and exchanges are therefore passed to the operations as keys. The code in this module runs only
under a compiler.

All ranks must compile the same graph. The compiler does not change the order of the collectives,
because each collective of a layer depends on the output of an earlier one. The inputs must need
gradients either on all ranks or on no rank, because the compiler removes a backward exchange whose
output is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from moe_plugin.comm.base import COLLECTIVES, Comm
from moe_plugin.comm.exchange import Exchange
from moe_plugin.comm.group import key_of, owner_of


class Route:
    """A group and the exchange that sends rows within the group. A single key identifies both the
    group and the exchange. A copy of a `Route` has a different key.
    """

    def __init__(self, comm: Comm, algorithm: Exchange, back: Route | None = None) -> None:
        self.comm, self.algorithm = comm, algorithm
        self.key = key_of(self)
        # Created here rather than on first use: state that changes while a graph is traced would
        # invalidate the graph's guards.
        if back is None and algorithm.back is not algorithm:
            back = Route(comm, algorithm.back, self)
        self._other = back

    @property
    def back(self) -> Route:
        """The route in the opposite direction; see `Exchange.back`.

        If both directions use the same exchange, the opposite route is the route itself.
        """
        return self if self._other is None else self._other

    def __reduce__(self) -> tuple[type[Route], tuple[Comm, Exchange]]:
        return Route, (self.comm, self.algorithm)


@torch.library.custom_op("moe_plugin::all_to_all", mutates_args=())
def all_to_all(x: Tensor, anchor: Optional[Tensor], route: str, send: Optional[Sequence[int]],
               recv: Optional[Sequence[int]]) -> Tensor:
    """Exchange pieces along dimension 0. The operation supports autograd; see
    `comm.functional.all_to_all`.

    Args:
        x: [sum(send), ...].
        anchor: optional. A parameter that keeps the all-to-all in the autograd graph; see
            `comm.functional`.
        route: key that identifies a `Route`.
        send: optional. Lengths of the pieces sent to each rank.
        recv: optional. Lengths of the pieces received from each rank.
    Returns:
        [sum(recv), ...].
    """
    owner = owner_of(route)
    return owner.algorithm(owner.comm, x.contiguous(), send, recv)


@all_to_all.register_fake
def _(x: Tensor, anchor: Any, route: str, send: Any, recv: Any) -> Tensor:
    return x.new_empty(x.shape if recv is None else (sum(recv), *x.shape[1:]))


def _keep_route(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.route, ctx.send, ctx.recv = inputs


def _exchange_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    route = owner_of(ctx.route).back.key
    return all_to_all(grad, None, route, ctx.recv, ctx.send), None, None, None, None


all_to_all.register_autograd(_exchange_back, setup_context=_keep_route)


@torch.library.custom_op("moe_plugin::collective", mutates_args=())
def collective(x: Tensor, comm: str, size: int, name: str, backward: str) -> Tensor:
    """Run a collective whose gradient is computed with a different collective.

    Args:
        x: tensor [n, ...]. For `all_reduce` and `all_max`, a 0-dim tensor is also allowed.
        comm: key that identifies the communication group.
        size: number of ranks in the group.
        name: name of the collective: `all_to_all` (with pieces of equal length), `all_gather`,
            `reduce_scatter`, `all_reduce`, `all_max` or `own_part`.
        backward: name of the collective that computes the gradient. `identity` passes the gradient
            through unchanged, and `none` means that no gradient is computed.
    """
    return COLLECTIVES[name][0](owner_of(comm), x.contiguous())


@collective.register_fake
def _(x: Tensor, comm: str, size: int, name: str, backward: str) -> Tensor:
    if x.dim() == 0:
        return torch.empty_like(x)
    return x.new_empty((COLLECTIVES[name][1](x.shape[0], size), *x.shape[1:]))


def _keep_names(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.comm, ctx.size, ctx.name, ctx.backward_name = inputs


def _collective_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if ctx.backward_name == "none":
        return None, None, None, None, None
    if ctx.backward_name != "identity":
        grad = collective(grad, ctx.comm, ctx.size, ctx.backward_name, ctx.name)
    return grad, None, None, None, None


collective.register_autograd(_collective_back, setup_context=_keep_names)
