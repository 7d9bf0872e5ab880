"""The CPU's way through the experts: gather, both products, activation and combine as one autograd function.

Each expert's rows go through everything while they are in the cache: rows are gathered into a buffer for one expert, and products
write where they belong. Kept between forward and backward, in the module's `Workspace`: the value before the activation; its value
after, where computing it again costs more than reading it (on a CPU the error function takes a sixth of the products' time); and,
for the gates' gradient, each row's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.dispatch.base import RowCounts, RowPlan
from moe_plugin.experts.compute import FFNParameters, strategies
from moe_plugin.experts.main_grad import MainGrad
from moe_plugin.kernels import combine_rows, gather_rows, sum_rows
from moe_plugin.kernels.activations import ACTIVATIONS, Activation
from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.triton_ops import DTYPES, INSTALLED
from moe_plugin.kernels.workspace import Workspace


@dataclass(frozen=True)
class _Job:
    """What is no tensor with a gradient. token_R, source_R, position_TK: None where x already is rows. owners: see `FFNParameters`."""

    counts: list[int]
    act: Activation
    memory: Workspace
    token_R: Tensor | None
    source_R: Tensor | None
    position_TK: Tensor | None
    keep: bool
    owners: Mapping[str, Tensor]

    def spans(self) -> Iterator[tuple[int, slice]]:
        """(expert, its rows), experts without rows left out."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    def buffer(self, purpose: str, width: int, like: Tensor) -> Tensor:
        """Room for the rows of the fullest expert."""
        return self.memory.empty(purpose, (max(self.counts), width), like)

    def rows(self, purpose: str, width: int, like: Tensor) -> Tensor:
        """Room for all rows."""
        return self.memory.empty(purpose, (sum(self.counts), width), like)

    def take(self, x: Tensor, span: slice, buffer: Tensor | None) -> Tensor:
        """The rows of one expert out of tokens or rows."""
        if self.token_R is None:
            return x[span]
        return torch.index_select(x, 0, self.token_R[span], out=buffer[: span.stop - span.start])


@strategies.register("fused")
def fused(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """One autograd function for gather, products, activation and combine, expert by expert in the cache; best on CPU."""
    p, plan = parameters, rows if isinstance(rows, RowPlan) else None
    if plan is not None and bool((plan.source_R < 0).any()):  # empty slots hold zero rows: gather them before
        rows_RD = fused(gather_rows(x, plan.source_R, plan.position_TK), plan.counts, p)
        return combine_rows(rows_RD, plan.weights_TK, plan.source_R, plan.position_TK)
    counts = rows.host if plan is None else plan.counts.host
    (x, *tensors), owners = p.operands(x)
    gates_TK = None if plan is None else plan.weights_TK
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gates_TK, *tensors))
    job = _Job(counts, ACTIVATIONS[p.activation], p.memory, *_maps(plan), keep, owners)
    with torch.autocast(x.device.type, enabled=False):
        return _FusedFFN.apply(job, x, gates_TK, *tensors)


def _maps(plan: RowPlan | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (None, None, None) if plan is None else (plan.token_R, plan.source_R, plan.position_TK)


class _FusedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, x: Tensor, gates_TK: Tensor | None, w_in: Tensor, b_in: Tensor | None, w_gate: Tensor | None,
                b_gate: Tensor | None, w_out: Tensor, b_out: Tensor | None) -> Tensor:
        before, after, up, rows_RD = _forward(job, x, w_in, b_in, w_gate, b_gate, w_out, b_out)
        y = rows_RD if job.position_TK is None else sum_rows(rows_RD, job.position_TK, gates_TK)
        if job.keep:
            ctx.job = job
            outputs_RD = rows_RD if gates_TK is not None and gates_TK.requires_grad else None
            ctx.save_for_backward(x, gates_TK, before, after, up, outputs_RD, w_in, w_gate, w_out)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward(ctx, grad_y.contiguous()).run()


