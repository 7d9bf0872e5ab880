"""Differentiable operations that copy tokens to rows and combine rows into tokens.

Notation: T is the number of tokens, K the number of choices per token, R the number of rows, D the
width. The tensors x, rows and grad have the same floating-point dtype. The tensor `weights_TK` is
float32 (or float64). The int64 tensor `source_R` contains the index t*K + j of each row's choice,
or -1 for an empty row. The int64 tensor `position_TK` contains the row of each choice, or -1 for no
row. Each row belongs to at most one choice, and each choice has at most one row.

If `complete` is true, every choice has a row and every row has a choice, so `source_R` and
`position_TK` contain no -1, and the special handling of -1 is skipped.

A NaN or infinity in a row never affects other tokens, because no token's output includes another
token's values, not even multiplied by 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import own, transformed, wants_graph
from moe_plugin.kernels.cpu import products
from moe_plugin.kernels.cpu.native.functions import sum_of_rows
from moe_plugin.kernels.registry import accumulate_dtype, op
from moe_plugin.kernels.workspace import scratch

_SUM = 0  # the mode "sum" of torch.embedding_bag


@op
def take_rows(x_TD: Tensor, source_R: Tensor, top_k: int, weights_TK: Tensor | None,
              complete: bool = False) -> Tensor:
    """Gather tokens to rows: `rows[r] = weight(source r) * x[source r // K]`, or 0 if empty."""
    if x_TD.shape[0] == 0 or source_R.numel() == 0:
        return x_TD.new_zeros(source_R.numel(), x_TD.shape[1])
    choice_R = source_R if complete else source_R.clamp(min=0)
    token_R = choice_R if top_k == 1 else torch.div(choice_R, top_k, rounding_mode="floor")
    rows_RD = x_TD.index_select(0, token_R)
    if weights_TK is not None:
        scale_R1 = weights_TK.reshape(-1)[choice_R][:, None]
        rows_RD = (rows_RD * scale_R1).to(x_TD.dtype)
    return rows_RD if complete else _clear(rows_RD, source_R < 0)


@op
def sum_rows(rows_RD: Tensor, position_TK: Tensor, weights_TK: Tensor | None,
             complete: bool = False) -> Tensor:
    """Compute `y[t] = sum_j weight(t, j) * rows[position(t, j)]`, [T, D] in the dtype of the rows.

    Choices that have no row are skipped. The sum is computed in float32 (or float64) in the order
    of choices, so repeated calls give the same output.
    """
    dtype, tokens = accumulate_dtype(rows_RD.dtype), position_TK.shape[0]
    if rows_RD.shape[0] == 0 or tokens == 0:
        return rows_RD.new_zeros(tokens, rows_RD.shape[1])
    if weights_TK is None and (summed_TD := sum_of_rows(rows_RD, position_TK)) is not None:
        return summed_TD
    index_TK, scale_TK, none_T = _reads(position_TK, weights_TK, dtype, complete)
    if rows_RD.device.type == "cpu":
        y_TD = sum_bags(rows_RD, *bags(index_TK, scale_TK, rows_RD.dtype))
    else:
        # One choice after the other gives the sum a fixed order, which `index_add_` lacks on a GPU.
        y_TD = torch.zeros(tokens, rows_RD.shape[1], dtype=dtype, device=rows_RD.device)
        for j, index_T in enumerate(index_TK.unbind(1)):
            rows_TD = rows_RD.index_select(0, index_T)
            y_TD += rows_TD if scale_TK is None else rows_TD * scale_TK[:, j, None]
        y_TD = y_TD.to(rows_RD.dtype)
    return y_TD if none_T is None else _clear(y_TD, none_T)


def bags(index_BK: Tensor, scale_BK: Tensor | None,
         dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the arguments (index, scale) of `sum_bags` for rows of `dtype`, [B, K] or [B, 2 K].

    bfloat16 rows can be multiplied only by bfloat16 factors. Each float32 factor is therefore split
    into two bfloat16 factors. The sum of the two bfloat16 factors differs from the float32 factor
    by at most 2^-17. With split factors, each row is read twice, but the second read hits the
    cache. Without split factors, a float32 copy of all rows would be written and read.
    """
    if scale_BK is None or dtype != torch.bfloat16 or scale_BK.dtype == dtype:
        return index_BK, scale_BK
    high_BK = scale_BK.to(dtype)
    low_BK = (scale_BK - high_BK.to(scale_BK.dtype)).to(dtype)
    return index_BK.repeat_interleave(2, 1), torch.stack([high_BK, low_BK], 2).flatten(1)


