"""The CPU's way through the experts: gather, both products, activation and combine as one autograd
function.

Rows go through everything a block of experts at a time, while they are in the cache (see `blocks`):
they are gathered into a buffer for one block, and products write where they belong. Kept between
forward and backward, in the module's `Workspace`: the value before the activation; its value after,
where computing it again costs more than reading it; and, for the gates' gradient, each row's
output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_plugin.kernels import combine_rows, gather_rows, sum_rows
from moe_plugin.kernels.activations import ACTIVATIONS, Activation
from moe_plugin.kernels.cpu.blocks import Block, Group, blocks_of, in_order, in_pairs, moved
from moe_plugin.kernels.derivatives import first_derivative_only
from moe_plugin.kernels.expert_ffn import FFNParameters, strategies
from moe_plugin.kernels.main_grad import MainGrad
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import RowCounts, RowPlan

WEIGHTS = ("in", "gate", "out")
OWNED = dict(zip(WEIGHTS, ("w_in_LDF", "w_gate_LDF", "w_out_LFD"), strict=True))
# of one value [rows, F] of a block, so that values stay in the cache from one operation to the
# next; by measurement
BLOCK_BYTES = 4 << 20
# of one expert's product, up to which two at a time are faster than one after the other; by
# measurement
PAIR_FLOP = 1 << 27


@dataclass(frozen=True)
class _Job:
    """What is no tensor with a gradient. total: R, places without a row included. token_R,
    source_R, position_TK: None where x already is rows.
    owners: see `FFNParameters`.
    """

    counts: list[int]
    total: int
    blocks: list[Block]
    act: Activation
    memory: Workspace
    token_R: Tensor | None
    source_R: Tensor | None
    position_TK: Tensor | None
    keep: bool
    owners: Mapping[str, Tensor]


class _Rows:
    """[R, width] rows: all of them (`whole`), or one block's at a time in one buffer."""

    def __init__(self, job: _Job, purpose: str, width: int, like: Tensor,
                 whole: bool = False) -> None:
        rows = job.total if whole else max((block.size for block in job.blocks), default=0)
        room = job.memory.empty(purpose, (rows, width), like)
        self.whole, self.buffer = (room, None) if whole else (None, room)

    def at(self, block: Block) -> Tensor:
        """Of one block."""
        return self.buffer[: block.size] if self.whole is None else self.whole[block.places]


class _Taken:
    """Rows gathered out of tokens into a buffer for one block or, where x already is rows, as they
    lie.
    """

    def __init__(self, job: _Job, x: Tensor, purpose: str) -> None:
        self.x, self.token_R = x, job.token_R
        self.into = None if job.token_R is None else _Rows(job, purpose, x.shape[1], x)

    def at(self, block: Block) -> Tensor:
        """Of one block."""
        if self.into is None:
            return self.x[block.places]
        return torch.index_select(self.x, 0, self.token_R[block.places], out=self.into.at(block))


class _Linear:
    """x w + b of each expert. The views of all experts are made at once: one by one they cost as
    much as the small operations.
    """

    def __init__(self, w_LIO: Tensor, b_LO: Tensor | None = None) -> None:
        self.w_LIO, self.b_LO = w_LIO, b_LO
        self.w, self.b = w_LIO.unbind(0), [None] * w_LIO.shape[0] if b_LO is None else b_LO.unbind(
            0)

    def into(self, block: Block, x_NI: Tensor, out: Tensor, add: bool = False) -> Tensor:
        """One block's rows through their experts' matrices. add: to what is in `out`, in place of
        the bias.
        """
        for group in block.groups:
            if len(group.experts) == 1:
                plain, based = torch.mm, torch.addmm
                x, y, w, base = x_NI[group.places], out[group.places], self.w[
                    group.experts[0]], self.b[group.experts[0]]
            else:
                plain, based = torch.bmm, torch.baddbmm
                x, y, w = group.fold(x_NI), group.fold(out), self.w_LIO[group.both]
                base = None if self.b_LO is None else self.b_LO[group.both, None]
            base = y if add else base
            plain(x, w, out=y) if base is None else based(base, x, w, out=y)
        return out