def _forward(job: _Job, x: Tensor, w_in: Tensor, b_in: Tensor | None, w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
             b_out: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """(value before the activation [R, F], after it, the other factor of a gated expert, output rows [R, D]); None: not kept."""
    width, inner = w_in.shape[1:]
    room = job.rows if job.keep else job.buffer
    before, up = room("before", inner, x), None if w_gate is None else room("up", inner, x)
    rows_RD = job.rows("rows", width, x)
    gathered = None if job.token_R is None else job.buffer("gathered", width, x)
    keep_after = job.keep and not job.act.cheap
    after = (job.rows if keep_after else job.buffer)("after", inner, x)
    product = None if w_gate is None else job.buffer("product", inner, x)
    for expert, span in job.spans():
        count = slice(0, span.stop - span.start)
        own = span if job.keep else count
        x_ND, h_NF, a_NF = job.take(x, span, gathered), before[own], after[span if keep_after else count]
        if w_gate is None:
            _linear(x_ND, w_in, b_in, expert, h_NF)
            job.act.into(h_NF, a_NF)
        else:
            _linear(x_ND, w_gate, b_gate, expert, h_NF)
            _linear(x_ND, w_in, b_in, expert, up[own])
            job.act.into(h_NF, a_NF)
            a_NF = torch.mul(a_NF, up[own], out=product[count])
        _linear(a_NF, w_out, b_out, expert, rows_RD[span])
    return (before, after if keep_after else None, up, rows_RD) if job.keep else (None, None, None, rows_RD)


def _linear(x_NI: Tensor, w_LIO: Tensor, b_LO: Tensor | None, expert: int, out: Tensor) -> None:
    if b_LO is None:
        torch.mm(x_NI, w_LIO[expert], out=out)
    else:
        torch.addmm(b_LO[expert], x_NI, w_LIO[expert], out=out)


class _Backward:
    """One backward pass: buffers, the gradients being filled, and the steps for one expert."""

    def __init__(self, ctx: Any, grad_y: Tensor) -> None:
        self.job, self.grad_y = ctx.job, grad_y
        self.x, self.gates_TK, self.before, self.kept_after, self.up, self.outputs_RD, self.w_in, self.w_gate, self.w_out = ctx.saved_tensors
        job, (width, inner) = self.job, self.w_in.shape[1:]
        needs = ctx.needs_input_grad[1:]
        self.need_x, self.need_gates = needs[0], needs[1]
        self.g_w_in, self.g_w_gate, self.g_w_out = (
            self._weight(name, w) if need else None
            for name, w, need in (("w_in_LDF", self.w_in, needs[2]), ("w_gate_LDF", self.w_gate, needs[4]), ("w_out_LFD", self.w_out, needs[6])))
        self.g_b_in, self.g_b_gate, self.g_b_out = (
            self.w_in.new_zeros(len(job.counts), size) if need else None
            for size, need in ((inner, needs[3]), (inner, needs[5]), (width, needs[7])))
        mapped = job.token_R is not None
        self.g_rows = job.rows("grad rows", width, grad_y) if self.need_x else None
        self.grad_buffer, self.x_buffer = (job.buffer(n, width, grad_y) if mapped else None for n in ("gathered grad", "gathered"))
        self.after = job.buffer("after again", inner, grad_y) if self.kept_after is None else None
        self.slope = job.buffer("slope", inner, grad_y)
        self.up_slope, self.product = (None if self.w_gate is None else job.buffer(n, inner, grad_y) for n in ("up slope", "product"))
        dtype = accumulate_dtype(grad_y.dtype)
        self.scale_R1 = self.gates_TK.detach().reshape(-1)[job.source_R].to(dtype)[:, None] if mapped else None
        self.dots_R = torch.zeros(sum(job.counts), dtype=dtype) if mapped and self.need_gates else None
        self.dot_buffer = None if self.dots_R is None else job.buffer("dot", width, self.dots_R)

    def _weight(self, name: str, w_LIO: Tensor) -> Tensor | MainGrad:
        if name in self.job.owners:
            return MainGrad(self.job.owners[name], self.job.memory)
        grad = self.job.memory.empty(f"gradient {name}", tuple(w_LIO.shape), w_LIO)
        for expert, count in enumerate(self.job.counts):
            if not count:
                grad[expert].zero_()
        return grad

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, gates, w_in, b_in, w_gate, b_gate, w_out, b_out."""
        for expert, span in self.job.spans():
            self._expert(expert, span)
        g_in, g_gate, g_out = (g.settled() if isinstance(g, MainGrad) else g for g in (self.g_w_in, self.g_w_gate, self.g_w_out))
        return (self._grad_x(), self._grad_gates(), g_in, self.g_b_in, g_gate, self.g_b_gate, g_out, self.g_b_out)

    def _expert(self, expert: int, span: slice) -> None:
        count = slice(0, span.stop - span.start)
        grad_ND = self._grad_rows(span)
        slope_NF, h_NF = self.slope[count], self.before[span]
        if self.kept_after is None:
            a_NF = self.after[count]
            self.job.act.into(h_NF, a_NF)
        else:
            a_NF = self.kept_after[span]
        if self.g_b_out is not None:
            torch.sum(grad_ND, 0, out=self.g_b_out[expert])
        torch.mm(grad_ND, self.w_out[expert].t(), out=slope_NF)
        if self.w_gate is None:
            inner_NF, up_slope_NF = a_NF, None
        else:
            up_slope_NF = torch.mul(slope_NF, a_NF, out=self.up_slope[count])
            slope_NF.mul_(self.up[span])
            inner_NF = torch.mul(a_NF, self.up[span], out=self.product[count])
        if self.g_w_out is not None:
            _weight_grad(inner_NF, grad_ND, self.g_w_out, expert)
        self.job.act.gradient(slope_NF, h_NF, slope_NF)
        self._inputs(expert, span, slope_NF, up_slope_NF)

    def _grad_rows(self, span: slice) -> Tensor:
        """Gradient of one expert's output rows; on the way, the gates' gradients."""
        if self.scale_R1 is None:
            return self.grad_y[span]
        grad_ND = self.job.take(self.grad_y, span, self.grad_buffer)
        if self.dots_R is not None:
            product_ND = self.dot_buffer[: span.stop - span.start]
            torch.mul(grad_ND.to(product_ND.dtype), self.outputs_RD[span], out=product_ND)
            torch.sum(product_ND, 1, out=self.dots_R[span])
        return torch.mul(grad_ND, self.scale_R1[span], out=grad_ND)

    def _inputs(self, expert: int, span: slice, slope_NF: Tensor, up_slope_NF: Tensor | None) -> None:
        """Gradients on the input's side: first-product weights and biases, and the rows."""
        x_ND = self.job.take(self.x, span, self.x_buffer) if self.g_w_in is not None or self.g_w_gate is not None else None
        first = (self.g_w_in, self.g_b_in, self.w_in, slope_NF)
        sides = [first] if up_slope_NF is None else [(self.g_w_in, self.g_b_in, self.w_in, up_slope_NF),
                                                     (self.g_w_gate, self.g_b_gate, self.w_gate, slope_NF)]
        for number, (g_w, g_b, w, g_NF) in enumerate(sides):
            if g_b is not None:
                torch.sum(g_NF, 0, out=g_b[expert])
            if g_w is not None:
                _weight_grad(x_ND, g_NF, g_w, expert)
            if self.g_rows is not None and number == 0:
                torch.mm(g_NF, w[expert].t(), out=self.g_rows[span])
            elif self.g_rows is not None:
                torch.addmm(self.g_rows[span], g_NF, w[expert].t(), out=self.g_rows[span])

    def _grad_x(self) -> Tensor | None:
        if self.g_rows is None or self.job.position_TK is None:
            return self.g_rows
        return sum_rows(self.g_rows, self.job.position_TK, None)

    def _grad_gates(self) -> Tensor | None:
        if self.dots_R is None:
            return None
        position_TK = self.job.position_TK
        if self.dots_R.numel() == 0:
            return torch.zeros_like(self.gates_TK)
        grads_TK = self.dots_R[position_TK.clamp(min=0)] * (position_TK >= 0)
        return grads_TK.to(self.gates_TK.dtype)


def _weight_grad(rows_NI: Tensor, grad_NO: Tensor, out: Tensor | MainGrad, expert: int) -> None:
    if isinstance(out, MainGrad):
        out.add_product(expert, rows_NI.t(), grad_NO)
    else:
        torch.mm(rows_NI.t(), grad_NO, out=out[expert])


@strategies.register("auto")
def auto(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """`fused` on CPU; `kernels` on GPU, or `grouped` without Triton; `batched` or `loop` on CPU while torch.compile looks on."""
    return strategies.get(choose(x, rows))(x, rows, parameters)


def choose(x: Tensor, rows: RowCounts | RowPlan) -> str:
    """Name of the strategy that `auto` takes for these rows."""
    if x.device.type == "cuda":
        return "kernels" if INSTALLED and x.dtype in DTYPES else "grouped"
    if torch.compiler.is_compiling():
        counts = rows.host if isinstance(rows, RowCounts) else rows.counts.host
        return "batched" if all(count == counts[0] for count in counts) else "loop"  # no set: hashing a symbolic size would fix it
    return "fused"
