"""The strategy `few` for CPUs, which computes experts with few rows in compiled code.

One compiled function computes the forward pass of all experts, and another one the backward pass.
Each weight is read once, and no view of a tensor is created for an expert. For generated text and
tiny layers, creating views and starting matmuls takes most of the time of the strategy `fused`.

All values between the weights are float32. Compared with `fused`, the gradient of the gates is
computed from stored output rows [R, D], which are small if there are few rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.kernels.cpu.expert_ffn import fused
from moe_plugin.kernels.cpu.native.functions import INT64, NativePasses, passes, readable
from moe_plugin.kernels.expert_ffn import OPERANDS, FFNParameters, strategies
from moe_plugin.kernels.weight_grads import as_it_lies, placeholder_grad
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import RowCounts, RowPlan

THREAD = 1 << 17  # multiplications per weight for which another thread saves time
# Largest number of rows of an expert; few.h has space for 64. With instructions for bfloat16
# matmuls, `fused` is faster from about 48 rows on (Intel Xeon with AMX, two threads).
MOST = {torch.float32: 64, torch.bfloat16: 32}


@strategies.register("few")
def few(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """A strategy for CPUs that computes experts with at most `MOST` rows.

    If an expert has more rows, or if the compiled functions do not support the operands, `fused` is
    used; see `why_not_few`. x: rows [R, D] or tokens [T, D]; see `Strategy`.
    """
    if why_not_few(x, rows, parameters) is not None:
        return fused(x, rows, parameters)
    p, plan = parameters, rows if isinstance(rows, RowPlan) else None
    counts = (rows.counts if isinstance(rows, RowPlan) else rows).host
    gates_TK = None if plan is None else plan.weights_TK
    native = passes(x, p.activation)
    assert native is not None
    x, weights, redirected = p.operands(x)
    keep = False
    for t in (x, gates_TK, *weights) if torch.is_grad_enabled() else ():
        keep = keep or (t is not None and t.requires_grad)
    call = _Call(native, plan, counts, keep, p.memory, redirected)
    gates_TK = None if gates_TK is None else gates_TK.contiguous()
    return _Few.apply(call, x.contiguous(), gates_TK, *weights)


def why_not_few(x: Tensor, rows: RowCounts | RowPlan, p: FFNParameters) -> str | None:
    """Return the reason why `few` uses `fused` for these operands, or None."""
    counts = rows.counts if isinstance(rows, RowPlan) else rows
    if not readable(x) or torch.is_autocast_enabled("cpu") or passes(x, p.activation) is None:
        return "no compiled functions"
    if not 0 < max(counts.host, default=0) <= MOST[x.dtype]:
        return f"no rows, or more than {MOST[x.dtype]} rows of an expert"
    if p.sums is not None or p.later is not None:
        return "gradients of several calls, or computed later"
    if isinstance(rows, RowPlan) and (
            not rows.complete and bool((rows.source_R < 0).any())
            or rows.weights_TK is not None and rows.weights_TK.dtype != torch.float32):
        return "empty slots"
    for w in (p.w_in_LDF, p.w_gate_LDF, p.w_out_LFD):
        if w is not None and not (w.dtype == x.dtype and readable(w) and (
                w.is_contiguous() or w.mT.is_contiguous())):
            return "the dtype or layout of the weights"
    return None


class _Call:
    """The arguments of a call that need no gradient, and its compiled functions.

    keep: whether to save tensors for a backward pass. redirected: see `FFNParameters.operands`.
    """

    def __init__(self, native: NativePasses, plan: RowPlan | None, counts: list[int], keep: bool,
                 memory: Workspace, redirected: Mapping[str, Any]) -> None:
        self.native, self.keep, self.memory, self.redirected = native, keep, memory, redirected
        self.maps = None if plan is None else (plan.source_R.contiguous(),
                                               plan.position_TK.contiguous())
        self.start = (INT64 * (len(counts) + 1))(*accumulate(counts, initial=0))
        self.rows = self.start[-1]

    def buffers(self, purpose: str, like: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """Return uninitialized memory for the rows of each width, in one allocation."""
        sizes = [self.rows * width for width in widths]
        return self.memory.empty(f"few {purpose}", (sum(sizes),), like).split_with_sizes(sizes)

    def run(self, compiled: Callable[..., None], weights: Sequence[Tensor | None],
            grads: Sequence[Tensor | None], gates_TK: Tensor | None, x: Tensor, *others:
            Tensor | None) -> None:
        """Call a compiled function. others: the tensors from `grad_y` to `grad_gates` in few.h."""
        w_in, maps = weights[0], self.maps or (None, None)
        assert w_in is not None
        choices = 1 if maps[1] is None else maps[1].shape[1]
        values = [x.shape[0], choices, *w_in.shape, ctypes.addressof(self.start)]
        values += [0 if t is None else t.data_ptr() for t in (*maps, gates_TK, x, *others)]
        for w, bias, grad, bias_grad in zip(weights[::2], weights[1::2], grads[::2], grads[1::2],
                                            strict=True):
            values += [0 if t is None else t.data_ptr() for t in (w, grad, bias, bias_grad)]
            values.append(w is not None and not w.is_contiguous())
        size = self.rows * w_in[0].numel() // THREAD
        compiled((INT64 * (len(values) + 1))(*values), min(torch.get_num_threads(), size))


class _Few(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, gates_TK: Tensor | None,
                *weights: Tensor) -> Tensor:
        wide, (width, inner) = x.float(), weights[0].shape[1:]
        up = 0 if weights[2] is None else inner
        before_RF, up_RF = call.buffers("inner", wide, inner, up)
        [after_RF] = call.buffers("after", wide, inner) if call.keep else [before_RF]
        rows_RD = call.memory.empty("few rows", (call.rows, width), wide)
        y = None if call.maps is None else torch.empty_like(x)
        call.run(call.native.few_forward, as_float(weights), [None] * 6, gates_TK, wide, None,
                 before_RF, up_RF, after_RF, None, None, rows_RD, None, y, None)
        if call.keep:
            ctx.call = call
            # without gates the rows are the output, which the caller may change
            kept = rows_RD if gates_TK is not None and gates_TK.requires_grad else None
            ctx.save_for_backward(x, gates_TK, before_RF, up_RF, kept, *weights)
        return rows_RD.to(x.dtype) if y is None else y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        call, (x, gates_TK, before_RF, up_RF, rows_RD, *weights) = ctx.call, ctx.saved_tensors
        need_x, need_gates, *needs = ctx.needs_input_grad[1:]
        # hooks on saved tensors may have changed dtype or layout
        floats: Any = (
            t if t is None else t.float().contiguous()
            for t in (before_RF, up_RF, rows_RD, x, grad_y))
        before_RF, up_RF, rows_RD, wide_x, wide = floats
        width, inner = weights[0].shape[1:]
        grads = [
            None if w is None or not need else torch.empty_like(w, dtype=torch.float32)
            if index % 2 else as_it_lies(f"gradient {index}", w, call.memory)
            for index, (w, need) in enumerate(zip(weights, needs, strict=True))]
        after_RF, grad_RF, grad_up_RF = call.buffers("grad inner", wide, inner, inner,
                                                     0 if weights[2] is None else inner)
        grad_rows = call.memory.empty("few grad rows", (call.rows, width), wide)
        grad_x = torch.empty_like(x) if need_x and call.maps is not None else None
        grad_gates = torch.empty_like(gates_TK) if need_gates else None
        call.run(call.native.few_backward, as_float(weights), grads, gates_TK, wide_x, wide,
                 before_RF, up_RF, after_RF, grad_RF, grad_up_RF, rows_RD, grad_rows, grad_x,
                 grad_gates)
        if need_x and grad_x is None:
            grad_x = grad_rows.to(x.dtype)
        reported = [g if g is None else g.to(w.dtype) for g, w in zip(grads, weights, strict=True)]
        for name, parameter in call.redirected.items():
            if (grad := reported[OPERANDS.index(name)]) is not None:
                parameter.main_grad.add_(grad)
                reported[OPERANDS.index(name)] = placeholder_grad(parameter)
        return None, grad_x, grad_gates, *reported


def as_float(weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the weights and, in float32, the biases."""
    return [w.float() if index % 2 and w is not None else w for index, w in enumerate(weights)]