@strategies.register("fused")
def fused(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """One autograd function for gather, products, activation and combine, a few experts at a time
    in the cache; best on CPU.
    """
    p, plan = parameters, rows if isinstance(rows, RowPlan) else None
    # empty slots hold zero rows: gather them before
    if plan is not None and bool((plan.source_R < 0).any()):
        rows_RD = fused(gather_rows(x, plan.source_R, plan.position_TK), plan.counts, p)
        return combine_rows(rows_RD, plan.weights_TK, plan.source_R, plan.position_TK)
    counts = rows.host if plan is None else plan.counts.host
    (x, *tensors), owners = p.operands(x)
    gates_TK = None if plan is None else plan.weights_TK
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad
                                           for t in (x, gates_TK, *tensors))
    width, inner = p.w_in_LDF.shape[1:]
    groups = in_pairs(
        counts, PAIR_FLOP //
        (2 * width * inner)) if plan is not None and _pairs_pay(x) else in_order(counts)
    blocks = blocks_of(groups, BLOCK_BYTES // (inner * x.element_size()))
    total = groups[-1].places.stop if groups else 0
    job = _Job(counts, total, blocks, ACTIVATIONS[p.activation], p.memory, *_maps(plan, groups),
               keep, owners)
    with torch.autocast(x.device.type, enabled=False):
        return _FusedFFN.apply(job, x, gates_TK, *tensors)


def _pairs_pay(x: Tensor) -> bool:
    """Two experts at a time, a thread each: measured in float32 with two threads, and with no other
    number of them.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32,
                                                  torch.float64) and torch.get_num_threads() == 2


def _maps(plan: RowPlan | None,
          groups: list[Group]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(token_R, source_R, position_TK) with rows as the groups have them."""
    if plan is None:
        return None, None, None
    if groups == in_order(plan.counts.host):
        return plan.token_R, plan.source_R, plan.position_TK
    source_P, position_TK = moved(groups, plan.counts.host, plan.source_R, plan.position_TK)
    return torch.div(source_P, position_TK.shape[1], rounding_mode="floor"), source_P, position_TK


class _FusedFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, x: Tensor, gates_TK: Tensor | None, w_in: Tensor,
                b_in: Tensor | None, w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
                b_out: Tensor | None) -> Tensor:
        done = _Forward(job, x, w_in, b_in, w_gate, b_gate, w_out, b_out)
        rows_RD = done.run()
        y = rows_RD if job.position_TK is None else sum_rows(rows_RD, job.position_TK, gates_TK)
        if job.keep:
            ctx.job = job
            outputs_RD = rows_RD if gates_TK is not None and gates_TK.requires_grad else None
            ctx.save_for_backward(x, gates_TK, *done.kept(), outputs_RD, w_in, w_gate, w_out)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_Backward(ctx, grad_y.contiguous()).run()


class _Forward:
    """One forward pass: where its values go, and the steps for one block."""

    def __init__(self, job: _Job, x: Tensor, w_in: Tensor, b_in: Tensor | None,
                 w_gate: Tensor | None, b_gate: Tensor | None, w_out: Tensor,
                 b_out: Tensor | None) -> None:
        width, inner = w_in.shape[1:]
        self.job, self.taken = job, _Taken(job, x, "gathered")
        self.first, self.second = _Linear(w_in, b_in), _Linear(w_out, b_out)
        self.gate = None if w_gate is None else _Linear(w_gate, b_gate)
        self.before = _Rows(job, "before", inner, x, job.keep)
        self.after = _Rows(job, "after", inner, x, job.keep and not job.act.cheap)
        self.up, self.product = (None,
                                 None) if w_gate is None else (_Rows(job, "up", inner, x, job.keep),
                                                               _Rows(job, "product", inner, x))
        self.rows = _Rows(job, "rows", width, x, True)

    def run(self) -> Tensor:
        """Output rows [R, D]."""
        for block in self.job.blocks:
            self._block(block)
        return self.rows.whole

    def kept(self) -> tuple[Tensor | None, ...]:
        """Value before the activation, after it, the other factor of a gated expert, each [R, F];
        None: not kept.
        """
        return tuple(None if rows is None else rows.whole
                     for rows in (self.before, self.after, self.up))

    def _block(self, block: Block) -> None:
        x_ND, a_NF = block.cleared(self.taken.at(block)), self.after.at(block)
        h_NF = (self.gate or self.first).into(block, x_ND, self.before.at(block))
        self.job.act.into(h_NF, a_NF)
        if self.gate is not None:
            up_NF = self.first.into(block, x_ND, self.up.at(block))
            a_NF = torch.mul(a_NF, up_NF, out=self.product.at(block))
        self.second.into(block, a_NF, self.rows.at(block))


