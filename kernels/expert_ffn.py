"""Strategies to compute a rank's feed-forward experts, by name; those in torch are defined here.

A strategy is `(x, rows, parameters) -> y`, differentiable, y in x's shape and dtype. With a
`RowCounts`, x is [R, D] rows, expert after expert. With a `RowPlan`, x is [T, D] tokens, and y each
token's rows weighted and summed; strategies that gather and combine inside their kernels save the
copies. Experts without rows get zero gradients, not missing ones.

`cpu.expert_ffn` and `gpu.expert_ffn` define the strategies `fused` and `kernels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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
    """An adapter on the weights w of L experts, which compute with (w + a b) factor.

    Attributes:
        a_LIR, b_LRO: [L, I, R], [L, R, O].
        factor_LO: [L, O]; None: 1.
    """

    a_LIR: Tensor
    b_LRO: Tensor
    factor_LO: Tensor | None

    def to(self, dtype: torch.dtype) -> LowRank:
        """In another dtype."""
        return LowRank(*(value if value is None else value.to(dtype) for value in self))


@dataclass(frozen=True)
class FFNParameters:
    """Parameters of L experts as `FFNExperts` stores them, and how to compute with them.

    Attributes:
        w_in_LDF, w_gate_LDF: [L, D, F], bias_in_LF, bias_gate_LF: [L, F], w_out_LFD: [L, F, D],
            bias_out_LD: [L, D] (all D columns also where experts are cut); of one floating-point
            dtype. Plain experts have no gate.
        activation: a name in `ACTIVATIONS`.
        memory: for large temporaries.
        choice: how strategy `auto` chooses, see `experts.compute_selection`.
        main_grad_weights: by field name, the parameters whose gradient the host keeps in
            `main_grad`. A strategy that uses the fields need not know: `redirect_grad` adds the
            gradients. One that computes with `operands()` must add these gradients itself, see
            `kernels.weight_grads`.
        dropout: probability with which a value after the activation becomes 0.
        clamp, linear_offset: of gated experts, see `gated`. Only strategies for which `is_stepwise`
            is true read these three.
        recompute: keep the values before the activation for backward, and not those after it
            (with dropout, what it leaves is kept).
        schedule: of strategy `kernels`, one of `kernels.groups.SCHEDULES`.
        keep: keeps rows whose numbers the device alone knows; the strategies of `KEEPS_ROWS`
            use it. None: autograd keeps them.
        sums: of the calls that share these parameters in one pass; a strategy may add up their
            weight gradients there instead of returning one for each. None: this call is alone.
        precision: of the products of strategy `kernels`, see `experts.precision`; other
            strategies compute as torch is set to.
        rounded: of the module whose weights these are, where precision rounds them; None: a call
            makes its own.
        adapters: of the same experts, "in" (of w_in and w_gate, whose outputs lie side by side)
            and "out"; only strategies of `from_matmul` read them.
        later: where strategies `fused` and `kernels` leave the weights' gradients in exact
            precisions, in the place of computing them in backward; others compute them there.
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

    def leaving(self, *inputs: Tensor | None) -> LaterGrads | None:
        """Where a call with these rows and gates leaves its weights' gradients; None: nowhere.
        Without a gradient of its inputs nothing waits, and autograd would not see the call.
        """
        wanted = any(x is not None and x.requires_grad for x in inputs)
        return self.later if wanted and torch.is_grad_enabled() else None

    def operands(self, x: Tensor) -> tuple[list[Tensor | None], Mapping[str, Tensor]]:
        """Inputs of one autograd function, and the `main_grad_weights` among them.

        x: [R, D] or [T, D]. Inputs: [x, w_in, b_in, w_gate, b_gate, w_out, b_out]. Under autocast
        all are in its dtype (float64 stays), and no gradient is left to the function: the fields
        are used, which redirect it themselves.
        """
        fields = [x, self.w_in_LDF, self.bias_in_LF, self.w_gate_LDF, self.bias_gate_LF,
                  self.w_out_LFD, self.bias_out_LD]
        if not torch.is_autocast_enabled(x.device.type):
            for name in self.main_grad_weights:
                fields[1 + OPERANDS.index(name)] = self.main_grad_weights[name]
            return fields, self.main_grad_weights
        dtype = torch.get_autocast_dtype(x.device.type)
        return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in fields], {}