def sum_bags(x_ND: Tensor, index_BK: Tensor, scale_BK: Tensor | None) -> Tensor:
    """Compute `out[b] = sum_j scale[b, j] * x[index[b, j]]` on a CPU, [B, D] in the dtype of x.

    The sum is computed in float32 (or float64) and rounded once. For bfloat16, ties are rounded
    away from 0.

    index_BK, scale_BK: indices (int64, without -1) and factors, as returned by `bags`.
    """
    dtype = x_ND.dtype
    if scale_BK is not None:
        x_ND = x_ND.to(scale_BK.dtype)
    start_B = torch.arange(0, index_BK.numel(), index_BK.shape[1], device=index_BK.device)
    # The checks of F.embedding_bag would take longer than a short sum.
    summed = torch.embedding_bag(x_ND, index_BK.reshape(-1), start_B, False, _SUM, False,
                                 None if scale_BK is None else scale_BK.reshape(-1))
    return summed[0].to(dtype)


def _reads(position_TK: Tensor, weights_TK: Tensor | None, dtype: torch.dtype,
           complete: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """For each choice, return the row to read and its weight. Also return a bool tensor [T] that is
    True for tokens without rows.

    If the returned weight is None, all weights are 1. If the third output is None, every token has
    a row. If a choice has no row, another row of the same token is read with weight 0, because a
    row of a different token could contain NaN.
    """
    weights_TK = None if weights_TK is None else weights_TK.to(dtype)
    if complete:
        return position_TK, weights_TK, None
    has_row_TK = position_TK >= 0
    if _on_host(position_TK) and bool(has_row_TK.all()):
        return position_TK, weights_TK, None
    # Any row of the token will do; the maximum is -1 only if the token has no row.
    any_row_T1 = position_TK.amax(1, keepdim=True)
    index_TK = torch.where(has_row_TK, position_TK, any_row_T1).clamp_(min=0)
    scale_TK = has_row_TK.to(dtype) if weights_TK is None else weights_TK * has_row_TK
    return index_TK, scale_TK, any_row_T1[:, 0] < 0


def _clear(rows_RD: Tensor, empty_R: Tensor) -> Tensor:
    """Set those rows to zero, in place, for which `empty_R` (bool [R]) is True."""
    if _on_host(empty_R):
        return rows_RD.index_fill_(0, empty_R.nonzero()[:, 0], 0)  # touches only these rows
    return rows_RD.masked_fill_(empty_R[:, None], 0)


def _on_host(index: Tensor) -> bool:
    # The values can be read without waiting for a device or breaking a compiler's graph.
    return index.device.type == "cpu" and not torch.compiler.is_compiling()


@op
def dot_rows(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor,
             complete: bool = False) -> Tensor:
    """Compute `dw[t, j] = <grad[t], rows[position(t, j)]>` (else 0) in float32 or float64."""
    dtype = accumulate_dtype(rows_RD.dtype)
    if rows_RD.shape[0] == 0 or position_TK.numel() == 0:
        return torch.zeros(position_TK.shape, dtype=dtype, device=rows_RD.device)
    if _on_host(position_TK):
        if rows_RD.dtype == grad_TD.dtype == dtype:
            return _dots_in_one_pass(grad_TD, rows_RD, position_TK)
        return _dots_in_pieces(grad_TD, rows_RD, position_TK, dtype)
    grad_TD = grad_TD.to(dtype)
    index_TK = position_TK if complete else position_TK.clamp(min=0)
    columns = [(rows_RD.index_select(0, index_T).to(dtype) * grad_TD).sum(1)
               for index_T in index_TK.unbind(1)]
    dots_TK = torch.stack(columns, dim=1)
    return dots_TK if complete else dots_TK.masked_fill_(position_TK < 0, 0)


def _dots_in_one_pass(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor) -> Tensor:
    """Compute `dot_rows` on a CPU for operands that have the same dtype.

    torch can compute these dot products as the gradient of an embedding bag's per-sample weights.
    For the index -1, this gradient is 0.
    """
    choices = position_TK.shape[1]
    choice_N = torch.arange(position_TK.numel(), device=position_TK.device)
    token_N = torch.div(choice_N, max(1, choices), rounding_mode="floor")
    dots_N = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad_TD, rows_RD, position_TK.reshape(-1), token_N[:0], token_N, 0, -1)
    return dots_N.view(position_TK.shape)


