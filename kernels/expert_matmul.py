"""The matmuls of feed-forward experts over grouped rows, fused with gather and activation.

Rows are gathered from tokens while they are loaded. The activation is applied before the result is
stored, and is recomputed in backward. A gated expert's first two products are one operation, and so
are the two products that compute its input gradient. Each operation has a torch reference in this
module (exact in float64) and a Triton kernel.

Notation: T tokens, R rows, L groups (experts), I and O widths of a matmul, D and F widths of an
expert. Tensors have one floating-point dtype unless a docstring says otherwise. With a `token_R`
(int64 [R], token of each row, or -1 for a row of zeros) x and grad are tokens [T, .]; with None
they are rows [R, .]. `precision` of float32 products is "ieee", or "tf32", for which the matrix
units read 11 bits of both operands. References compute with torch's settings.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import accumulate_dtype, op


def rows_of(x: Tensor, token_R: Tensor | None) -> Tensor:
    """Return the rows of an operation, [R, .], from x and token_R as defined in this module."""
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
    """Compute rows w + b by group, [R, O] in x's dtype.

    Args:
        x: rows or tokens of width I.
        groups: rows of each expert.
        w_LIO: weights [L, I, O], may be a transposed view.
        b_LO: biases [L, O], or None.
        token_R: token of each row, or None if x contains rows.
        precision: "ieee" or "tf32".
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
    """Compute x w + y v by group, [R, O] in x's dtype: a gated expert's input gradient.

    Args:
        x_RI, y_RI: rows [R, I].
        groups: rows of each expert.
        w_LIO, v_LIO: weights [L, I, O], may be transposed views.
        precision: "ieee" or "tf32".
    """
    out_RO = expert_matmul.implementation("torch")(x_RI, groups, w_LIO, None, None, precision)
    for group, span in groups.spans():
        out_RO[span].addmm_(y_RI[span], v_LIO[group])
    return out_RO


@op
def expert_matmul_act(x: Tensor, groups: RowGroups, w_LDF: Tensor, b_LF: Tensor | None,
                      token_R: Tensor | None, activation: str,
                      precision: str) -> tuple[Tensor, Tensor]:
    """Return (h, a), [R, F] each, for plain experts: h = rows w + b and a = act(h).

    Args:
        x: rows or tokens of width D.
        groups: rows of each expert.
        w_LDF: weights [L, D, F].
        b_LF: biases [L, F], or None.
        token_R: token of each row, or None if x contains rows.
        activation: a name in `ACTIVATIONS`.
        precision: "ieee" or "tf32".
    """
    h_RF = expert_matmul.implementation("torch")(x, groups, w_LDF, b_LF, token_R, precision)
    return h_RF, ACTIVATIONS[activation].value(h_RF)


@op
def expert_matmul_gated(x: Tensor, groups: RowGroups, w_LDF: Tensor, b_LF: Tensor | None,
                        v_LDF: Tensor, v_bias_LF: Tensor | None, token_R: Tensor | None,
                        activation: str, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return (h, gate, a), [R, F] each, for gated experts.

    h = rows w + b, gate = rows v + v_bias, and a = act(gate) h.

    Args:
        x: rows or tokens of width D.
        groups: rows of each expert.
        w_LDF, v_LDF: weights [L, D, F].
        b_LF, v_bias_LF: biases [L, F], both or none.
        token_R: token of each row, or None if x contains rows.
        activation: a name in `ACTIVATIONS`.
        precision: "ieee" or "tf32".
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
    """Compute the backward of the second matmul and the activation: (grad h, grad gate, scale a,
    dots).

    Let u = grad rows w^T and s = scale * u, with a as in the forward operations. For plain experts,
    grad h = s act'(h), and grad gate is None. For gated experts, grad h = s act(gate) and grad gate
    = s h act'(gate). The product of (scale a)^T and the grad rows is the gradient of w. dots[r] =
    <u[r], a[r]> is the gradient of the gate weight, computed without saving output rows.

    Args:
        grad: gradient of rows or tokens of width D.
        groups: rows of each expert.
        w_LFD: weights [L, F, D].
        h_RF, gate_RF: values [R, F] of the forward pass.
        scale_R: gate weight of each row, float32 [R] (float64 for float64 inputs), or None.
        token_R: token of each row, or None if grad contains rows.
        activation: a name in `ACTIVATIONS`.
        precision: "ieee" or "tf32".
    Returns: three tensors [R, F], and dots [C, R] in scale's dtype, which must be summed over the C
        parts (any number). The values of filler rows are arbitrary.
    """
    u_RF = expert_matmul.implementation("torch")(grad, groups, w_LFD.transpose(1, 2), None,
                                                 token_R, precision)
    return back_through_activation(u_RF, h_RF, gate_RF, scale_R, activation)


def back_through_activation(u_RF: Tensor, h_RF: Tensor, gate_RF: Tensor | None,
                            scale_R: Tensor | None,
                            activation: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the results of `expert_matmul_act_backward` from its first product u, [R, F]."""
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
    """Compute rows^T grad rows by group, [L, I, O] in x's dtype, with zeros for a group without
    rows.

    x, grad: rows or tokens of widths I and O, each with its own token_R.
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
    """Add `expert_weight_grad` to `into_LIO`, and return `into_LIO`.

    The gradient of all experts is never stored separately.

    into_LIO: [L, I, O], may have another dtype (float32 with bfloat16 rows).
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
    """Compute `expert_weight_grad` of two gradients for the same rows of x, or add both to `into`.

    grad_RO, also_RO: rows [R, O], the gradients of a gated expert's first two products.
    """
    grads, args = (grad_RO, also_RO), (groups, x_token_R, None, precision)
    if into is None:
        return tuple(expert_weight_grad.implementation("torch")(x, g, *args) for g in grads)
    return tuple(expert_weight_grad_add.implementation("torch")(x, g, *args, each)
                 for g, each in zip(grads, into, strict=True))


@op
def expert_bias_grad(grad: Tensor, groups: RowGroups, token_R: Tensor | None,
                     scale_R: Tensor | None) -> Tensor:
    """Compute the sum of (scale * grad rows) by group, [L, O] in grad's dtype.

    Args:
        grad: rows or tokens of width O.
        groups: rows of each expert.
        token_R: token of each row, or None if grad contains rows.
        scale_R: float32 [R] (float64 for float64 inputs), or None.
    """
    grad_RO = rows_of(grad, token_R)
    if scale_R is not None:
        grad_RO = (grad_RO * scale_R[:, None]).to(grad.dtype)
    return torch.stack([grad_RO[span].sum(0) for _, span in groups.spans()])
