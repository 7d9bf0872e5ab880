"""Who differentiates: what an autograd function declares about its second derivative, and
`torch.func`, which takes none of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