GroupedMatmul = Callable[[Tensor, RowCounts, Tensor, "Tensor | None"], Tensor]
Elementwise = Callable[[Tensor], Tensor]
Strategy = Callable[[Tensor, "RowCounts | RowPlan", FFNParameters], Tensor]
strategies: Registry[Strategy] = Registry("expert_compute")
_STEPWISE: list[Strategy] = []  # of `from_matmul`
# those that use `FFNParameters.keep`. Not `batched`, which keeps padded copies in which rows lie
# elsewhere, nor `fused`, which keeps what it needs in the CPU's reusable memory
KEEPS_ROWS = ("auto", "kernels", "grouped", "loop")


def from_matmul(matmul: GroupedMatmul, keeps_rows: bool = False,
                elementwise: Callable[[Elementwise], Elementwise] = lambda f: f) -> Strategy:
    """A strategy from a grouped matmul `(rows_RI, counts, w_LIO, b_LO or None) -> rows_RO`.

    The rows of expert l are multiplied by matrix l, and its bias is added. keeps_rows: whatever
    autograd saves in it has its rows in the order of `rows_RI`, so that they can be kept elsewhere.
    elementwise: what to compute in place of an activation.
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
    """`_ffn` whose rows `p.keep` keeps."""
    if torch.is_autocast_enabled(x.device.type):
        # casts that autocast makes would be saved, and could be as large as rows
        (x, *tensors), _ = p.operands(x)
        adapters = {name: adapter.to(x.dtype) for name, adapter in p.adapters.items()}
        p = replace(p, **dict(zip(OPERANDS, tensors, strict=True)), adapters=adapters)
    x = x.contiguous()
    widths = p.w_in_LDF.shape[1:]
    keep = functools.partial(p.keep, lengths_L=counts.lengths_L)
    with torch.autocast(x.device.type, enabled=False), rows_kept(
            keep, x, widths, [*(getattr(p, name) for name in OPERANDS),
                              *(value for adapter in p.adapters.values() for value in adapter)]):
        return _ffn(matmul, x, counts, p)


def apply_to_rows(compute: Callable[[Tensor, RowCounts], Tensor], x: Tensor,
                  rows: RowCounts | RowPlan) -> Tensor:
    """`compute(rows_RD, counts) -> rows_RD` on work in either form; returns x's shape.

    x: [R, D] rows with `RowCounts`; with a `RowPlan` [T, D] tokens, whose rows are gathered before
    and combined after.
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
        return out_RD

    act = elementwise(ACTIVATIONS[p.activation].value)

    def activate(inner_RF: Tensor, gate_RF: Tensor | None = None) -> Tensor:
        if gate_RF is None:
            return act(inner_RF)
        return gated(act, gate_RF, inner_RF, p.clamp, p.linear_offset)

    if p.recompute:
        return through_recomputed(out, activate, *inner)
    return out(activate(*inner))


def _products(matmul: GroupedMatmul, rows_RI: Tensor, counts: RowCounts,
              maps: Sequence[tuple[Tensor, Tensor | None]], adapter: LowRank | None
              ) -> list[Tensor]:
    """Of the same rows and each of some weights and biases; what an adapter adds to all of them
    takes two grouped products.
    """
    if adapter is None:
        return [matmul(rows_RI, counts, w, b) for w, b in maps]
    factors = [None] * len(maps)
    if adapter.factor_LO is not None:
        factors = _for_each_row(adapter.factor_LO, counts).chunk(len(maps), -1)
    low_RR = matmul(rows_RI, counts, adapter.a_LIR, None)
    more = matmul(low_RR, counts, adapter.b_LRO, None).chunk(len(maps), -1)
    made = []
    for (w, b), low, factor in zip(maps, more, factors, strict=True):
        if factor is None:
            made.append(matmul(rows_RI, counts, w, b) + low)
            continue
        scaled = (matmul(rows_RI, counts, w, None) + low) * factor
        made.append(scaled if b is None else scaled + _for_each_row(b, counts))
    return made


def gated(act: Callable[[Tensor], Tensor], gate_RF: Tensor, inner_RF: Tensor, clamp: float = 0.0,
          offset: float = 0.0) -> Tensor:
    """act(gate) * (inner + offset), [R, F]; with `clamp` > 0 of min(gate, clamp) and of inner in
    -clamp..clamp. Source: gpt-oss (OpenAI 2025), with quick_gelu, 7 and 1.
    """
    if clamp:
        gate_RF, inner_RF = gate_RF.clamp(max=clamp), inner_RF.clamp(-clamp, clamp)
    return act(gate_RF) * (inner_RF + offset if offset else inner_RF)


