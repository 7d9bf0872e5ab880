"""Activations that write into given memory, and their gradients.

Tensors are of any shape and one floating-point dtype; `h` is the value before the activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Who differentiates: what an autograd function declares about its second derivative, and
# `torch.func`, which takes none of ours.

# Whether a transform of `torch.func` makes this call. Then what has an autograd function of ours is
# computed by torch's own operations. It is torch's function itself: every call of a layer asks it
transformed = torch._C._are_functorch_transforms_active


def refuse_vmap() -> None:
    """`ValueError` where vmap, or a transform that is made of it, makes this call."""
    if any(level.key() == torch._C._functorch.TransformType.Vmap
           for level in torch._C._functorch.get_interpreter_stack()):
        raise ValueError(
            "vmap (also in jacfwd and hessian) around an MoE layer: the numbers of rows that "
            "experts get would have to be known for each sample; must be grad, vjp, jvp or jacrev; "
            "give the layer all tokens at once, and call torch.func.grad for one sample after the "
            "other")


def not_transformed(what: str) -> ValueError:
    """The error where `torch.func` makes a call of `what`."""
    return ValueError(f"torch.func around {what}: must be a layer of one rank, with experts on the "
                      "device and without pre-gates; differentiate with torch.autograd (backward, "
                      "torch.autograd.grad), which takes it")


def wants_graph() -> bool:
    """Inside a `backward`: whether it is to be differentiated itself (`create_graph=True`)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def own(made: Tensor) -> Tensor:
    """What an autograd function's `forward` computed, as `forward` returns it.

    torch 2.11's compiler loses the gradient of a result that its graph has under two names, as of
    an operation in place or of a `contiguous` without effect, and says nothing
    (pytorch/pytorch issue 180642). So what it traces returns a name that nothing else has.
    """
    return made.detach() if torch.compiler.is_compiling() else made


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


aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation in three forms.

    Attributes:
        value: y = act(h), differentiable. into(h, out): out = act(h). gradient(grad, h, out):
            out = grad * act'(h), where out may be grad.
        cheap: recomputing it takes no longer than reading it back.
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
