"""Strategy `fused`: gather, matmuls, activation and combine as one autograd function for CPU.

Rows go through all operations one block of experts at a time, while they are in the cache (see
`blocks`): they are gathered into a buffer for one block, and matmuls write directly into their
destination. Kept between forward and backward, in the module's `Workspace`: the value before the
activation; the value after it, where recomputing costs more than reading and nothing asks for it
(`FFNParameters.recompute`); and, for the gates' gradient, each output row.

Experts are computed one after the other, each by all threads. Computing two experts of similar
load in one batched matmul, a thread each, was measured and does not pay. Milliseconds of forward
and backward with pairs / without (4096 tokens, D256 F512 E64 k2, 2 cores, medians of 15 to 25
interleaved rounds): float32 112.4 / 113.3 and 101.7 / 103.4 with 2 threads, 3 % slower (ratio of
the rounds) with 1; bfloat16 57.0 / 55.9 and 49.2 / 47.8 with 2 threads, 87 / 70 with 1. With 4
threads on 2 cores it saves 12 % in float32, but such a run takes 70 % longer than with 2 threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS, Activation
from moe_plugin.kernels.cpu.blocks import Block, blocks_of
from moe_plugin.kernels.cpu.products import product
from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.kernels.expert_ffn import FFNParameters, apply_to_rows, strategies
from moe_plugin.kernels.grad_sums import GradSums
from moe_plugin.kernels.main_grad import WEIGHTS, MainGrad
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.rows import bags, dot_rows, sum_bags, sum_rows
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import RowCounts, RowPlan

# size of one value [N, F] of a block that stays in the cache between operations; measured
BLOCK_BYTES = 4 << 20
W_IN, W_GATE, W_OUT = WEIGHTS


@dataclass(frozen=True)
class _FFNCall:
    """Arguments of one call that autograd does not differentiate.

    counts: rows of each expert. keep: whether backward will run. keep_after: whether it is to find
    the value after the activation. token_R, source_R, position_TK, complete: see `kernels.rows`;
    None where x already is rows. main_grad_weights, sums: see `FFNParameters`.
    """

    counts: list[int]
    blocks: list[Block]
    act: Activation
    memory: Workspace
    token_R: Tensor | None
    source_R: Tensor | None
    position_TK: Tensor | None
    keep: bool
    keep_after: bool
    main_grad_weights: Mapping[str, Tensor]
    sums: GradSums
    complete: bool = False

    @property
    def total(self) -> int:
        """R, rows of all experts."""
        return self.blocks[-1].rows.stop if self.blocks else 0


class _RowBuffer:
    """Memory for [R, width] rows of all blocks (`full`), or for one block at a time."""

    def __init__(self, call: _FFNCall, purpose: str, width: int, like: Tensor,
                 full: bool = False) -> None:
        rows = call.total if full else max((block.size for block in call.blocks), default=0)
        memory = call.memory.empty(purpose, (rows, width), like)
        self.full, self.buffer = (memory, None) if full else (None, memory)

    def at(self, block: Block) -> Tensor:
        """Rows of one block, [N, width]."""
        if self.full is not None:
            return block.of(self.full)
        return self.buffer if block.size == self.buffer.shape[0] else self.buffer[:block.size]


class _GatheredInput:
    """Rows of tokens, gathered into a buffer for one block; a view where x already is rows."""

    def __init__(self, call: _FFNCall, x: Tensor, purpose: str) -> None:
        self.x, self.token_R = x, call.token_R
        self.into = None if call.token_R is None else _RowBuffer(call, purpose, x.shape[1], x)

    def at(self, block: Block) -> Tensor:
        """Rows of one block, [N, width]."""
        if self.into is None:
            return block.of(self.x)
        return torch.index_select(self.x, 0, block.of(self.token_R), out=self.into.at(block))


class _Linear:
    """x w + b of each expert.

    The views of all experts are made at once: one by one they cost as much as the small operations.
    """

    def __init__(self, w_LIO: Tensor, b_LO: Tensor | None = None) -> None:
        self.w = w_LIO.unbind(0)
        self.b = [None] * w_LIO.shape[0] if b_LO is None else b_LO.unbind(0)

    def into(self, block: Block, x_NI: Tensor, out_NO: Tensor, add: bool = False) -> Tensor:
        """One block's rows through their experts' matrices; returns `out_NO`.

        add: the result is added to the values of `out_NO`, and no bias is.
        """
        for expert, x, y in zip(block.experts, block.split(x_NI), block.split(out_NO),
                                strict=True):
            product(x, self.w[expert], y, y if add else self.b[expert])
        return out_NO


@strategies.register("fused")
def fused(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """One autograd function for gather, matmuls, activation and combine; best on CPU.

    x: [R, D] rows or [T, D] tokens; returns the same shape and dtype, see `Strategy`.
    """
    p, plan = parameters, rows if isinstance(rows, RowPlan) else None
    # an empty slot is a row of zeros, which `gather_rows` makes; a device is not asked for them
    if plan is not None and not plan.complete and (x.device.type != "cpu"
                                                   or bool((plan.source_R < 0).any())):
        return apply_to_rows(lambda rows_RD, counts: fused(rows_RD, counts, p), x, plan)
    counts = rows.host if plan is None else plan.counts.host
    (x, *tensors), redirected = p.operands(x)
    gates_TK = None if plan is None else plan.weights_TK
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad
                                           for t in (x, gates_TK, *tensors))
    maps = (None, None, None) if plan is None else (plan.token_R, plan.source_R, plan.position_TK)
    blocks = blocks_of(counts, BLOCK_BYTES // (p.w_in_LDF.shape[2] * x.element_size()))
    act = ACTIVATIONS[p.activation]
    # under autocast each call has its own cast of the weights, and so gradients of its own
    own = p.sums is None or torch.is_autocast_enabled(x.device.type)
    sums = GradSums() if own else p.sums
    if keep:
        sums.expect()
    call = _FFNCall(counts, blocks, act, p.memory, *maps, keep,
                    keep and not (act.cheap or p.recompute), redirected, sums,
                    plan is not None and plan.complete)
    with torch.autocast(x.device.type, enabled=False):
        return _FusedFFN.apply(call, x, gates_TK, *tensors)


class _FusedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _FFNCall, x: Tensor, gates_TK: Tensor | None, w_in: Tensor,
                b_in: Tensor | None, w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
                b_out: Tensor | None) -> Tensor:
        done = _Forward(call, x, w_in, b_in, w_gate, b_gate, w_out, b_out)
        rows_RD = done.run()
        y = rows_RD
        if call.position_TK is not None:
            y = sum_rows(rows_RD, call.position_TK, gates_TK, call.complete)
        if call.keep:
            ctx.call = call
            outputs_RD = rows_RD if gates_TK is not None and gates_TK.requires_grad else None
            ctx.save_for_backward(x, gates_TK, *done.kept(), outputs_RD, w_in, w_gate, w_out)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward(ctx, grad_y.contiguous()).run()


class _Forward:
    """One forward pass: its buffers, and the operations on one block."""

    def __init__(self, call: _FFNCall, x: Tensor, w_in: Tensor, b_in: Tensor | None,
                 w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
                 b_out: Tensor | None) -> None:
        width, inner = w_in.shape[1:]
        self.call, self.input = call, _GatheredInput(call, x, "gathered")
        self.w_in, self.w_out = _Linear(w_in, b_in), _Linear(w_out, b_out)
        self.w_gate = None if w_gate is None else _Linear(w_gate, b_gate)
        self.before = _RowBuffer(call, "before", inner, x, call.keep)
        self.after = _RowBuffer(call, "after", inner, x, call.keep_after)
        self.up = self.gated = None
        if w_gate is not None:
            self.up = _RowBuffer(call, "up", inner, x, call.keep)
            self.gated = _RowBuffer(call, "gated", inner, x)
        self.rows = _RowBuffer(call, "rows", width, x, full=True)

    def run(self) -> Tensor:
        """Output rows [R, D]."""
        for block in self.call.blocks:
            self._block(block)
        return self.rows.full

    def kept(self) -> tuple[Tensor | None, ...]:
        """Value before the activation, after it, the other factor of a gated expert.

        [R, F] each; None: not kept.
        """
        return tuple(None if rows is None else rows.full
                     for rows in (self.before, self.after, self.up))

    def _block(self, block: Block) -> None:
        x_ND, a_NF = self.input.at(block), self.after.at(block)
        h_NF = (self.w_gate or self.w_in).into(block, x_ND, self.before.at(block))
        self.call.act.into(h_NF, a_NF)
        if self.w_gate is not None:
            up_NF = self.w_in.into(block, x_ND, self.up.at(block))
            a_NF = torch.mul(a_NF, up_NF, out=self.gated.at(block))
        self.w_out.into(block, a_NF, self.rows.at(block))


class _WeightGrad:
    """The gradient of one weight [L, I, O], as a tensor to return; the interface of `MainGrad`."""

    def __init__(self, call: _FFNCall, name: str, w_LIO: Tensor) -> None:
        self.sums, self.name = call.sums, name
        grad_LIO, self.written = self.sums.begin(name, w_LIO, call.memory)
        self.into = grad_LIO.unbind(0)

    def add_matmul(self, expert: int, a_IN: Tensor, b_NO: Tensor) -> None:
        """Add a b to this expert's gradient."""
        into_IO = self.into[expert]
        product(a_IN, b_NO, into_IO, into_IO if expert in self.written else None)
        self.written.add(expert)

    def result(self) -> Tensor | None:
        """What backward returns, see `GradSums.end`."""
        return self.sums.end(self.name)


