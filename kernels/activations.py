"""Activations that write into given memory, and their gradients.

Tensors are of any shape and one floating-point dtype; `h` is the value before the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
