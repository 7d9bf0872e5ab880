"""The products of feed-forward experts over grouped rows, with what can be done on the way in and
out of them.

Rows come out of tokens while they are loaded (token_R: token of each row, -1: a row of zeros; None:
the operand is rows), the activation is applied before the result leaves, and is computed again in
backward. Five operations are enough for forward and backward of plain and gated experts, and a
sixth where the host keeps weight gradients; each has a float64-exact torch reference here and a
Triton kernel.

Legend: T tokens, R rows, L groups (experts), I and O widths of a product, D and F widths of an
expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.groups import Groups
from moe_plugin.kernels.registry import accumulate_dtype, op


def _rows(x: Tensor, token_R: Tensor | None) -> Tensor:
    if token_R is None:
        return x
    if x.shape[0] == 0:
        return x.new_zeros(token_R.numel(), x.shape[1])
    return x.index_select(0, token_R.clamp(min=0)).masked_fill_((token_R < 0)[:, None], 0)


@op
def expert_product(x: Tensor, groups: Groups, w_LIO: Tensor, b_LO: Tensor | None,
                   token_R: Tensor | None, base_RO: Tensor | None) -> Tensor:
    """base + rows w + b by group: [R, O] in x's dtype. w may be a transposed view."""
    rows_RI = _rows(x, token_R)
    out_RO = rows_RI.new_empty(rows_RI.shape[0], w_LIO.shape[2])
    for group, span in groups.spans():
        torch.mm(rows_RI[span], w_LIO[group], out=out_RO[span])
        if b_LO is not None:
            out_RO[span] += b_LO[group]
    return out_RO if base_RO is None else out_RO.add_(base_RO)


@op
def expert_first(x: Tensor, groups: Groups, w_LDF: Tensor, b_LF: Tensor | None,
                 token_R: Tensor | None, gate_RF: Tensor | None,
                 activation: str) -> tuple[Tensor, Tensor]:
    """(h, a): h = rows w + b; a = act(h), or act(gate) * h where a gate's value before its
    activation is given. [R, F] each.
    """
    h_RF = expert_product.implementation("torch")(x, groups, w_LDF, b_LF, token_R, None)
    act = ACTIVATIONS[activation].value
    return h_RF, act(h_RF) if gate_RF is None else act(gate_RF) * h_RF


@op
def expert_second_backward(grad: Tensor, groups: Groups, w_LFD: Tensor, h_RF: Tensor,
                           gate_RF: Tensor | None, scale_R: Tensor | None, token_R: Tensor | None,
                           activation: str) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Back through the second product and the activation: (grad h, grad gate or None, a, dots).

    u = grad rows w^T; s = scale * u; a as in `expert_first`. Plain: grad h = s act'(h). Gated: grad
    h = s act(gate), grad gate = s h act'(gate). dots[r] = <u[r], a[r]> float32 [R]: the gate
    weight's gradient, with no output row kept.
    """
    u_RF = expert_product.implementation("torch")(grad, groups, w_LFD.transpose(1, 2), None,
                                                  token_R, None)
    act = ACTIVATIONS[activation]
    s_RF = u_RF if scale_R is None else (u_RF * scale_R[:, None]).to(u_RF.dtype)
    inner_RF = h_RF if gate_RF is None else gate_RF
    a_RF, slope_RF = torch.empty_like(inner_RF), torch.empty_like(inner_RF)
    act.into(inner_RF, a_RF)
    act.gradient(s_RF if gate_RF is None else s_RF * h_RF, inner_RF, slope_RF)
    grad_h_RF = slope_RF if gate_RF is None else s_RF * a_RF
    after_RF = a_RF if gate_RF is None else a_RF * h_RF
    dtype = accumulate_dtype(u_RF.dtype)
    dots_R = (u_RF.to(dtype) * after_RF.to(dtype)).sum(1)
    return grad_h_RF, None if gate_RF is None else slope_RF, after_RF, dots_R


@op
def expert_weight_grad(x: Tensor, grad: Tensor, groups: Groups, x_token_R: Tensor | None,
                       grad_token_R: Tensor | None, scale_R: Tensor | None) -> Tensor:
    """rows^T (scale * grad rows) by group: [L, I, O] in x's dtype; zeros for a group without rows.
    """
    rows_RI, grad_RO = _rows(x, x_token_R), _scaled(grad, grad_token_R, scale_R)
    out_LIO = x.new_empty(len(groups.host), rows_RI.shape[1], grad_RO.shape[1])
    for group, span in groups.spans():
        torch.mm(rows_RI[span].t(), grad_RO[span], out=out_LIO[group])
    return out_LIO


@op
def expert_weight_grad_add(x: Tensor, grad: Tensor, groups: Groups, x_token_R: Tensor | None,
                           grad_token_R: Tensor | None, scale_R: Tensor | None,
                           into_LIO: Tensor) -> Tensor:
    """`expert_weight_grad` added to `into_LIO`, which may have another dtype (fp32 under bf16 rows)
    and is returned. Made nowhere else as a whole.
    """
    rows_RI, grad_RO = _rows(x, x_token_R), _scaled(grad, grad_token_R, scale_R)
    for group, span in groups.spans():
        if into_LIO.dtype == rows_RI.dtype:
            into_LIO[group].addmm_(rows_RI[span].t(), grad_RO[span])
        else:
            into_LIO[group] += torch.mm(rows_RI[span].t(), grad_RO[span])
    return into_LIO


@op
def expert_bias_grad(grad: Tensor, groups: Groups, token_R: Tensor | None,
                     scale_R: Tensor | None) -> Tensor:
    """Sum of (scale * grad rows) by group: [L, O] in grad's dtype."""
    grad_RO = _scaled(grad, token_R, scale_R)
    return torch.stack([grad_RO[span].sum(0) for _, span in groups.spans()])


def _scaled(grad: Tensor, token_R: Tensor | None, scale_R: Tensor | None) -> Tensor:
    rows_RO = _rows(grad, token_R)
    return rows_RO if scale_R is None else (rows_RO * scale_R[:, None]).to(grad.dtype)
