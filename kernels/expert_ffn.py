"""Strategies to compute the feed-forward experts of a rank. Each strategy is registered by name.
This module defines the strategies that consist of torch operations.

A strategy is a differentiable function `(x, rows, parameters) -> y`, where y has the same shape and
dtype as x. If `rows` is a `RowCounts`, x contains rows [R, D], ordered by expert. If `rows` is a
`RowPlan`, x contains tokens [T, D], and y contains the weighted sum of the output rows of each
token. Strategies whose kernels gather and combine rows do not create copies of the tokens. Experts
without rows get zero gradients rather than missing gradients.

The modules `cpu.expert_ffn` and `gpu.expert_ffn` define the strategies `fused` and `kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.rounded import RoundedWeights
from moe_plugin.kernels.rows import combine_rows, gather_rows
from moe_plugin.kernels.saved import Keep, rows_kept, through_recomputed
from moe_plugin.kernels.weight_grads import GradSums, LaterGrads
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import DeviceCounts, RowCounts, RowPlan
from moe_plugin.utils.registry import Registry

OPERANDS = ("w_in_LDF", "bias_in_LF", "w_gate_LDF", "bias_gate_LF", "w_out_LFD", "bias_out_LD")


class LowRank(NamedTuple):
    """An adapter for the weights w of L experts. With the adapter, the experts use the weights
    `(w + a @ b) * factor`.

    Attributes:
        a_LIR, b_LRO: low-rank matrices of the adapter, with shapes [L, I, R] and [L, R, O].
        factor_LO: factors [L, O] by which the adapted weights are multiplied. None means 1.
    """

    a_LIR: Tensor
    b_LRO: Tensor
    factor_LO: Tensor | None

    def to(self, dtype: torch.dtype) -> LowRank:
        """Return a copy of the adapter in a different dtype."""
        factor_LO = None if self.factor_LO is None else self.factor_LO.to(dtype)
        return LowRank(self.a_LIR.to(dtype), self.b_LRO.to(dtype), factor_LO)


@dataclass(frozen=True)
class FFNParameters:
    """The parameters of L experts, as stored in `FFNExperts`, and settings for computing them.

    Attributes:
        w_in_LDF, w_gate_LDF: weights [L, D, F], which all have the same floating-point dtype. If
            the experts are not gated, `w_gate_LDF` is None.
        bias_in_LF, bias_gate_LF: biases [L, F] that belong to w_in and w_gate.
        w_out_LFD: output weight [L, F, D].
        bias_out_LD: bias [L, D]. The bias has all D columns, even if the experts are sharded.
        activation: name of the activation function, a key of `ACTIVATIONS`.
        memory: workspace that provides the memory for large temporary tensors.
        choice: how the strategy `auto` selects a strategy; see `experts.compute_selection`.
        main_grad_weights: by field name, the parameters whose gradients the host framework
            accumulates in `main_grad`. A strategy that reads the weights from the fields needs no
            special code, because `redirect_grad` adds the gradients. A strategy that computes with
            the tensors returned by `operands()` must add these gradients itself; see
            `kernels.weight_grads`.
        dropout: probability with which an output of the activation function is set to 0. Dropout is
            supported only by the strategies in `KEEPS_ROWS`.
        clamp, linear_offset: settings of gated experts; see `gated`. Only strategies for which
            `is_stepwise` is True support these settings, `own_gate`, which is called instead of
            `gated`, and `finish`, which is applied to the outputs [R, D].
        recompute: whether to save only the inputs of the activation function for backward, and to
            recompute its outputs. With dropout, the activations after dropout are also saved.
        schedule: schedule of the strategy `kernels`; a key of `kernels.groups.SCHEDULES`.
        keep: function that saves rows for backward if the number of rows is known only on the
            device. Only the strategies in `KEEPS_ROWS` call `keep`. If `keep` is None, autograd
            stores the rows.
        sums: object that sums the weight gradients of all calls that share these parameters within
            one backward pass. A strategy may add its weight gradients to this object, and the sum
            is returned only once. The object is None if no other call shares the parameters.
        precision: precision of the matmuls in the strategy `kernels`; see `experts.precision`.
            Other strategies use torch's precision settings.
        rounded: the module's cache of rounded weights, for precisions in which weights are rounded.
            If `rounded` is None, each call rounds the weights.
        adapters: adapters of these experts. The adapter "in" applies to w_in and w_gate, whose
            outputs are concatenated, and the adapter "out" applies to w_out. Only strategies that
            are created by `from_matmul` use the adapters.
        later: object that collects postponed weight gradients. The strategies `fused` and `kernels`
            postpone weight gradients in exact precisions. All other strategies compute the weight
            gradients immediately in backward.
    """

    w_in_LDF: Tensor
    bias_in_LF: Tensor | None
    w_gate_LDF: Tensor | None
    bias_gate_LF: Tensor | None
    w_out_LFD: Tensor
    bias_out_LD: Tensor | None
    activation: str
    memory: Workspace
    choice: str = "rule"
    main_grad_weights: Mapping[str, Tensor] = field(default_factory=dict)
    dropout: float = 0.0
    clamp: float = 0.0
    linear_offset: float = 0.0
    recompute: bool = False
    sums: GradSums | None = None
    precision: str = "ieee"
    rounded: RoundedWeights | None = None
    schedule: str = ""
    keep: Keep | None = None
    adapters: Mapping[str, LowRank] = field(default_factory=dict)
    later: LaterGrads | None = None
    own_gate: Callable[[Tensor, Tensor], Tensor] | None = None
    finish: Callable[[Tensor], Tensor] | None = None

    def leaving(self, *inputs: Tensor | None) -> LaterGrads | None:
        """Return the object that collects postponed weight gradients, or None if backward must
        compute these gradients immediately.

        Return None if no input requires a gradient. In this case, autograd does not record a call
        from which the weights are detached, and no rank waits for a gradient.
        """
        wanted = any(x is not None and x.requires_grad for x in inputs)
        return self.later if wanted and torch.is_grad_enabled() else None

    def operands(self, x: Tensor) -> tuple[Tensor, list[Tensor | None], Mapping[str, Tensor]]:
        """Return the inputs for one autograd function, and a mapping with those inputs that are in
        `main_grad_weights`.

        The inputs are x, with shape [R, D] or [T, D], and the list [w_in, b_in, w_gate, b_gate,
        w_out, b_out]. Under autocast, all inputs are cast to the autocast dtype (float64 stays
        float64), and the mapping is empty: the original parameters then redirect their gradients.
        """
        fields: list[Tensor | None] = [self.w_in_LDF, self.bias_in_LF, self.w_gate_LDF,
                                       self.bias_gate_LF, self.w_out_LFD, self.bias_out_LD]
        if not torch.is_autocast_enabled(x.device.type):
            for name in self.main_grad_weights:
                fields[OPERANDS.index(name)] = self.main_grad_weights[name]
            return x, fields, self.main_grad_weights
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x if x.dtype == torch.float64 else x.to(dtype)
        return x, [t if t is None or t.dtype == torch.float64 else t.to(dtype)
                   for t in fields], {}


GroupedMatmul = Callable[[Tensor, RowCounts, Tensor, "Tensor | None"], Tensor]
Elementwise = Callable[[Tensor], Tensor]
Strategy = Callable[[Tensor, "RowCounts | RowPlan", FFNParameters], Tensor]
strategies: Registry[Strategy] = Registry("expert_compute")
_STEPWISE: list[Strategy] = []  # strategies made by `from_matmul`
# Strategies that use `FFNParameters.keep`. `batched` is not included, because it saves padded
# copies with rows at other positions, nor is `fused`, which saves its rows in reusable CPU memory.
KEEPS_ROWS = ("auto", "kernels", "grouped", "loop")


def from_matmul(matmul: GroupedMatmul, keeps_rows: bool = False,
                elementwise: Callable[[Elementwise], Elementwise] = lambda f: f) -> Strategy:
    """Create a strategy from a grouped matmul `(rows_RI, counts, w_LIO, b_LO or None) -> rows_RO`.

    The matmul multiplies the rows of expert l by its matrix `w_LIO[l]` and adds its bias.

    keeps_rows: whether every tensor that autograd saves has its rows in the order of `rows_RI`.
    Only such tensors can be stored by `FFNParameters.keep`.
    elementwise: function that decorates the activation function.
    """

    @functools.wraps(matmul)
    def strategy(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
        if (keeps_rows and parameters.keep is not None and isinstance(rows, DeviceCounts)
                and x.numel()):
            return _ffn_keeping(matmul, x, rows, parameters)
        return apply_to_rows(lambda rows_RD, counts: _ffn(
            matmul, rows_RD, counts, parameters, elementwise), x, rows)

    _STEPWISE.append(strategy)
    return strategy


def _ffn_keeping(matmul: GroupedMatmul, x: Tensor, counts: DeviceCounts,
                 p: FFNParameters) -> Tensor:
    """Compute `_ffn`, and call `p.keep` to store the rows that are saved for backward."""
    if torch.is_autocast_enabled(x.device.type):
        # Autograd would save the casts of autocast, and a cast may have the size of rows.
        x, tensors, _ = p.operands(x)
        adapters = {name: adapter.to(x.dtype) for name, adapter in p.adapters.items()}
        fields: dict[str, Any] = dict(zip(OPERANDS, tensors, strict=True))
        p = replace(p, **fields, adapters=adapters)
    x = x.contiguous()
    widths = p.w_in_LDF.shape[1:]
    assert p.keep is not None
    keep = functools.partial(p.keep, lengths_L=counts.lengths_L)
    with torch.autocast(x.device.type, enabled=False), rows_kept(
            keep, x, widths, [*(getattr(p, name) for name in OPERANDS),
                              *(value for adapter in p.adapters.values() for value in adapter)]):
        return _ffn(matmul, x, counts, p)


def apply_to_rows(compute: Callable[[Tensor, RowCounts], Tensor], x: Tensor,
                  rows: RowCounts | RowPlan) -> Tensor:
    """Apply a function `compute(rows_RD, counts) -> rows_RD` to rows or to tokens. The output has
    the same shape as x.

    x: rows [R, D] if `rows` is a `RowCounts`, or tokens [T, D] if it is a `RowPlan`. Tokens are
    gathered into rows before the computation, and the output rows are combined afterwards.
    """
    if not isinstance(rows, RowPlan):
        return compute(x, rows)
    maps = rows.source_R, rows.position_TK, rows.complete
    return combine_rows(compute(gather_rows(x, *maps), rows.counts), rows.weights_TK, *maps)


def _ffn(matmul: GroupedMatmul, rows_RD: Tensor, counts: RowCounts, p: FFNParameters,
         elementwise: Callable[[Elementwise], Elementwise] = lambda f: f) -> Tensor:
    first = [(p.w_in_LDF, p.bias_in_LF)]
    if p.w_gate_LDF is not None:
        first.append((p.w_gate_LDF, p.bias_gate_LF))
    inner = _products(matmul, rows_RD, counts, first, p.adapters.get("in"))

    def out(inner_RF: Tensor) -> Tensor:
        if p.dropout:
            inner_RF = F.dropout(inner_RF, p.dropout)
        [out_RD] = _products(matmul, inner_RF, counts, [(p.w_out_LFD, p.bias_out_LD)],
                             p.adapters.get("out"))
        return out_RD if p.finish is None else p.finish(out_RD)

    act = elementwise(ACTIVATIONS[p.activation].value)

    def activate(inner_RF: Tensor, gate_RF: Tensor | None = None) -> Tensor:
        if gate_RF is None:
            return act(inner_RF)
        if p.own_gate is not None:
            return p.own_gate(gate_RF, inner_RF)
        return gated(act, gate_RF, inner_RF, p.clamp, p.linear_offset)

    if p.recompute:
        return through_recomputed(out, activate, *inner)
    return out(activate(*inner))


def _products(matmul: GroupedMatmul, rows_RI: Tensor, counts: RowCounts,
              maps: Sequence[tuple[Tensor, Tensor | None]], adapter: LowRank | None
              ) -> list[Tensor]:
    """Multiply the same rows by several weights, and add the bias of each weight to its product.

    If there is an adapter, two grouped matmuls apply it to all of these weights.
    """
    if adapter is None:
        return [matmul(rows_RI, counts, w, b) for w, b in maps]
    factors: Sequence[Tensor | None] = [None] * len(maps)
    if adapter.factor_LO is not None:
        factors = for_each_row(adapter.factor_LO, counts).chunk(len(maps), -1)
    low_RR = matmul(rows_RI, counts, adapter.a_LIR, None)
    more = matmul(low_RR, counts, adapter.b_LRO, None).chunk(len(maps), -1)
    outputs = []
    for (w, b), low, factor in zip(maps, more, factors, strict=True):
        if factor is None:
            outputs.append(matmul(rows_RI, counts, w, b) + low)
            continue
        # The bias is added after the factor, which scales only the weights and the adapter.
        scaled = (matmul(rows_RI, counts, w, None) + low) * factor
        outputs.append(scaled if b is None else scaled + for_each_row(b, counts))
    return outputs


def gated(act: Callable[[Tensor], Tensor], gate_RF: Tensor, inner_RF: Tensor, clamp: float = 0.0,
          offset: float = 0.0) -> Tensor:
    """Return `act(gate) * (inner + offset)`, [R, F].

    If `clamp` > 0, gate values are limited to at most `clamp`, and inner values are limited to the
    range from `-clamp` to `clamp`. Source: gpt-oss (OpenAI 2025), which uses quick_gelu, a clamp of
    7 and an offset of 1.
    """
    if clamp:
        gate_RF, inner_RF = gate_RF.clamp(max=clamp), inner_RF.clamp(-clamp, clamp)
    return act(gate_RF) * (inner_RF + offset if offset else inner_RF)


def loop(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """Compute one matmul per expert with torch's own autograd, which supports second derivatives.

    Args:
        rows_RI: rows [R, I], ordered by expert.
        counts: number of rows of each expert.
        w_LIO: weights [L, I, O] of the same floating-point dtype.
        b_LO: biases [L, O] of the same dtype, or None.
    Returns: The output rows [R, O].
    """
    # The backward of w[l] would allocate a gradient of the full stack for every expert.
    weights = w_LIO.unbind(0)
    groups = rows_RI.split(counts.host)
    if b_LO is None:
        return torch.cat([rows @ w for rows, w in zip(groups, weights, strict=True)])
    return torch.cat([
        torch.addmm(b, rows, w) for rows, w, b in zip(groups, weights, b_LO.unbind(0), strict=True)
    ])


def batched(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """Pad all experts to the largest number of rows and compute one batched matmul.

    This strategy is fastest for many small experts with an even load. The shapes and dtypes are the
    same as for `loop`.
    """
    longest = max(counts.host)
    # With equal loads the rows already form a batch and need no padding.
    if longest * len(counts.host) == counts.total:
        return _bmm(rows_RI.view(len(counts.host), longest, rows_RI.shape[1]), w_LIO,
                    b_LO).flatten(0, 1)
    slot_R = _padded_slots(counts, longest, rows_RI.device)
    padded_LCI = rows_RI.new_zeros(len(counts.host) * longest,
                                   rows_RI.shape[1]).index_copy(0, slot_R, rows_RI)
    out_LCO = _bmm(padded_LCI.view(len(counts.host), longest, rows_RI.shape[1]), w_LIO, b_LO)
    return out_LCO.flatten(0, 1).index_select(0, slot_R)


def grouped(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """Compute all experts in one launch of torch's grouped GEMM, which is fast on GPUs in bf16.

    The shapes and dtypes are the same as for `loop`. If the grouped GEMM does not support the
    operands, `loop` is used.
    """
    if grouped_refusal(rows_RI, w_LIO) is not None:
        return loop(rows_RI, counts, w_LIO, b_LO)
    lengths_L = counts.device(rows_RI.device)
    out_RO = F.grouped_mm(rows_RI, w_LIO, offs=lengths_L.cumsum(0).to(torch.int32))
    if b_LO is None:
        return out_RO
    return out_RO + for_each_row(b_LO, counts)


def for_each_row(values_LO: Tensor, counts: RowCounts) -> Tensor:
    """Return, for each row, the entry of `values_LO` that belongs to the row's expert, [R, O].
    Filler rows contain 0.
    """
    device = values_LO.device
    if not isinstance(counts, DeviceCounts):
        return values_LO.repeat_interleave(counts.device(device), dim=0, output_size=counts.total)
    groups = RowGroups(counts, device)
    # In filler rows neither a product nor its gradient is defined, so no bias may depend on them.
    real_R1 = torch.arange(counts.total, device=device)[:, None] < groups.ends_L[-1]
    return torch.where(real_R1, values_LO.index_select(0, groups.group_R), 0)


def grouped_refusal(rows_RI: Tensor, w_LIO: Tensor) -> str | None:
    """Return the reason why `grouped` uses `loop` for these operands, or None."""
    # torch up to 2.11 raises an error when asked about autocast on the meta device.
    if rows_RI.device.type != "meta" and torch.is_autocast_enabled(rows_RI.device.type):
        return "autocast"
    if rows_RI.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {rows_RI.dtype}"
    if rows_RI.device.type == "cuda" and rows_RI.dtype != torch.bfloat16:
        return f"dtype {rows_RI.dtype} on a GPU"
    # The grouped GEMM needs rows of weights that are multiples of 16 bytes.
    step = 16 // rows_RI.element_size()
    if w_LIO.shape[1] % step or w_LIO.shape[2] % step:
        return f"widths {tuple(w_LIO.shape[1:])}, which are not multiples of {step}"
    return "no rows" if rows_RI.shape[0] == 0 else None


_NO_GROUPED = "torch has no grouped_mm: needs torch >= 2.10"
HAS_GROUPED = hasattr(F, "grouped_mm")
strategies.register("loop")(from_matmul(loop, keeps_rows=True))
strategies.register("batched")(from_matmul(batched))
strategies.register("grouped", why_not=lambda: None if HAS_GROUPED else _NO_GROUPED,
                    optional=True)(from_matmul(grouped, keeps_rows=True))


def is_stepwise(strategy: Strategy) -> bool:
    """Return true if the strategy uses torch operations and supports dropout, clamp and offset.

    `stepwise_strategy` always returns such a strategy.
    """
    return strategy in _STEPWISE


def stepwise_strategy() -> Strategy:
    """Return a strategy with dropout, clamp and offset: `grouped` or, if unavailable, `batched`."""
    return strategies.get("grouped" if HAS_GROUPED else "batched")


def _bmm(x_LCI: Tensor, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    if b_LO is None:
        return torch.bmm(x_LCI, w_LIO)
    return torch.baddbmm(b_LO[:, None, :], x_LCI, w_LIO)


def _padded_slots(counts: RowCounts, longest: int, device: torch.device) -> Tensor:
    lengths_L = RowCounts(counts.host).device(device)
    first_L = torch.arange(len(counts.host), device=device) * longest
    shift_L = first_L - (lengths_L.cumsum(0) - lengths_L)
    return torch.arange(counts.total, device=device) + shift_L.repeat_interleave(
        lengths_L, output_size=counts.total)
