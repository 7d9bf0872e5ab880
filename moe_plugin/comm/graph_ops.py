# ruff: noqa: UP006, UP035, UP045  (torch.library reads List and Optional)
"""Collectives as operations of torch: what `torch.compile` sees of them.

A compiler cannot trace what a collective does (process groups, counters, time-outs, algorithms that
measure). These operations are opaque to it: it knows shapes and gradients, and keeps them in its
graphs as they are. They take groups and exchanges by key, because operations of torch take tensors,
numbers and texts alone. Without a compiler nothing of this runs.

Every rank compiles the same graph, so collectives keep their order: those of one layer need each
other's results. All ranks' inputs need gradients, or none does: a backward exchange whose result
is not needed is not in the graph.
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
    """A group and the exchange that carries rows in it, by one key. A copy has a key of its own."""

    def __init__(self, comm: Comm, algorithm: Exchange, back: Route | None = None) -> None:
        self.comm, self.algorithm = comm, algorithm
        self.key = key_of(self)
        # made now: what changes while a graph is traced would fail its own guards
        if back is None and algorithm.back is not algorithm:
            back = Route(comm, algorithm.back, self)
        self._other = back

    @property
    def back(self) -> Route:
        """The way back, see `Exchange.back`; the same object where both ways are alike."""
        return self if self._other is None else self._other

    def __reduce__(self) -> tuple[type[Route], tuple[Comm, Exchange]]:
        return Route, (self.comm, self.algorithm)


@torch.library.custom_op("moe_plugin::all_to_all", mutates_args=())
def all_to_all(x: Tensor, anchor: Optional[Tensor], route: str, send: Optional[Sequence[int]],
               recv: Optional[Sequence[int]]) -> Tensor:
    """All-to-all along dimension 0, differentiable; see `comm.functional.all_to_all`.

    Args:
        x: [sum(send), ...].
        route: key of a `Route`.
    Returns: [sum(recv), ...].
    """
    found = owner_of(route)
    return found.algorithm(found.comm, x.contiguous(), send, recv)


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
    """One collective whose gradient is another one.

    Args:
        x: [n, ...], or 0-dim for `all_reduce` and `all_max`.
        comm: key of the group.
        size: its ranks.
        name: `all_to_all` (of equal pieces), `all_gather`, `reduce_scatter`, `all_reduce`,
            `all_max` or `own_part`.
        backward: one of them; `identity`: the gradient itself; `none`: there is no gradient.
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
