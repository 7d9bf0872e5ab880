"""Values that autograd does not keep: computed again in backward, from what they were made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.derivatives import transformed, wants_graph

Function = Callable[..., Tensor]


def through_recomputed(consume: Function, produce: Function, *inputs: Tensor) -> Tensor:
    """`consume(produce(*inputs))`, for which autograd keeps the inputs and not what is between.

    In backward `produce` runs once more, when `consume` first asks for its value. Under
    torch.compile, which decides itself what it keeps, the plain call.

    Args:
        consume: one tensor to the result, e.g. a matmul. What it saves of its argument (views of it
            also) is dropped; a cast of it is not.
        produce: cheap and without random numbers; it returns new memory.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transformed():
        return consume(produce(*inputs))
    value = _Produce.apply(produce, *inputs)
    node = value.grad_fn
    if node is None:  # nothing that it is made of needs a gradient
        return consume(value)
    # the hooks live as long as what they pack: they name the value and its node, and do not hold
    # the value
    storage, dtype = value.untyped_storage()._cdata, value.dtype

    def pack(saved: Tensor) -> Any:
        if saved.untyped_storage()._cdata != storage or saved.dtype != dtype:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(kept: Any) -> Tensor:
        return kept if isinstance(kept, Tensor) else _again(node)[0].detach().as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consume(value)


def _again(node: Any) -> tuple[Tensor, list[Tensor]]:
    """(value with a graph, its inputs), made once for a backward pass."""
    if node.made is None:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in node.saved_tensors]
        with torch.enable_grad():
            node.made = node.produce(*inputs), inputs
    return node.made


class _Produce(torch.autograd.Function):
    """`produce(*inputs)`; backward differentiates its second run."""

    @staticmethod
    def forward(ctx: Any, produce: Function, *inputs: Tensor) -> Tensor:
        ctx.produce, ctx.made = produce, None
        ctx.save_for_backward(*inputs)
        return produce(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1:]
        if wants_graph():
            inputs = ctx.saved_tensors
            value = ctx.produce(*inputs)
        else:
            (value, inputs), ctx.made = _again(ctx), None
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        grads = iter(torch.autograd.grad(value, wanted, grad, create_graph=wants_graph()))
        return None, *(next(grads) if need else None for need in needs)
