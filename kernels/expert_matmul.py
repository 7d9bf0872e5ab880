"""Matmuls of feed-forward experts over grouped rows, fused with the gathering of rows and the
activation.

Rows are gathered from tokens while they are loaded. The activation is applied before the output is
stored, and is recomputed in backward. The first two matmuls of a gated expert are fused into one
operation. The two matmuls that compute the gradient of the expert's input are also fused. For each
operation, this module contains a reference implementation in torch, which is exact in float64. Each
operation also has a Triton kernel.

Notation: T is the number of tokens, R the number of rows, L the number of groups (experts), I and O
the input and output width of a matmul, D and F the outer and inner width of an expert. All tensors
have the same floating-point dtype unless a docstring states otherwise. If `token_R` is given (int64
[R], the index of each row's token, or -1 for a row of zeros), x and grad contain tokens [T, .].
Otherwise, x and grad contain rows [R, .]. The `precision` of float32 matmuls is "ieee" or "tf32".
With "tf32", the matrix units use 11 significant bits of both operands. The reference
implementations use torch's precision settings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import accumulate_dtype, op


def rows_of(x: Tensor, token_R: Tensor | None) -> Tensor:
    """Return the rows [R, .] that an operation reads; see `token_R` in the module's docstring."""
    if token_R is None:
        return x
    if x.shape[0] == 0:
        return x.new_zeros(token_R.numel(), x.shape[1])
    # Rows without a token read token 0. A product with 0 would not clear them, because token 0 may
    # contain NaN.
    return x.index_select(0, token_R.clamp(min=0)).masked_fill_((token_R < 0)[:, None], 0)


@op
def expert_matmul(x: Tensor, groups: RowGroups, w_LIO: Tensor, b_LO: Tensor | None,
                  token_R: Tensor | None, precision: str) -> Tensor:
    """Compute `rows @ w + b` for each group of rows. The output is [R, O] in the dtype of x.

    Args:
        x: rows or tokens, with I values each.
        groups: number of rows of each expert.
        w_LIO: weights [L, I, O]. A transposed view is allowed.
        b_LO: biases [L, O], or None.
        token_R: index of each row's token, or None if x contains rows.
        precision: precision of float32 matmuls, "ieee" or "tf32".
    """
    rows_RI = rows_of(x, token_R)
    out_RO = rows_RI.new_empty(rows_RI.shape[0], w_LIO.shape[2])
    for group, span in groups.spans():
        torch.mm(rows_RI[span], w_LIO[group], out=out_RO[span])
        if b_LO is not None:
            out_RO[span] += b_LO[group]
    return out_RO


@op
def expert_matmul_sum(x_RI: Tensor, y_RI: Tensor, groups: RowGroups, w_LIO: Tensor, v_LIO: Tensor,
                      precision: str) -> Tensor:
    """Compute `x @ w + y @ v` for each group of rows. The output is [R, O] in the dtype of x. This
    sum is the gradient of a gated expert's input.

    Args:
        x_RI, y_RI: rows [R, I]. x_RI is multiplied by w, and y_RI by v.
        groups: number of rows of each expert.
        w_LIO, v_LIO: weights [L, I, O]. Transposed views are allowed.
        precision: precision of float32 matmuls, "ieee" or "tf32".
    """
    out_RO = expert_matmul.implementation("torch")(x_RI, groups, w_LIO, None, None, precision)
    for group, span in groups.spans():
        out_RO[span].addmm_(y_RI[span], v_LIO[group])
    return out_RO


@op
def expert_matmul_act(x: Tensor, groups: RowGroups, w_LDF: Tensor, b_LF: Tensor | None,
                      token_R: Tensor | None, activation: str,
                      precision: str) -> tuple[Tensor, Tensor]:
    """For plain experts, return (h, a), both [R, F], where `h = rows @ w + b` and `a = act(h)`.

    Args:
        x: rows or tokens, with D values each.
        groups: number of rows of each expert.
        w_LDF: weights [L, D, F] of the first matmul.
        b_LF: biases [L, F], or None.
        token_R: index of each row's token, or None if x contains rows.
        activation: name of the activation function, a key of `ACTIVATIONS`.
        precision: precision of float32 matmuls, "ieee" or "tf32".
    """
    h_RF = expert_matmul.implementation("torch")(x, groups, w_LDF, b_LF, token_R, precision)
    return h_RF, ACTIVATIONS[activation].value(h_RF)


