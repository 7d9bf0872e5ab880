"""What an autograd function declares about its second derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def wants_graph() -> bool:
    """Inside a `backward`: whether it is to be differentiated itself (`create_graph=True`)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a `backward` that cannot be differentiated: `create_graph=True` is an error.

    torch's `once_differentiable` raises only where the second pass reaches the node;
    `torch.autograd.grad` towards chosen inputs bypasses it and gives wrong numbers.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if wants_graph():
            raise RuntimeError(
                "a second derivative (create_graph=True) was asked of a layer that has first ones "
                "only; set experts.compute='loop' "
                "with parallel.r=None and parallel.d=1 on CPU")
        return backward(ctx, *grads)

    return checked