class _Backward:
    """One backward pass: buffers, the gradients being filled, and the steps for one block."""

    def __init__(self, ctx: Any, grad_y: Tensor) -> None:
        self.job = job = ctx.job
        x, self.gates_TK, self.before, self.after, self.up, self.outputs_RD, w_in, w_gate, w_out = ctx.saved_tensors
        weights, (width, inner) = dict(zip(WEIGHTS, (w_in, w_gate, w_out),
                                           strict=True)), w_in.shape[1:]
        need_x, need_gates, *needs = ctx.needs_input_grad[1:]
        self.grads: dict[str, Tensor | MainGrad] = {
            name: self._weight(name, w)
            for (name, w), need in zip(weights.items(), needs[::2], strict=True) if need
        }
        self.bias_grads = {
            name: w_in.new_zeros(len(job.counts), size)
            for name, size, need in zip(WEIGHTS, (inner, inner, width), needs[1::2], strict=True)
            if need
        }
        self.into = {
            name: None if isinstance(g, MainGrad) else g.unbind(0)
            for name, g in self.grads.items()
        }
        self.bias_into = {name: g.unbind(0) for name, g in self.bias_grads.items()}
        self.turned = {
            name: _Linear(w.transpose(1, 2)) for name, w in weights.items() if w is not None
        }
        self.taken = _Taken(job, x, "gathered") if {"in", "gate"} & set(self.grads) else None
        self.taken_grad = _Taken(job, grad_y, "gathered grad")
        self.grad_rows = _Rows(job, "grad rows", width, grad_y, True) if need_x else None
        self.again = _Rows(job, "after again", inner, grad_y) if self.after is None else None
        self.slope = _Rows(job, "slope", inner, grad_y)
        self.up_slope, self.product = (None if w_gate is None else _Rows(job, n, inner, grad_y)
                                       for n in ("up slope", "product"))
        mapped, dtype = job.token_R is not None, accumulate_dtype(grad_y.dtype)
        self.scale_R1 = self.gates_TK.detach().reshape(-1)[job.source_R].to(
            dtype)[:, None] if mapped else None
        self.dots_R = torch.zeros(job.total, dtype=dtype) if mapped and need_gates else None
        self.dot_terms = None if self.dots_R is None else _Rows(job, "dot", width, self.dots_R)

    def _weight(self, name: str, w_LIO: Tensor) -> Tensor | MainGrad:
        if OWNED[name] in self.job.owners:
            return MainGrad(self.job.owners[OWNED[name]], self.job.memory)
        grad = self.job.memory.empty(f"gradient {name}", tuple(w_LIO.shape), w_LIO)
        for expert, count in enumerate(self.job.counts):
            if not count:
                grad[expert].zero_()
        return grad

    def run(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, gates, w_in, b_in, w_gate, b_gate, w_out, b_out."""
        for block in self.job.blocks:
            self._block(block)
        grads = {
            name: g.settled() if isinstance(g, MainGrad) else g for name, g in self.grads.items()
        }
        return (self._grad_x(), self._grad_gates(), *(made.get(name) for name in WEIGHTS
                                                      for made in (grads, self.bias_grads)))

    def _block(self, block: Block) -> None:
        grad_ND, h_NF = self._grad_output(block), self.before[block.places]
        slope_NF = self.turned["out"].into(block, grad_ND, self.slope.at(block))
        a_NF = self._after(block, h_NF)
        inner_NF, slopes = a_NF, {"in": slope_NF}
        if self.up is not None:
            up_NF = self.up[block.places]
            slopes = {
                "in": torch.mul(slope_NF, a_NF, out=self.up_slope.at(block)),
                "gate": slope_NF.mul_(up_NF)
            }
            inner_NF = torch.mul(a_NF, up_NF, out=self.product.at(block))
        self._weights("out", block, inner_NF, grad_ND)
        self.job.act.gradient(slope_NF, h_NF, slope_NF)
        self._input_side(block, slopes)

    def _after(self, block: Block, h_NF: Tensor) -> Tensor:
        if self.after is not None:
            return self.after[block.places]
        a_NF = self.again.at(block)
        self.job.act.into(h_NF, a_NF)
        return a_NF

    def _grad_output(self, block: Block) -> Tensor:
        """Gradient of one block's output rows; on the way, the gates' gradients."""
        grad_ND = self.taken_grad.at(block)
        if self.scale_R1 is None:
            return grad_ND
        if self.dots_R is not None:
            terms_ND = torch.mul(grad_ND.to(self.dots_R.dtype), self.outputs_RD[block.places],
                                 out=self.dot_terms.at(block))
            torch.sum(terms_ND, 1, out=self.dots_R[block.places])
        return block.cleared(torch.mul(grad_ND, self.scale_R1[block.places], out=grad_ND))

    def _weights(self, name: str, block: Block, x_NI: Tensor | None, grad_NO: Tensor) -> None:
        """Gradients of one matrix and its bias, where wanted. A pair's by one operation: the
        gradient is zero in places without a row.
        """
        if name in self.bias_into:
            for group in block.groups:
                if len(group.experts) == 1:
                    torch.sum(grad_NO[group.places], 0, out=self.bias_into[name][group.experts[0]])
                else:
                    torch.sum(group.fold(grad_NO), 1, out=self.bias_grads[name][group.both])
        if name in self.into and self.into[name] is None:
            x_IN = x_NI.t()
            for expert, rows in block.experts():
                self.grads[name].add_product(expert, x_IN[:, rows], grad_NO[rows])
        elif name in self.into:
            for group in block.groups:
                if len(group.experts) == 1:
                    torch.mm(x_NI[group.places].t(), grad_NO[group.places],
                             out=self.into[name][group.experts[0]])
                else:
                    torch.bmm(
                        group.fold(x_NI).transpose(1, 2), group.fold(grad_NO),
                        out=self.grads[name][group.both])

    def _input_side(self, block: Block, slopes: dict[str, Tensor]) -> None:
        """Gradients of the first products' weights and biases, and of the rows."""
        x_ND = None if self.taken is None else block.cleared(self.taken.at(block))
        rows_ND = None if self.grad_rows is None else self.grad_rows.at(block)
        for name, slope_NF in slopes.items():
            self._weights(name, block, x_ND, slope_NF)
            if rows_ND is not None:
                self.turned[name].into(block, slope_NF, rows_ND, add=name != "in")

    def _grad_x(self) -> Tensor | None:
        if self.grad_rows is None or self.job.position_TK is None:
            return None if self.grad_rows is None else self.grad_rows.whole
        return sum_rows(self.grad_rows.whole, self.job.position_TK, None)

    def _grad_gates(self) -> Tensor | None:
        if self.dots_R is None:
            return None
        position_TK = self.job.position_TK
        if self.dots_R.numel() == 0:
            return torch.zeros_like(self.gates_TK)
        grads_TK = self.dots_R[position_TK.clamp(min=0)] * (position_TK >= 0)
        return grads_TK.to(self.gates_TK.dtype)
