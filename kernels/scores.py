"""Scores of tokens in float32 from tokens in fewer bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.cpu.native.scores import scores_of
from moe_plugin.kernels.cpu.widened import PARTS, widened
from moe_plugin.kernels.derivatives import transformed, wants_graph
from moe_plugin.kernels.registry import accumulate_dtype


class _WideLinear(torch.autograd.Function):
    """Keeps the tokens as they are for backward, not their copy in float32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        dtype = accumulate_dtype(x_TD.dtype)
        weight_ED = weight_ED.to(dtype)
        if x_TD.device.type != "cpu":
            return F.linear(x_TD.to(dtype), weight_ED)
        native = scores_of(x_TD, weight_ED)
        if native is not None:
            return native.scores(x_TD, weight_ED.contiguous())
        scores_TE = x_TD.new_empty(x_TD.shape[0], weight_ED.shape[0], dtype=dtype)
        for span, x_ND in widened(x_TD, dtype):
            torch.mm(x_ND, weight_ED.t(), out=scores_TE[span])
        return scores_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, weight_ED = ctx.saved_tensors
        grad_x = grad_weight = None
        native = None if wants_graph() else scores_of(x_TD, weight_ED)
        if native is not None:
            grad_TE = grad_TE.contiguous()
            if ctx.needs_input_grad[0]:
                grad_x = native.grad_tokens(grad_TE, weight_ED.to(grad_TE.dtype).contiguous())
            if ctx.needs_input_grad[1]:
                grad_weight = native.grad_weight(grad_TE, x_TD).to(weight_ED.dtype)
            return grad_x, grad_weight
        if ctx.needs_input_grad[0]:
            grad_x = _grad_tokens(grad_TE, weight_ED, x_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(grad_TE, x_TD).to(weight_ED.dtype)
        return grad_x, grad_weight


def _grad_weight(grad_TE: Tensor, x_TD: Tensor) -> Tensor:
    """grad^T x, [E, D] in the gradient's dtype, float32 (float64)."""
    if x_TD.device.type != "cpu" or wants_graph():
        return grad_TE.t() @ x_TD.to(grad_TE.dtype)
    experts, width = grad_TE.shape[1], x_TD.shape[1]
    # partial sums over parts of the tokens, in parallel: one matmul of few rows and columns whose
    # sum is over many tokens takes up to twice as long
    sums_PED = grad_TE.new_zeros(PARTS, experts, width)
    for span, x_ND in widened(x_TD, grad_TE.dtype):
        grad_NE, even = grad_TE[span], x_ND.shape[0] // PARTS * PARTS
        sums_PED.baddbmm_(grad_NE[:even].view(PARTS, -1, experts).transpose(1, 2),
                          x_ND[:even].view(PARTS, -1, width))
        if even < x_ND.shape[0]:
            sums_PED[0].addmm_(grad_NE[even:].t(), x_ND[even:])
    return sums_PED.sum(0)


def _grad_tokens(grad_TE: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """grad weight in `dtype`, [T, D]; grad_TE: float32 (float64)."""
    narrow = dtype == weight_ED.dtype == torch.bfloat16 and grad_TE.device.type == "cpu"
    if not narrow or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (grad_TE @ weight_ED.to(grad_TE.dtype)).to(dtype)
    # one product of 16 bits, summed in float32 and rounded once, takes half as long as one of 32:
    # each gradient goes in as two whose sum is off by at most 2^-17 of it
    both_T2E = weight_ED.new_empty(grad_TE.shape[0], 2, grad_TE.shape[1])
    both_T2E[:, 0] = grad_TE
    both_T2E[:, 1] = grad_TE - both_T2E[:, 0]
    return both_T2E.flatten(1) @ weight_ED.repeat(2, 1)


def linear_scores(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x weight^T in float32 (float64 for float64 tokens), [T, E], differentiable.

    Args:
        x_TD: [T, D].
        weight_ED: [E, D]. Both of any floating-point dtype.
    """
    dtype = accumulate_dtype(x_TD.dtype)
    if x_TD.dtype == dtype or torch.compiler.is_compiling() or transformed():
        return F.linear(x_TD.to(dtype), weight_ED.to(dtype))
    return _WideLinear.apply(x_TD, weight_ED)