def loop(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """One matmul per expert, with torch's own autograd; can be differentiated twice.

    Args:
        rows_RI: [R, I], expert after expert.
        w_LIO: [L, I, O].
        b_LO: [L, O] or None. Returns [R, O]. All of one floating-point dtype.
    """
    # unbind, not w[l]: indexing would make a gradient of the full stack for every expert
    weights = w_LIO.unbind(0)
    groups = rows_RI.split(counts.host)
    if b_LO is None:
        return torch.cat([rows @ w for rows, w in zip(groups, weights, strict=True)])
    return torch.cat([
        torch.addmm(b, rows, w) for rows, w, b in zip(groups, weights, b_LO.unbind(0), strict=True)
    ])


def batched(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """One batched matmul over experts padded to the largest load.

    Best for many small experts of even load. Shapes and dtypes: see `loop`.
    """
    longest = max(counts.host)
    if longest * len(counts.host) == counts.total:
        return _bmm(rows_RI.view(len(counts.host), longest, rows_RI.shape[1]), w_LIO,
                    b_LO).flatten(0, 1)
    slot_R = _padded_slots(counts, longest, rows_RI.device)
    padded_LCI = rows_RI.new_zeros(len(counts.host) * longest,
                                   rows_RI.shape[1]).index_copy(0, slot_R, rows_RI)
    out_LCO = _bmm(padded_LCI.view(len(counts.host), longest, rows_RI.shape[1]), w_LIO, b_LO)
    return out_LCO.flatten(0, 1).index_select(0, slot_R)


def grouped(rows_RI: Tensor, counts: RowCounts, w_LIO: Tensor, b_LO: Tensor | None) -> Tensor:
    """torch's grouped GEMM in one launch; good on GPU in bf16.

    Shapes and dtypes: see `loop`, which computes those that the grouped GEMM does not support.
    """
    if grouped_refusal(rows_RI, w_LIO) is not None:
        return loop(rows_RI, counts, w_LIO, b_LO)
    lengths_L = counts.device(rows_RI.device)
    out_RO = F.grouped_mm(rows_RI, w_LIO, offs=lengths_L.cumsum(0).to(torch.int32))
    if b_LO is None:
        return out_RO
    return out_RO + _for_each_row(b_LO, counts)


def _for_each_row(values_LO: Tensor, counts: RowCounts) -> Tensor:
    """[R, O]: what belongs to the expert of each row; 0 in filler."""
    device = values_LO.device
    if not isinstance(counts, DeviceCounts):
        return values_LO.repeat_interleave(counts.device(device), dim=0, output_size=counts.total)
    groups = RowGroups(counts, device)
    # neither a product nor its gradient is defined in filler: no bias may see them
    real_R1 = torch.arange(counts.total, device=device)[:, None] < groups.ends_L[-1]
    return torch.where(real_R1, values_LO.index_select(0, groups.group_R), 0)


def grouped_refusal(rows_RI: Tensor, w_LIO: Tensor) -> str | None:
    """Why `grouped` passes rows_RI [R, I] and w_LIO [L, I, O] to `loop`; None where it does not."""
    # meta has no autocast, which torch up to 2.11 says by an error
    if rows_RI.device.type != "meta" and torch.is_autocast_enabled(rows_RI.device.type):
        return "autocast"
    if rows_RI.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {rows_RI.dtype}"
    if rows_RI.device.type == "cuda" and rows_RI.dtype != torch.bfloat16:
        return f"dtype {rows_RI.dtype} on a GPU"
    step = 16 // rows_RI.element_size()
    if w_LIO.shape[1] % step or w_LIO.shape[2] % step:
        return f"widths {tuple(w_LIO.shape[1:])}, which are not multiples of {step}"
    return "no rows" if rows_RI.shape[0] == 0 else None


_NO_GROUPED = "torch has no grouped_mm: needs torch >= 2.10"
# new in torch 2.10
_HAS_GROUPED = hasattr(F, "grouped_mm")
strategies.register("loop")(from_matmul(loop, keeps_rows=True))
strategies.register("batched")(from_matmul(batched))
strategies.register("grouped", why_not=lambda: None
                    if _HAS_GROUPED else _NO_GROUPED)(from_matmul(grouped, keeps_rows=True))


def is_stepwise(strategy: Strategy) -> bool:
    """Whether a strategy computes in steps of torch, and so follows dropout, clamp and offset of
    `FFNParameters`; `stepwise_strategy` is one that does.
    """
    return strategy in _STEPWISE


def stepwise_strategy() -> Strategy:
    """The strategy in place of one that does not: torch's grouped GEMM, or a loop."""
    return strategies.get("grouped" if _HAS_GROUPED else "batched")


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
