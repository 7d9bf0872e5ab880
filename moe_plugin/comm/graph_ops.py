# ruff: noqa: UP006, UP035, UP045  (torch.library reads List and Optional)
"""Collectives as torch operations for use with `torch.compile`.

A compiler cannot trace the implementation of a collective, because it uses process groups,
counters, timeouts and algorithms that measure times. The operations in this module are opaque to
the compiler. The compiler knows the shapes and gradients of an operation, and includes the
operation in its graphs unchanged. The operations refer to groups and exchanges by key, because
torch operations accept only tensors, numbers and strings. The code in this module is used only
under a compiler.

Every rank must compile the same graph. Collectives keep their order, because the collectives of a
layer depend on one another's results. The inputs must need gradients either on all ranks or on no
rank, because a backward exchange whose result is not needed is not in the graph.
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
    """A group together with the exchange that sends rows in the group, identified by one key. A
    copy of this object has a different key.
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
        """The route for the opposite direction; see `Exchange.back`.

        The value is this route itself if both directions use the same exchange.
        """
        return self if self._other is None else self._other

    def __reduce__(self) -> tuple[type[Route], tuple[Comm, Exchange]]:
        return Route, (self.comm, self.algorithm)


@torch.library.custom_op("moe_plugin::all_to_all", mutates_args=())
def all_to_all(x: Tensor, anchor: Optional[Tensor], route: str, send: Optional[Sequence[int]],
               recv: Optional[Sequence[int]]) -> Tensor:
    """Exchange pieces along dimension 0 with support for autograd; see
    `comm.functional.all_to_all`.

    Args:
        x: [sum(send), ...].
        anchor: optional. A parameter that keeps the node in the autograd graph; see
            `comm.functional`.
        route: key that identifies a `Route`.
        send: optional. Length of the piece sent to each rank.
        recv: optional. Length of the piece received from each rank.
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
    """Run a collective whose gradient is computed by a different collective.

    Args:
        x: tensor [n, ...], or a 0-dim tensor for `all_reduce` and `all_max`.
        comm: key that identifies the communication group.
        size: number of ranks in the group.
        name: name of the collective: `all_to_all` (of equal pieces), `all_gather`,
            `reduce_scatter`, `all_reduce`, `all_max` or `own_part`.
        backward: name of the collective for the gradient. `identity` passes the gradient through
            unchanged, and `none` means that there is no gradient.
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