class _Backward:
    """One backward pass: its buffers, the gradients, and the operations on one block."""

    def __init__(self, ctx: Any, grad_y: Tensor) -> None:
        self.call = call = ctx.call
        (x, self.gates_TK, self.before, self.after, self.up, self.outputs_RD, w_in, w_gate,
         w_out) = ctx.saved_tensors
        width, inner = w_in.shape[1:]
        need_x, need_gates, *needs = ctx.needs_input_grad[1:]
        weights = dict(zip(WEIGHTS, (w_in, w_gate, w_out), strict=True))
        self._make_grads(weights, needs)
        self.transposed = {
            name: _Linear(w.transpose(1, 2)) for name, w in weights.items() if w is not None
        }
        need_input = W_IN in self.grads or W_GATE in self.grads
        self.input = _GatheredInput(call, x, "gathered") if need_input else None
        self.grad_y, self.need_gates, self.grad_bags = grad_y, need_gates, None
        if self.gates_TK is None:
            self.grad_output = _GatheredInput(call, grad_y, "gathered grad")
        else:
            dtype = grad_y.dtype
            scale_R = self.gates_TK.reshape(-1).index_select(0, call.source_R)
            scale_R1 = scale_R.to(accumulate_dtype(dtype))[:, None]
            self.grad_bags = bags(call.token_R[:, None], scale_R1, dtype)
        self.grad_rows = _RowBuffer(call, "grad rows", width, grad_y, full=True) if need_x else None
        self.recomputed_act = None
        if self.after is None:
            self.recomputed_act = _RowBuffer(call, "recomputed act", inner, grad_y)
        self.activation_grad = _RowBuffer(call, "activation grad", inner, grad_y)
        self.up_grad, self.gated = (None if w_gate is None else _RowBuffer(call, n, inner, grad_y)
                                    for n in ("up grad", "gated"))

    def _make_grads(self, weights: dict[str, Tensor | None], needs: list[bool]) -> None:
        call = self.call
        self.grads: dict[str, MainGrad | _WeightGrad] = {
            name: MainGrad(call.main_grad_weights[name], call.memory)
            if name in call.main_grad_weights else _WeightGrad(call, name, w)
            for (name, w), need in zip(weights.items(), needs[::2], strict=True) if need
        }
        self.bias_grads = {
            name: w.new_zeros(len(call.counts), w.shape[2])
            for (name, w), need in zip(weights.items(), needs[1::2], strict=True) if need
        }
        self.bias_into = {name: g.unbind(0) for name, g in self.bias_grads.items()}

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, gates, w_in, b_in, w_gate, b_gate, w_out, b_out; None: not needed."""
        for block in self.call.blocks:
            self._block(block)
        grads = {name: g.result() for name, g in self.grads.items()}
        return (self._grad_x(), self._grad_gates(),
                *(made.get(name) for name in WEIGHTS for made in (grads, self.bias_grads)))

    def _block(self, block: Block) -> None:
        grad_ND, h_NF = self._grad_output(block), block.of(self.before)
        grad_NF = self.transposed[W_OUT].into(block, grad_ND, self.activation_grad.at(block))
        a_NF = self._activation(block, h_NF)
        inner_NF, grads = a_NF, {W_IN: grad_NF}
        if self.up is not None:
            up_NF = block.of(self.up)
            grads = {
                W_IN: torch.mul(grad_NF, a_NF, out=self.up_grad.at(block)),
                W_GATE: grad_NF.mul_(up_NF)
            }
            inner_NF = torch.mul(a_NF, up_NF, out=self.gated.at(block))
        self._add_weight_grads(W_OUT, block, inner_NF, grad_ND)
        self.call.act.gradient(grad_NF, h_NF, grad_NF)
        self._input_side(block, grads)

    def _activation(self, block: Block, h_NF: Tensor) -> Tensor:
        if self.after is not None:
            return block.of(self.after)
        a_NF = self.recomputed_act.at(block)
        self.call.act.into(h_NF, a_NF)
        return a_NF

    def _grad_output(self, block: Block) -> Tensor:
        """Gradient of one block's output rows [N, D]."""
        if self.grad_bags is None:
            return self.grad_output.at(block)
        return sum_bags(self.grad_y, *map(block.of, self.grad_bags))

    def _add_weight_grads(self, name: str, block: Block, x_NI: Tensor | None,
                          grad_NO: Tensor) -> None:
        """Gradients of one matrix and its bias, where needed."""
        if name not in self.grads and name not in self.bias_into:
            return
        grads = block.split(grad_NO)
        if name in self.bias_into:
            for expert, grad in zip(block.experts, grads, strict=True):
                torch.sum(grad, 0, out=self.bias_into[name][expert])
        if name in self.grads:
            for expert, x_IM, grad in zip(block.experts, block.split(x_NI.t(), 1), grads,
                                          strict=True):
                self.grads[name].add_matmul(expert, x_IM, grad)

    def _input_side(self, block: Block, grads: dict[str, Tensor]) -> None:
        """Gradients of the first matmuls' weights and biases, and of the rows."""
        x_ND = None if self.input is None else self.input.at(block)
        rows_ND = None if self.grad_rows is None else self.grad_rows.at(block)
        for name, grad_NF in grads.items():
            self._add_weight_grads(name, block, x_ND, grad_NF)
            if rows_ND is not None:
                self.transposed[name].into(block, grad_NF, rows_ND, add=name != W_IN)

    def _grad_x(self) -> Tensor | None:
        if self.grad_rows is None or self.call.position_TK is None:
            return None if self.grad_rows is None else self.grad_rows.full
        return sum_rows(self.grad_rows.full, self.call.position_TK, None, self.call.complete)

    def _grad_gates(self) -> Tensor | None:
        if not self.need_gates:
            return None
        dots_TK = dot_rows(self.grad_y, self.outputs_RD, self.call.position_TK, self.call.complete)
        return dots_TK.to(self.gates_TK.dtype)
