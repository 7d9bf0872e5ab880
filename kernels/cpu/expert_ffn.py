"""The strategy `fused` for CPUs, which implements gather, matmuls, activation and combine as one
autograd function.

All operations are applied to one block of experts before the next block starts, so that the rows of
the block stay in the cache (see `blocks`). The rows of a block are gathered into a buffer, and each
matmul writes directly to its destination. For backward, the input of the activation function is
stored in the module's `Workspace`. The output of the activation function is also stored there if
reading it is cheaper than recomputing it and `FFNParameters.recompute` is off. The output rows are
stored if the gradient of the gates needs them. If `native.passes` is available, compiled code
performs all operations between two matmuls in a single pass over the values. In this case, output
rows are stored only for experts with an output bias (see `FFNCall.late`), and the output of the
activation function is recomputed for gated experts.

In float32, each expert of a block is computed by one thread, and several experts run in parallel
(`products.SideBySide`). In 16-bit dtypes, the experts run one after another, and each expert uses
all threads. In 16-bit dtypes, consecutive experts with few rows are also padded and computed by one
batched matmul (`products.RowRule`), which multiplies the time of the layer by 0.55 to 0.99 (AMD Zen
5). With 64 experts of 128 rows and widths 256 and 512, the time decreases from 34.3 to 29.9 ms.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS, first_derivative_only
from moe_plugin.kernels.cpu.blocks import (
    BlockRows,
    GatheredRows,
    WeightedRows,
    blocks_of,
    by_block,
    clipped,
    padding_of,
)
from moe_plugin.kernels.cpu.ffn_call import FFNCall, Linear, Maps, by_unit
from moe_plugin.kernels.cpu.native.functions import passes
from moe_plugin.kernels.cpu.products import products_of, row_rule
from moe_plugin.kernels.expert_ffn import FFNParameters, apply_to_rows, strategies
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.rows import at_choices, dot_rows, sum_rows
from moe_plugin.kernels.weight_grads import WEIGHTS, GradSums, MainGrad, WeightGrad
from moe_plugin.records import RowCounts, RowPlan

# size of one tensor [N, F] of a block, measured so that a block stays in the cache
BLOCK_BYTES = 4 << 20
W_IN, W_GATE, W_OUT = WEIGHTS


@strategies.register("fused")
def fused(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """A strategy for CPUs that computes all operations of the experts in one autograd function.

    x: rows [R, D] or tokens [T, D]. The output has the same shape and dtype as `x`; see `Strategy`.
    """
    p, plan = parameters, rows if isinstance(rows, RowPlan) else None
    # `gather_rows` zeroes empty slots. On a device the check would make the host wait.
    if plan is not None and not plan.complete and (x.device.type != "cpu"
                                                   or bool((plan.source_R < 0).any())):
        return apply_to_rows(lambda rows_RD, counts: fused(rows_RD, counts, p), x, plan)
    counts = (rows.counts if isinstance(rows, RowPlan) else rows).host
    x, tensors, redirected = p.operands(x)
    gates_TK = None if plan is None else plan.weights_TK
    keep = False
    for t in (x, gates_TK, *tensors) if torch.is_grad_enabled() else ():
        keep = keep or (t is not None and t.requires_grad)
    width, inner = p.w_in_LDF.shape[1:]
    limit = BLOCK_BYTES // (inner * x.element_size())
    blocks = blocks_of(counts, limit, row_rule(x, width, inner))
    single = exact = True
    for block in blocks:
        single, exact = single and block.single, exact and block.exact
    maps = Maps.of(plan, None if single else padding_of(counts, blocks))
    # Rows that are not gathered end with the input's memory; nothing may be read behind them.
    if maps.token_R is None:
        blocks = clipped(blocks)
    act, native = ACTIVATIONS[p.activation], passes(x, p.activation)
    # `native` recomputes a gated expert's activation at no cost, as it reads both factors anyway.
    keep_after = keep and not (act.cheap or p.recompute or (native and p.w_gate_LDF is not None))
    # An output bias contributes to the gates' gradient, and its own gradient needs weighted rows.
    late = native is not None and gates_TK is not None and p.bias_out_LD is None
    # Under autocast each call casts the weights separately, so gradients cannot be shared.
    own = p.sums is None or torch.is_autocast_enabled(x.device.type)
    sums = GradSums() if own else p.sums
    if keep:
        sums.calls += 1
    # In order, if a product may overwrite rows of the next unit, which is computed after it.
    products = products_of(x, in_order=not exact)
    later, wanted = p.later, ()
    if later is not None:
        later = None if torch.is_autocast_enabled(x.device.type) else p.leaving(x, gates_TK)
    if later is not None:
        tensors, wanted = later.cut_off(tensors)
    call = FFNCall(counts, blocks, products, act, native, p.memory, maps, keep, keep_after, late,
                   redirected, sums, later, wanted)
    if not torch.is_autocast_enabled(x.device.type):
        return _FusedFFN.apply(call, x, gates_TK, *tensors)
    # The operands are already cast, and products write into buffers of the same dtype.
    with torch.autocast(x.device.type, enabled=False):
        return _FusedFFN.apply(call, x, gates_TK, *tensors)


class _FusedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: FFNCall, x: Tensor, gates_TK: Tensor | None, w_in: Tensor,
                b_in: Tensor | None, w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
                b_out: Tensor | None) -> Tensor:
        done = _Forward(call, x, w_in, b_in, w_gate, b_gate, w_out, b_out)
        rows_RD = done.run()
        y = rows_RD
        if call.maps.position_TK is not None:
            y = sum_rows(rows_RD, call.maps.position_TK, gates_TK, call.maps.complete)
        if call.keep:
            ctx.call = call
            dotted = gates_TK is not None and gates_TK.requires_grad and not call.late
            outputs_RD = rows_RD if dotted else None
            ctx.save_for_backward(x, gates_TK, *done.kept(), outputs_RD, w_in, w_gate, w_out)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward(ctx, grad_y.contiguous()).run()


class _Forward:
    """The buffers of one forward pass, and the operations that are applied to each block."""

    def __init__(self, call: FFNCall, x: Tensor, w_in: Tensor, b_in: Tensor | None,
                 w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
                 b_out: Tensor | None) -> None:
        width, inner = w_in.shape[1:]
        self.call, self.input = call, call.gathered(x, "gathered")
        self.w_in = Linear(call, w_in, b_in)
        self.w_out = Linear(call, w_out, b_out)
        self.w_gate = None if w_gate is None else Linear(call, w_gate, b_gate)
        self.before = call.make("before", inner, x, call.keep)
        self.after = call.make("after", inner, x, call.keep_after)
        self.up: BlockRows | None = None
        self.gated: BlockRows | None = None
        if w_gate is not None:
            self.up = call.make("up", inner, x, call.keep)
            if call.native is None:
                self.gated = call.make("gated", inner, x)
        self.rows = call.make("rows", width, x, whole=True)

    def run(self) -> Tensor:
        """Return the output rows [R, D]."""
        for block in range(len(self.call.blocks)):
            x = self.input.take(block)
            h_NF = (self.w_gate or self.w_in).into(block, x, self.before)
            up_NF = None if self.up is None else self.w_in.into(block, x, self.up)
            inner = self._activate(h_NF, up_NF, block)
            self.w_out.into(block, inner.take(block), self.rows)
        return self.rows.memory

    def kept(self) -> tuple[Tensor | None, ...]:
        """Return the tensors that backward needs: the input and the output of the activation
        function, and `up`. Tensors that backward does not need are None.
        """
        keep, keep_after = self.call.keep, self.call.keep_after
        return (self.before.memory if keep else None, self.after.memory if keep_after else None,
                self.up.memory if keep and self.up is not None else None)

    def _activate(self, h_NF: Tensor, up_NF: Tensor | None, block: int) -> BlockRows:
        a_NF = self.after.of_block[block]
        if self.call.native is not None:
            self.call.native.forward(h_NF, up_NF, a_NF, self.call.keep_after)
            return self.after
        self.call.act.into(h_NF, a_NF)
        if up_NF is None:
            return self.after
        assert self.gated is not None
        torch.mul(a_NF, up_NF, out=self.gated.of_block[block])
        return self.gated


class _Backward:
    """The buffers and gradients of one backward pass, and the operations applied to each block."""

    def __init__(self, ctx: Any, grad_y: Tensor) -> None:
        self.call = call = ctx.call
        (x, self.gates_TK, before, after, up, self.outputs_RD, w_in, w_gate,
         w_out) = ctx.saved_tensors
        if call.native is not None:  # hooks on saved tensors may have changed dtype or layout
            before, after, up = (t if t is None else t.to(grad_y.dtype).contiguous()
                                 for t in (before, after, up))
        width, inner = w_in.shape[1:]
        need_x, need_gates, *needs = ctx.needs_input_grad[1:]
        self.weights = weights = dict(zip(WEIGHTS, (w_in, w_gate, w_out), strict=True))
        self.bias_grads = {
            name: w.new_zeros(len(call.counts), w.shape[2])
            for (name, w), need in zip(weights.items(), needs[1::2], strict=True)
            if need and w is not None
        }
        self.bias_into = {name: by_unit(g, call.blocks) for name, g in self.bias_grads.items()}
        self.transposed = {
            name: Linear(call, w.transpose(1, 2))
            for name, w in weights.items() if w is not None
        }
        self.grad_y, self.need_gates = grad_y, need_gates
        self.scale_R, self.dots_R = self._scale(), None
        if call.late and need_gates:
            assert self.scale_R is not None
            self.dots_R = torch.empty_like(self.scale_R)
        self.scales = self._by_block(self.scale_R if call.late else None)
        self.dots = self._by_block(self.dots_R)
        self.grad_output = self._read_grad()
        self.grad_rows = call.make("grad rows", width, grad_y, whole=True) if need_x else None
        self.before = BlockRows(call.blocks, before, True, by_row=False)
        # Postponed weight gradients need the values of all blocks.
        make = functools.partial(call.make, width=inner, like=grad_y, whole=call.later is not None)
        self.after = (make("recomputed act") if after is None
                      else BlockRows(call.blocks, after, True, by_row=False))
        # `inner` is the input of the last matmul: the activation, for gated experts times `up`.
        self.recompute, self.inner = after is None, self.after
        self.activation_grad = make("activation grad")
        self.up: BlockRows | None = None
        self.up_grad: BlockRows | None = None
        if w_gate is not None:
            self.up = BlockRows(call.blocks, up, True, by_row=False)
            self.up_grad = make("up grad")
            if call.native is None:
                self.inner = make("gated")
        self.x, self.columns = x, dict[str, Any]()
        self.input: BlockRows | GatheredRows | None = None
        self.grads: dict[str, MainGrad | WeightGrad] = {}
        if call.later is None:
            self._begin_weights(needs[::2])

    def _begin_weights(self, needs: Sequence[bool]) -> None:
        call = self.call
        self.grads = {
            name: MainGrad(call.sums, name, call.main_grad_weights[name], call.memory)
            if name in call.main_grad_weights else WeightGrad(call.sums, name, w, call.memory)
            for (name, w), need in zip(self.weights.items(), needs, strict=True) if need
        }
        if W_OUT in self.grads:
            self.columns[W_OUT] = self.inner.columns()
        if W_IN in self.grads or W_GATE in self.grads:
            self.input = gathered = call.gathered(self.x, "gathered")
            self.columns[W_IN] = self.columns[W_GATE] = gathered.columns()

    def _left_weights(self) -> dict[str, Tensor | None]:
        """Compute and return the weight gradients that `run` postponed."""
        self.bias_into = {}
        self._begin_weights(self.call.wanted)
        for block in range(len(self.call.blocks)):
            if W_OUT in self.grads:
                grad = self.grad_output.take(block)
                self._scale_grad(block)
                self._add_weight_grads(W_OUT, block, grad.own)
            self._input_side(block, rows=False)
        return {name: g.result() for name, g in self.grads.items()}

    def run(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, of the gates and of all parameters (None if not needed)."""
        for block in range(len(self.call.blocks)):
            self._block(block)
        if self.call.later is not None:
            self.call.later.add(self._left_weights)
        grads = {name: g.result() for name, g in self.grads.items()}
        return (self._grad_x(), self._grad_gates(),
                *(made.get(name) for name in WEIGHTS for made in (grads, self.bias_grads)))

    def _block(self, block: int) -> None:
        grad, h_NF = self.grad_output.take(block), self.before.of_block[block]
        grad_NF = self.transposed[W_OUT].into(block, grad, self.activation_grad)
        up_NF = None if self.up is None else self.up.of_block[block]
        inner = self._native if self.call.native is not None else self._by_torch
        inner(block, grad_NF, h_NF, up_NF)
        self._add_weight_grads(W_OUT, block, grad.own)
        self._input_side(block)

    def _native(self, block: int, grad_NF: Tensor, h_NF: Tensor, up_NF: Tensor | None) -> None:
        """Compute the gradient of the activation function's input, and `inner`, which is needed for
        the weight gradient of the last matmul.
        """
        up_grad_NF = None if self.up_grad is None else self.up_grad.of_block[block]
        scale_N = self.scales[block]
        self.call.native.backward(grad_NF, h_NF, up_NF, self.inner.of_block[block], up_grad_NF,
                                  scale_N, self.dots[block], not self.recompute)
        if W_OUT in self.grads:
            self._scale_grad(block)

    def _scale_grad(self, block: int) -> None:
        # The last product used the output's gradient without gates; its weight gradient needs them.
        if self.scales[block] is not None:
            self.call.native.scale(self.grad_output.rows.of_block[block], self.scales[block])

    def _by_torch(self, block: int, grad_NF: Tensor, h_NF: Tensor, up_NF: Tensor | None) -> None:
        """Compute the same gradients as `_native`, but with torch operations."""
        a_NF = self.after.of_block[block]
        if self.recompute:
            self.call.act.into(h_NF, a_NF)
        if up_NF is not None:
            torch.mul(a_NF, up_NF, out=self.inner.of_block[block])
            assert self.up_grad is not None
            torch.mul(grad_NF, a_NF, out=self.up_grad.of_block[block])
            grad_NF.mul_(up_NF)
        self.call.act.gradient(grad_NF, h_NF, grad_NF)

    def _scale(self) -> Tensor | None:
        """Return the factor [R] by which the gradient of each row is multiplied, or None. The gates
        are in float32 (float64 for a float64 layer).
        """
        maps = self.call.maps
        if self.gates_TK is None:
            return None if maps.real_R is None else maps.real_R.to(self.grad_y.dtype)
        scale_R = self.gates_TK.reshape(-1).index_select(0, maps.source_R)
        scale_R = scale_R.to(accumulate_dtype(self.grad_y.dtype))
        if maps.real_R is not None:
            scale_R *= maps.real_R
        return scale_R

    def _by_block(self, x_R: Tensor | None) -> list[Tensor] | list[None]:
        """Split a tensor with one value per row into one tensor per block for `_native`. If the
        tensor is None, return a list with one None per block.
        """
        blocks = self.call.blocks
        return [None] * len(blocks) if x_R is None else by_block(blocks, x_R)

    def _read_grad(self) -> BlockRows | GatheredRows | WeightedRows:
        """Return the gradient of the output rows, not multiplied by the gates if `late` is true."""
        if self.scale_R is None or self.call.late:
            return self.call.gathered(self.grad_y, "gathered grad")
        return WeightedRows(self.call.blocks, self.grad_y, self.call.maps.token_R, self.scale_R)

    def _add_weight_grads(self, name: str, block: int, grads: Sequence[Tensor]) -> None:
        """Add the gradients of one weight matrix and of its bias, if these gradients are needed."""
        if name in self.bias_into:
            for into, grad in zip(self.bias_into[name][block], grads, strict=True):
                torch.sum(grad, -2, out=into)
        if name in self.grads:
            self.grads[name].add_matmuls([unit.index for unit in self.call.blocks[block].units],
                                         self.columns[name][block], grads)

    def _input_side(self, block: int, rows: bool = True) -> None:
        """Compute the weight and bias gradients of the first matmuls, and the rows' gradient."""
        grads = {W_IN: self.activation_grad} if self.up is None else {
            W_IN: self.up_grad, W_GATE: self.activation_grad}
        if self.input is not None:
            self.input.take(block)  # gathering again is cheaper than storing k copies per token
        for name, made in grads.items():
            grad = made.of_units[block]
            self._add_weight_grads(name, block, grad.own)
            # Both factors of a gated expert read the same rows, so their gradients are added.
            if rows and self.grad_rows is not None:
                self.transposed[name].into(block, grad, self.grad_rows, add=name != W_IN)

    def _grad_x(self) -> Tensor | None:
        maps = self.call.maps
        if self.grad_rows is None or maps.position_TK is None:
            return None if self.grad_rows is None else self.grad_rows.memory
        return sum_rows(self.grad_rows.memory, maps.position_TK, None, maps.complete)

    def _grad_gates(self) -> Tensor | None:
        if not self.need_gates:
            return None
        maps = self.call.maps
        if self.dots_R is not None:
            dots_TK = at_choices(self.dots_R, maps.position_TK, maps.complete)
        else:
            dots_TK = dot_rows(self.grad_y, self.outputs_RD, maps.position_TK, maps.complete)
        return dots_TK.to(self.gates_TK.dtype)
