"""Tokens into rows and rows into tokens: the two copies of every dispatcher, with gradients.

Legend: T tokens, K choices, R rows, D width. x, rows, grad: one floating-point dtype. weights_TK:
float32 (float64). source_R: int64, the choice t*K + j that row r holds, -1: an empty slot.
position_TK: int64, the inverse: the row that holds a choice, -1: none. Each row holds one choice,
each choice is in at most one row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.derivatives import wants_graph
from moe_plugin.kernels.registry import accumulate_dtype, op


@op
def take_rows(x_TD: Tensor, source_R: Tensor, top_k: int, weights_TK: Tensor | None) -> Tensor:
    """rows[r] = weight(source r) * x[source r // K], [R, D] in x's dtype; 0 for an empty slot."""
    if x_TD.shape[0] == 0 or source_R.numel() == 0:
        return x_TD.new_zeros(source_R.numel(), x_TD.shape[1])
    rows_RD = x_TD.index_select(0, torch.div(source_R.clamp(min=0), top_k, rounding_mode="floor"))
    filled_R1 = (source_R >= 0)[:, None]
    if weights_TK is None:
        return rows_RD.masked_fill_(~filled_R1, 0)
    scale_R1 = weights_TK.reshape(-1)[source_R.clamp(min=0)][:, None] * filled_R1
    return (rows_RD * scale_R1).to(x_TD.dtype)


@op
def sum_rows(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """y[t] = sum_j weight(t, j) * rows[position(t, j)], [T, D] in the rows' dtype.

    Choices without a row count nothing. Summed in float32 (float64) in choice order, so the result
    is the same every time.
    """
    dtype = accumulate_dtype(rows_RD.dtype)
    tokens, k = position_TK.shape
    if rows_RD.shape[0] == 0 or tokens == 0:
        return rows_RD.new_zeros(tokens, rows_RD.shape[1])
    here_TK = position_TK >= 0
    scale_TK = here_TK.to(dtype) if weights_TK is None else weights_TK.to(dtype) * here_TK
    index_TK = position_TK.clamp(min=0)
    if rows_RD.dtype == dtype and rows_RD.device.type == "cpu":
        return F.embedding_bag(index_TK, rows_RD, mode="sum", per_sample_weights=scale_TK)
    y_TD = torch.zeros(tokens, rows_RD.shape[1], dtype=dtype, device=rows_RD.device)
    for j in range(k):
        y_TD += rows_RD.index_select(0, index_TK[:, j]) * scale_TK[:, j, None]
    return y_TD.to(rows_RD.dtype)


@op
def dot_rows(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor) -> Tensor:
    """dw[t, j] = <grad[t], rows[position(t, j)]>, float32 (float64) [T, K]; 0 without a row."""
    dtype = accumulate_dtype(rows_RD.dtype)
    if rows_RD.shape[0] == 0 or position_TK.numel() == 0:
        return torch.zeros(position_TK.shape, dtype=dtype, device=rows_RD.device)
    index_TK = position_TK.clamp(min=0)
    grad_TD = grad_TD.to(dtype)
    columns = [(rows_RD.index_select(0, index_TK[:, j]).to(dtype) * grad_TD).sum(1)
               for j in range(index_TK.shape[1])]
    return torch.stack(columns, dim=1) * (position_TK >= 0)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(source_R, position_TK)
        return take_rows(x_TD, source_R, position_TK.shape[1], None)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        source_R, position_TK = ctx.saved_tensors
        if wants_graph():
            return _Sum.apply(grad_RD, source_R, position_TK), None, None
        return sum_rows(grad_RD.contiguous(), position_TK, None), None, None


class _Sum(torch.autograd.Function):
    """The adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(source_R, position_TK)
        return sum_rows(rows_RD.contiguous(), position_TK, None)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(grad_TD, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor,
                position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, source_R, position_TK)
        return sum_rows(rows_RD, position_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        rows_RD, weights_TK, source_R, position_TK = ctx.saved_tensors
        if wants_graph():
            return *_combine_gradients(grad_TD, rows_RD, weights_TK, source_R,
                                       position_TK), None, None
        grad_TD = grad_TD.contiguous()
        grad_rows_RD = take_rows(grad_TD, source_R, position_TK.shape[1], weights_TK)
        grad_weights_TK = dot_rows(grad_TD, rows_RD, position_TK).to(weights_TK.dtype)
        return grad_rows_RD, grad_weights_TK, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        return grad_RD.index_select(0, ctx.saved_tensors[0]), None, None


def _combine_gradients(grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor,
                       position_TK: Tensor) -> tuple[Tensor, Tensor]:
    """The same as `_Combine.backward`, in operations that autograd can differentiate."""
    if rows_RD.shape[0] == 0 or grad_TD.shape[0] == 0:
        return rows_RD * 0, weights_TK * 0
    scale_R = weights_TK.reshape(-1)[source_R.clamp(min=0)] * (source_R >= 0)
    grad_rows_RD = _Gather.apply(grad_TD, source_R, position_TK) * scale_R[:, None].to(
        grad_TD.dtype)
    dots_TK = (rows_RD[position_TK.clamp(min=0)] * grad_TD[:, None]).sum(-1) * (position_TK >= 0)
    return grad_rows_RD, dots_TK.to(weights_TK.dtype)


def gather_rows(x_TD: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    """Differentiable: tokens [T, D] into rows [R, D] (Tutel's encode).

    The gradient sums each token's rows in choice order.
    """
    return _Gather.apply(x_TD, source_R, position_TK)


def combine_rows(rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor,
                 position_TK: Tensor) -> Tensor:
    """Differentiable: weighted sums of rows [R, D] into tokens [T, D] (Tutel's decode).

    The weights' gradient is a row dot.
    """
    return _Combine.apply(rows_RD, weights_TK, source_R, position_TK)


def permute_rows(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Differentiable: rows[order], [R, D]; the gradient is grad[inverse], without a scatter.

    order_R, inverse_R: int64 [R], inverse permutations of each other.
    """
    return _Permute.apply(rows_RD, order_R, inverse_R)