def _dots_in_pieces(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor,
                    dtype: torch.dtype) -> Tensor:
    """Compute `dot_rows` on a CPU for 16-bit operands, a few tokens at a time; see `widened`."""
    (tokens, choices), width = position_TK.shape, rows_RD.shape[1]
    dots_TK = rows_RD.new_empty(tokens, choices, dtype=dtype)
    # Choices without a row read row 0; their results are set to 0 at the end.
    index_C = position_TK.clamp(min=0).reshape(-1)
    size = min(tokens, max(1, products.PIECE_BYTES // max(1, choices * width * dtype.itemsize)))
    narrow_CD = scratch("rows to dot", (size * choices, width), rows_RD)
    wide_CD = scratch("rows to dot", (size * choices, width), rows_RD, dtype)
    for start in range(0, tokens, size):
        tokens_N = slice(start, start + size)
        index_N = index_C[start * choices:(start + size) * choices]
        taken = torch.index_select(rows_RD, 0, index_N, out=narrow_CD[:index_N.numel()])
        product_NKD = wide_CD[:index_N.numel()].copy_(taken).view(-1, choices, width)
        product_NKD *= grad_TD[tokens_N, None].to(dtype)
        torch.sum(product_NKD, 2, out=dots_TK[tokens_N])
    return dots_TK.masked_fill_(position_TK < 0, 0)


class _Gather(torch.autograd.Function):
    """Autograd function that gathers the tokens and gate weights of all ranks. The tensors of each
    rank are padded to `longest` tokens.
    """
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, position_TK: Tensor,
                complete: bool) -> Tensor:
        ctx.save_for_backward(source_R, position_TK)
        ctx.complete = complete
        return own(take_rows(x_TD, source_R, position_TK.shape[1], None, complete))

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        source_R, position_TK = ctx.saved_tensors
        if wants_graph():
            return _Sum.apply(grad_RD, source_R, position_TK, ctx.complete), None, None, None
        grad_TD = sum_rows(grad_RD.contiguous(), position_TK, None, ctx.complete)
        return grad_TD, None, None, None


class _Sum(torch.autograd.Function):
    """Autograd function for the adjoint of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, source_R: Tensor, position_TK: Tensor,
                complete: bool) -> Tensor:
        ctx.save_for_backward(source_R, position_TK)
        ctx.complete = complete
        return own(sum_rows(rows_RD.contiguous(), position_TK, None, complete))

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        return _Gather.apply(grad_TD, *ctx.saved_tensors, ctx.complete), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor,
                position_TK: Tensor, complete: bool) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_TK, source_R, position_TK)
        ctx.complete = complete
        return own(sum_rows(rows_RD, position_TK, weights_TK, complete))

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Any, ...]:
        rows_RD, weights_TK, source_R, position_TK = ctx.saved_tensors
        if wants_graph():
            return *_combine_gradients(grad_TD, rows_RD, weights_TK, source_R,
                                       position_TK), None, None, None
        grad_TD = grad_TD.contiguous()
        grad_rows_RD = take_rows(grad_TD, source_R, position_TK.shape[1], weights_TK, ctx.complete)
        dots_TK = dot_rows(grad_TD, rows_RD, position_TK, ctx.complete)
        return grad_rows_RD, dots_TK.to(weights_TK.dtype), None, None, None


class _Weigh(torch.autograd.Function):
    """The adjoint of `_Combine` with respect to the rows, and the gradient of the weights."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, source_R: Tensor,
                position_TK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weights_TK, source_R, position_TK)
        return own(take_rows(x_TD, source_R, position_TK.shape[1], weights_TK))

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        x_TD, weights_TK, source_R, position_TK = ctx.saved_tensors
        if wants_graph():
            grad_x_TD = _Combine.apply(grad_RD, weights_TK, source_R, position_TK, False)
            dots_TK = _row_dots(x_TD, grad_RD, position_TK)
        else:
            grad_RD = grad_RD.contiguous()
            grad_x_TD = sum_rows(grad_RD, position_TK, weights_TK)
            dots_TK = dot_rows(x_TD, grad_RD, position_TK)
        return grad_x_TD, dots_TK.to(weights_TK.dtype), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:
        return grad_RD.index_select(0, ctx.saved_tensors[0]), None, None


@op
def take_values(values_CN: Tensor, index: Tensor) -> Tensor:
    """For each index, compute the sum over c of `values[c, index]`. The output has the shape of
    `index` and the dtype of `values`. For the index -1, the output is 0.

    This function copies one value per choice to the rows (`RowPlan.source_R`), or one value per row
    to the choices (`position_TK`).

    Args:
        values_CN: tensor [C, N]. The values are summed in the order of c.
        index: int64 indices of any shape. -1 is allowed.
    """
    if values_CN.shape[1] == 0:
        return values_CN.new_zeros(index.shape)
    return values_CN.sum(0)[index.clamp(min=0)].masked_fill(index < 0, 0)


def at_rows(values_TK: Tensor, source_R: Tensor) -> Tensor:
    """Return, for each row, the value of its choice, [R] (dtype unchanged), or 0 if it is empty."""
    if values_TK.numel() == 0:
        return values_TK.new_zeros(source_R.numel())
    return values_TK.reshape(-1)[source_R.clamp(min=0)].masked_fill(source_R < 0, 0)