@op
def expert_matmul_gated(x: Tensor, groups: RowGroups, w_LDF: Tensor, b_LF: Tensor | None,
                        v_LDF: Tensor, v_bias_LF: Tensor | None, token_R: Tensor | None,
                        activation: str, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """For gated experts, return (h, gate, a), each [R, F].

    The outputs are `h = rows @ w + b`, `gate = rows @ v + v_bias`, and `a = act(gate) * h`.

    Args:
        x: rows or tokens, with D values each.
        groups: number of rows of each expert.
        w_LDF, v_LDF: weights [L, D, F] of the input matmul and of the gate matmul.
        b_LF, v_bias_LF: biases [L, F] of the two matmuls. Either both biases are given or both are
            None.
        token_R: index of each row's token, or None if x contains rows.
        activation: name of the activation function, a key of `ACTIVATIONS`.
        precision: precision of float32 matmuls, "ieee" or "tf32".
    """
    product = expert_matmul.implementation("torch")
    rows_RD = rows_of(x, token_R)
    h_RF = product(rows_RD, groups, w_LDF, b_LF, None, precision)
    gate_RF = product(rows_RD, groups, v_LDF, v_bias_LF, None, precision)
    return h_RF, gate_RF, ACTIVATIONS[activation].value(gate_RF) * h_RF


@op
def expert_matmul_act_backward(grad: Tensor, groups: RowGroups, w_LFD: Tensor, h_RF: Tensor,
                               gate_RF: Tensor | None, scale_R: Tensor | None,
                               token_R: Tensor | None, activation: str,
                               precision: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the backward pass of the second matmul and of the activation. Return (grad h, grad
    gate, scale * a, dots).

    Let `u = grad_rows @ w^T` and `s = scale * u`. The tensor a is defined as in the forward
    operations. For plain experts, `grad h = s * act'(h)`, and grad gate is None. For gated experts,
    `grad h = s
    * act(gate)` and `grad gate = s * h * act'(gate)`. The caller multiplies `(scale * a)^T` by the
    gradient rows to obtain the gradient of w. The value `dots[r] = <u[r], a[r]>` is the gradient of
    the gate weight of row r. This gradient is computed without saved output rows.

    Args:
        grad: gradient of rows or tokens, with D values each.
        groups: number of rows of each expert.
        w_LFD: weights [L, F, D] of the second matmul.
        h_RF, gate_RF: the tensors h and gate [R, F] from the forward pass.
        scale_R: gate weight of each row, float32 [R] (float64 for float64 inputs), or None.
        token_R: index of each row's token, or None if `grad` contains rows.
        activation: name of the activation function, a key of `ACTIVATIONS`.
        precision: precision of float32 matmuls, "ieee" or "tf32".
    Returns: Three tensors [R, F], and the partial sums `dots` [C, R] in the dtype of the scale. The
        caller must sum `dots` over C, the number of partial sums. The values of filler rows are
        arbitrary.
    """
    u_RF = expert_matmul.implementation("torch")(grad, groups, w_LFD.transpose(1, 2), None,
                                                 token_R, precision)
    return back_through_activation(u_RF, h_RF, gate_RF, scale_R, activation)


def back_through_activation(u_RF: Tensor, h_RF: Tensor, gate_RF: Tensor | None,
                            scale_R: Tensor | None,
                            activation: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the outputs of `expert_matmul_act_backward` from its matmul's output u [R, F]."""
    act = ACTIVATIONS[activation]
    s_RF = u_RF if scale_R is None else (u_RF * scale_R[:, None]).to(u_RF.dtype)
    inner_RF = h_RF if gate_RF is None else gate_RF
    a_RF, grad_inner_RF = torch.empty_like(inner_RF), torch.empty_like(inner_RF)
    act.into(inner_RF, a_RF)
    act.gradient(s_RF if gate_RF is None else s_RF * h_RF, inner_RF, grad_inner_RF)
    grad_h_RF = grad_inner_RF if gate_RF is None else s_RF * a_RF
    after_RF = a_RF if gate_RF is None else a_RF * h_RF
    # The dots are the gradient of the scale, so they use the value without the scale.
    dtype = accumulate_dtype(u_RF.dtype)
    dots_1R = (u_RF.to(dtype) * after_RF.to(dtype)).sum(1)[None]
    if scale_R is not None:
        after_RF = (after_RF * scale_R[:, None]).to(u_RF.dtype)
    return grad_h_RF, None if gate_RF is None else grad_inner_RF, after_RF, dots_1R


@op
def expert_weight_grad(x: Tensor, grad: Tensor, groups: RowGroups, x_token_R: Tensor | None,
                       grad_token_R: Tensor | None, precision: str) -> Tensor:
    """Compute `rows^T @ grad_rows` for each group of rows, that is, the weight gradient of each
    expert. The output is [L, I, O] in the dtype of x. For a group without rows, the output is zero.

    x, grad: rows or tokens, with I and O values each. Each tensor has its own `token_R`.
    """
    rows_RI, grad_RO = rows_of(x, x_token_R), rows_of(grad, grad_token_R)
    # A product over no rows writes zeros, so that no group needs special treatment.
    out_LIO = x.new_empty(groups.number, rows_RI.shape[1], grad_RO.shape[1])
    for group, span in groups.spans():
        torch.mm(rows_RI[span].t(), grad_RO[span], out=out_LIO[group])
    return out_LIO


@op
def expert_weight_grad_add(x: Tensor, grad: Tensor, groups: RowGroups, x_token_R: Tensor | None,
                           grad_token_R: Tensor | None, precision: str,
                           into_LIO: Tensor) -> Tensor:
    """Compute `expert_weight_grad`, add it to `into_LIO`, and return `into_LIO`.

    The computed gradient is added directly and never stored in a separate tensor [L, I, O].

    into_LIO: tensor [L, I, O]. The dtype of `into_LIO` may be different, for example float32 for
    bfloat16 rows.
    """
    rows_RI, grad_RO = rows_of(x, x_token_R), rows_of(grad, grad_token_R)
    for group, span in groups.spans():
        if into_LIO.dtype == rows_RI.dtype:
            into_LIO[group].addmm_(rows_RI[span].t(), grad_RO[span])
        else:
            into_LIO[group] += torch.mm(rows_RI[span].t(), grad_RO[span])
    return into_LIO


@op
def expert_weight_grad_pair(x: Tensor, grad_RO: Tensor, also_RO: Tensor, groups: RowGroups,
                            x_token_R: Tensor | None, precision: str,
                            into: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Compute `expert_weight_grad` for two gradients of the same rows x. If `into` is given, add
    both weight gradients to the tensors in `into`.

    grad_RO, also_RO: gradient rows [R, O] of the input matmul and of the gate matmul of a gated
    expert.
    """
    grads, args = (grad_RO, also_RO), (groups, x_token_R, None, precision)
    if into is None:
        return tuple(expert_weight_grad.implementation("torch")(x, g, *args) for g in grads)
    return tuple(expert_weight_grad_add.implementation("torch")(x, g, *args, each)
                 for g, each in zip(grads, into, strict=True))


@op
def expert_bias_grad(grad: Tensor, groups: RowGroups, token_R: Tensor | None,
                     scale_R: Tensor | None) -> Tensor:
    """Compute the sum of `scale * grad_rows` for each group of rows. The output is [L, O] in the
    dtype of grad.

    Args:
        grad: rows or tokens, with O values each.
        groups: number of rows of each expert.
        token_R: index of the token of each row, or None if `grad` contains rows.
        scale_R: factor of each row, float32 [R] (float64 for float64 inputs), or None.
    """
    grad_RO = rows_of(grad, token_R)
    if scale_R is not None:
        grad_RO = (grad_RO * scale_R[:, None]).to(grad.dtype)
    return torch.stack([grad_RO[span].sum(0) for _, span in groups.spans()])
