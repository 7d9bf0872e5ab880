"""Scores of tokens in float32 from tokens in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.registry import accumulate_dtype


class _WideLinear(torch.autograd.Function):
    """Keeps the tokens as they are for backward, not their copy in float32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        dtype = accumulate_dtype(x_TD.dtype)
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_TE @ weight_ED.to(grad_TE.dtype)).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_TE.t() @ x_TD.to(grad_TE.dtype)).to(weight_ED.dtype)
        return grad_x, grad_weight


def linear_scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x weight^T in float32 (float64 for float64 tokens), [T, E], differentiable.

    x_TD: [T, D]. weight_ED: [E, D]. Both of any floating-point dtype.
    """
    dtype = accumulate_dtype(x_TD.dtype)
    if x_TD.dtype == dtype or torch.compiler.is_compiling():
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))
    return _WideLinear.apply(x_TD, weight_ED)