def at_choices(values_R: Tensor, position_TK: Tensor, complete: bool = False) -> Tensor:
    """Return the value of each choice's row, [T, K] (dtype unchanged), or 0 without a row."""
    if complete:
        return values_R[position_TK]
    if values_R.numel() == 0:
        return values_R.new_zeros(position_TK.shape)
    return values_R[position_TK.clamp(min=0)].masked_fill(position_TK < 0, 0)


def _combine_gradients(grad_TD: Tensor, rows_RD: Tensor, weights_TK: Tensor, source_R: Tensor,
                       position_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_Combine.backward` with operations that autograd can differentiate."""
    # The products with 0 keep the results in the graph.
    if rows_RD.shape[0] == 0 or grad_TD.shape[0] == 0:
        return rows_RD * 0, weights_TK * 0
    scale_R = at_rows(weights_TK, source_R)
    grad_rows_RD = _Gather.apply(grad_TD, source_R, position_TK, False) * scale_R[:, None].to(
        grad_TD.dtype)
    return grad_rows_RD, _row_dots(grad_TD, rows_RD, position_TK).to(weights_TK.dtype)


def _row_dots(grad_TD: Tensor, rows_RD: Tensor, position_TK: Tensor) -> Tensor:
    """Compute `dot_rows` with operations that autograd can differentiate."""
    if rows_RD.shape[0] == 0:
        return grad_TD.new_zeros(position_TK.shape)
    dots_TK = (rows_RD[position_TK.clamp(min=0)] * grad_TD[:, None]).sum(-1)
    return dots_TK.masked_fill(position_TK < 0, 0)


def _plain_rows(x_TD: Tensor, source_R: Tensor, top_k: int) -> Tensor:
    """Compute `take_rows` without weights, with operations that `torch.func` can differentiate."""
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(source_R.numel(), x_TD.shape[1])
    token_R = torch.div(source_R.clamp(min=0), top_k, rounding_mode="floor")
    return x_TD.index_select(0, token_R).masked_fill(source_R[:, None] < 0, 0)


def _plain_sums(rows_RD: Tensor, weights_TK: Tensor | None, position_TK: Tensor) -> Tensor:
    """Compute `sum_rows` with operations that `torch.func` can differentiate."""
    if rows_RD.shape[0] == 0:
        return rows_RD.new_zeros(position_TK.shape[0], rows_RD.shape[1])
    dtype = accumulate_dtype(rows_RD.dtype)
    rows_TKD = rows_RD[position_TK.clamp(min=0)].to(dtype)
    rows_TKD = rows_TKD.masked_fill(position_TK[:, :, None] < 0, 0)
    if weights_TK is not None:
        rows_TKD = rows_TKD * weights_TK[:, :, None].to(dtype)
    return rows_TKD.sum(1).to(rows_RD.dtype)


def gather_rows(x_TD: Tensor, source_R: Tensor, position_TK: Tensor,
                complete: bool = False) -> Tensor:
    """Gather tokens [T, D] into rows [R, D] (Tutel's encode). Autograd is supported.

    The gradient of a token is the sum of the gradients of its rows, in the order of choices.
    """
    if transformed():
        return _plain_rows(x_TD, source_R, position_TK.shape[1])
    return _Gather.apply(x_TD, source_R, position_TK, complete)


def weigh_rows(x_TD: Tensor, weights_TK: Tensor, source_R: Tensor, position_TK: Tensor) -> Tensor:
    """Multiply each token [T, D] by the weight of each of its choices and gather the products into
    rows [R, D]. Autograd is supported.

    In Tutel, this operation is encode with gates. The gradient of the tokens is a weighted sum of
    rows, and the gradient of each weight is the dot product of two rows.
    """
    if transformed():
        rows_RD = _plain_rows(x_TD, source_R, position_TK.shape[1])
        return (rows_RD * at_rows(weights_TK, source_R)[:, None]).to(x_TD.dtype)
    return _Weigh.apply(x_TD, weights_TK, source_R, position_TK)


def combine_rows(rows_RD: Tensor, weights_TK: Tensor | None, source_R: Tensor,
                 position_TK: Tensor, complete: bool = False) -> Tensor:
    """Combine rows [R, D] into tokens [T, D] by differentiable weighted sums (Tutel's decode).

    weights_TK: weights of the choices, or None if all weights are 1. The gradient of each weight is
    the dot product of two rows.
    """
    if transformed():
        return _plain_sums(rows_RD, weights_TK, position_TK)
    if weights_TK is None:
        return _Sum.apply(rows_RD, source_R, position_TK, complete)
    return _Combine.apply(rows_RD, weights_TK, source_R, position_TK, complete)


def permute_rows(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return `rows[order]`, [R, D], with support for autograd. The gradient is `grad[inverse]`.

    order_R, inverse_R: int64 [R], a permutation and its inverse.
    """
    if transformed():
        return rows_RD.index_select(0, order_R)
    return _Permute.apply(rows_RD, order_R, inverse_R)
