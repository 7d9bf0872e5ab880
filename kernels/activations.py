"""Activation functions that write to preallocated memory, their gradients, and checks that reject
second derivatives.

Tensors may have any shape and one floating-point dtype. The tensor `h` is the input of the
activation function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# `torch.func` cannot transform this package's autograd functions. If a transform of `torch.func`
# makes a call, `transformed` returns True and torch's own operations compute the result. The name
# refers to torch's function without a wrapper, because every call of a layer uses it.
transformed = torch._C._are_functorch_transforms_active


def refuse_vmap() -> None:
    """Raise a `ValueError` if the caller runs under vmap or under a transform built on vmap."""
    if any(level.key() == torch._C._functorch.TransformType.Vmap
           for level in torch._C._functorch.get_interpreter_stack()):
        raise ValueError(
            "vmap (also in jacfwd and hessian) cannot transform an MoE layer, because the number "
            "of rows per expert is different for each sample. Use grad, vjp, jvp or jacrev, pass "
            "all tokens to the layer at once, and call torch.func.grad separately for each sample.")


def not_transformed(what: str) -> ValueError:
    """Return the error to raise if `torch.func` transforms a call of `what`."""
    return ValueError(f"torch.func cannot transform {what}. It supports only layers on one rank, "
                      "with experts on the device and without pre-gates. Use torch.autograd "
                      "(backward, torch.autograd.grad) instead.")


def wants_graph() -> bool:
    """Return true if a running `backward` must itself be differentiable (`create_graph=True`)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def own(made: Tensor) -> Tensor:
    """During compilation, return an alias of the tensor that the `forward` of an autograd function
    can safely return.

    The compiler of torch 2.11 silently loses the gradient of an output that appears in its graph
    under two names (pytorch/pytorch issue 180642). Examples are the outputs of in-place operations,
    and of `contiguous` calls that return their input.
    """
    return made.detach() if torch.compiler.is_compiling() else made


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a `backward` that cannot itself be differentiated, so that `create_graph=True`
    raises an error.

    torch's own decorator, `once_differentiable`, raises an error only when the second backward pass
    reaches the node. A call of `torch.autograd.grad` with explicit inputs can bypass the check of
    `once_differentiable` and return wrong gradients.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if wants_graph():
            raise RuntimeError(
                "This layer does not support second derivatives (create_graph=True). Set "
                "experts.compute='loop' with parallel.r=None and parallel.d=1 on a CPU.")
        return backward(ctx, *grads)

    return checked


aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation function, provided in three forms.

    Attributes:
        value: differentiable function that computes `act(h)`.
        into: function `into(h, out)` that computes `out = act(h)`.
        gradient: function `gradient(grad, h, out)` that computes `out = grad * act'(h)`, where
            `out` may be the same tensor as `grad`.
        cheap: whether recomputing the activation is at least as fast as reading its stored output
            from memory.
    """

    value: Callable[[Tensor], Tensor]
    into: Callable[[Tensor, Tensor], object]
    gradient: Callable[[Tensor, Tensor, Tensor], object]
    cheap: bool = False


def _squared_relu_gradient(grad: Tensor, h: Tensor, out: Tensor) -> None:
    half = torch.clamp_min(h, 0)
    torch.mul(grad, half.add_(half), out=out)


_QUICK = 1.702  # quick_gelu(x) = silu(_QUICK x) / _QUICK


def _quick_gelu_into(h: Tensor, out: Tensor) -> None:
    torch.mul(h, _QUICK, out=out)
    aten.silu.out(out, out=out).div_(_QUICK)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu, lambda h, out: aten.gelu.out(h, out=out),
                       lambda g, h, out: aten.gelu_backward.grad_input(g, h, grad_input=out)),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda h, out: aten.gelu.out(h, approximate="tanh", out=out),
        lambda g, h, out: aten.gelu_backward.grad_input(g, h, approximate="tanh", grad_input=out)),
    "quick_gelu": Activation(
        lambda x: F.silu(_QUICK * x) / _QUICK, _quick_gelu_into,
        lambda g, h, out: aten.silu_backward.grad_input(g, _QUICK * h, grad_input=out)),
    "relu": Activation(
        F.relu, lambda h, out: torch.clamp_min(h, 0, out=out),
        lambda g, h, out: aten.threshold_backward.grad_input(g, h, 0, grad_input=out), cheap=True),
    "silu": Activation(F.silu, lambda h, out: aten.silu.out(h, out=out),
                       lambda g, h, out: aten.silu_backward.grad_input(g, h, grad_input=out)),
    "squared_relu": Activation(lambda x: F.relu(x).square(),
                               lambda h, out: torch.clamp_min(h, 0, out=out).square_(),
                               _squared_relu_gradient, cheap=True),
}
