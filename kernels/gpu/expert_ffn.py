# ruff: noqa: UP006, UP035, UP045  (torch.library reads List and Optional)
"""The strategy `kernels` for GPUs: grouped matmul kernels that gather rows while loading them.

Forward computes `h = x[token] @ w_in` and `a = act(h)` in one kernel, and `rows = a @ w_out` in the
next kernel. The output y is the weighted sum of each token's rows. Forward saves x and h (and
`gate` for gated experts) for backward. In backward, one kernel multiplies the output gradient by
w_out^T, propagates it through the activation, and recomputes `a`. The same kernel computes the gate
gradients as row-wise dot products, so the output rows need not be saved.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, List, Optional

import torch
from torch import Tensor, nn

from moe_plugin.kernels.activations import first_derivative_only
from moe_plugin.kernels.block_products import ROUNDED, products_for
from moe_plugin.kernels.choices import tokens_of_rows
from moe_plugin.kernels.expert_ffn import FFNParameters, strategies
from moe_plugin.kernels.expert_matmul import expert_bias_grad
from moe_plugin.kernels.groups import RowGroups
from moe_plugin.kernels.registry import accumulate_dtype
from moe_plugin.kernels.rounded import RoundedCall, rounded_call
from moe_plugin.kernels.rows import sum_rows, take_values
from moe_plugin.kernels.saved import KeptRows
from moe_plugin.kernels.weight_grads import WEIGHTS, GradSums, LaterGrads, RowWeightGrads
from moe_plugin.records import DeviceCounts, RowCounts, RowPlan


@strategies.register("kernels")
def kernel_ffn(x: Tensor, rows: RowCounts | RowPlan, parameters: FFNParameters) -> Tensor:
    """A strategy whose GPU kernels also gather rows, apply the activation and compute gate
    gradients.

    x: rows [R, D] or tokens [T, D]. The output has the same shape and dtype as `x`; see `Strategy`.
    On other devices, the reference implementations of these kernels in torch are used.
    """
    p, plan = parameters, rows if isinstance(rows, RowPlan) else None
    counts = rows.counts if isinstance(rows, RowPlan) else rows
    x, tensors, redirected = p.operands(x)
    autocast = torch.is_autocast_enabled(x.device.type)
    maps = (None, None, None) if plan is None else (plan.weights_TK, plan.source_R,
                                                    plan.position_TK)
    with torch.autocast(x.device.type, enabled=False):
        rounded, traced = None, _traced(x)
        if p.precision in ROUNDED and not traced:
            rounded = rounded_call(
                ROUNDED[p.precision], p.rounded,
                {n: p.main_grad_weights.get(n, getattr(p, n)) for n in WEIGHTS},
                dict(zip(WEIGHTS, tensors[::2], strict=True)))
        if traced and not redirected:
            lengths = (None, counts.lengths_L) if isinstance(counts, DeviceCounts) else (
                counts.host, None)
            made = expert_ffn if lengths[0] is None or counts.even else expert_ffn_uneven
            return made(x, *maps, *tensors, *lengths, p.activation, p.precision)[0]
        # Under autocast each call casts the weights separately, so gradients cannot be shared.
        own = p.sums is None or autocast
        sums = GradSums() if own else p.sums
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in
                                           (x, maps[0], *tensors)):
            sums.calls += 1
        # Calls that share `sums` are pieces, and their exchanges run at the same time.
        groups = RowGroups(counts, x.device, p.sums is not None, p.schedule)
        later = p.later
        if later is not None:
            later = None if autocast or rounded is not None else p.leaving(x, maps[0])
        call = _Call(groups, p.activation, p.precision, redirected, sums, rounded, later)
        if later is not None:
            tensors, call.wanted[:] = later.cut_off(tensors)
        if p.keep is not None and plan is None and isinstance(counts, DeviceCounts):
            keep = functools.partial(p.keep, lengths_L=counts.lengths_L)
            return _Stashed.apply(keep, call, x, *maps, *tensors)
        return _Direct.apply(call, x, *maps, *tensors)


def _traced(x: Tensor) -> bool:
    """Return true if the call is only traced: under torch.compile, or with fake or meta tensors."""
    return torch.compiler.is_compiling() or x.is_meta or type(x) not in (Tensor, nn.Parameter)


@dataclass(frozen=True)
class _Call:
    """The non-tensor data shared by the forward and backward pass of a call; see `FFNParameters`.

      later: object that collects postponed weight gradients, or None if they
    cannot be postponed. wanted: see `LaterGrads.cut_off`.
    """

    groups: RowGroups
    activation: str
    precision: str
    main_grad_weights: Mapping[str, Tensor]
    sums: GradSums
    rounded: RoundedCall | None
    later: LaterGrads | None = None
    wanted: list[bool] = field(default_factory=list)


# One operation for torch, so that torch.compile knows shapes and gradient without a graph break.
# Its arguments are only tensors and numbers, so its backward computes the tables of tiles again.
def _expert_ffn(x: Tensor, gates_TK: Optional[Tensor], source_R: Optional[Tensor],
                position_TK: Optional[Tensor], w_in: Tensor, b_in: Optional[Tensor],
                w_gate: Optional[Tensor], b_gate: Optional[Tensor], w_out: Tensor,
                b_out: Optional[Tensor], counts: Optional[Sequence[int]],
                lengths_L: Optional[Tensor], activation: str, precision: str) -> List[Tensor]:
    """Compute feed-forward experts and return [y, h, gate]. The operation supports autograd.

    Args:
        x: tokens [T, D], or rows [R, D] if `source_R` and `position_TK` are None.
        gates_TK: gate weights of the choices in float32 or float64, or None if all weights are 1.
        w_in, w_gate, w_out: weights [L, D, F], [L, D, F] and [L, F, D], in the dtype of x.
        b_in, b_gate, b_out: biases [L, F], [L, F] and [L, D], in the dtype of x.
        counts: number of rows of each expert, or None if known only on the device.
        lengths_L: number of rows of each expert, int64 [L]. Ignored if `counts` is given.
    Returns: y with the shape of x, and the tensors h and gate [R, F] for backward (without gating,
    gate is empty).
    """
    return _forward(_groups(counts, lengths_L, x, source_R), x, gates_TK, source_R, position_TK,
                    w_in, b_in, w_gate, b_gate, w_out, b_out, activation, precision)


def _groups(counts: Sequence[int] | None, lengths_L: Tensor | None, x: Tensor,
            source_R: Tensor | None) -> RowGroups:
    if lengths_L is None:
        assert counts is not None
        return RowGroups(RowCounts(list(counts)), x.device)
    total = (x if source_R is None else source_R).shape[0]
    return RowGroups(DeviceCounts(lengths_L, total), x.device)


def _forward(groups: RowGroups, x: Tensor, gates_TK: Tensor | None, source_R: Tensor | None,
             position_TK: Tensor | None, w_in: Tensor, b_in: Tensor | None, w_gate: Tensor | None,
             b_gate: Tensor | None, w_out: Tensor, b_out: Tensor | None, activation: str,
             precision: str, rounded: RoundedCall | None = None) -> list[Tensor]:
    x = x.contiguous()
    w_in, w_gate, w_out = _factors(rounded, w_in, w_gate, w_out)
    token_R, products = tokens_of_rows(source_R, position_TK), products_for(precision)
    if w_gate is None:
        h_RF, a_RF = products.act(x, groups, w_in, b_in, token_R, activation, precision)
        gate_RF = x.new_empty(0)
    else:
        h_RF, gate_RF, a_RF = products.gated(x, groups, w_in, b_in, w_gate, b_gate, token_R,
                                             activation, precision)
    rows_RD = products.plain(a_RF, groups, w_out, b_out, None, precision)
    y = rows_RD if position_TK is None else sum_rows(rows_RD, position_TK, gates_TK)
    return [y, h_RF, gate_RF]


def _factors(rounded: RoundedCall | None, *weights: Tensor | None) -> tuple[Any, ...]:
    """Return the matmul operands that replace w_in, w_gate and w_out, such as rounded weights."""
    if rounded is None:
        return weights
    return tuple(rounded.weights.get(name) for name in WEIGHTS)


def _fake(x: Tensor, gates_TK: Any, source_R: Any, position_TK: Any, w_in: Tensor, b_in: Any,
          w_gate: Any, b_gate: Any, w_out: Tensor, b_out: Any, counts: Any,
          lengths_L: Any, activation: str, precision: str) -> list[Tensor]:
    rows = sum(counts) if lengths_L is None else (x if source_R is None else source_R).shape[0]
    h_RF = x.new_empty(rows, w_in.shape[2])
    return [
        x.new_empty(x.shape), h_RF,
        x.new_empty(0) if w_gate is None else torch.empty_like(h_RF)
    ]


def _expert_ffn_backward(grad_y: Tensor, x: Tensor, gates_TK: Optional[Tensor],
                         source_R: Optional[Tensor], position_TK: Optional[Tensor], h_RF: Tensor,
                         gate_RF: Tensor, w_in: Tensor, w_gate: Optional[Tensor], w_out: Tensor,
                         b_out: Optional[Tensor], counts: Optional[Sequence[int]],
                         lengths_L: Optional[Tensor], activation: str, precision: str,
                         needs: Sequence[bool]) -> List[Tensor]:
    """Compute the gradients of x, gates, w_in, b_in, w_gate, b_gate, w_out and b_out.

    Args:
        grad_y: gradient with respect to the output y. For the other arguments, see `expert_ffn`.
        needs: eight booleans that state which of these gradients are needed. Gradients that are not
            needed are returned as empty tensors.
    """
    made = _gradients(_groups(counts, lengths_L, x, source_R), grad_y, x, gates_TK, source_R,
                      position_TK, h_RF, gate_RF, w_in, w_gate, w_out, b_out, activation, precision,
                      needs, {}, GradSums(1))
    return [x.new_empty(0) if g is None else g for g in made]


def _gradients(groups: RowGroups, grad_y: Tensor, x: Tensor, gates_TK: Tensor | None,
               source_R: Tensor | None, position_TK: Tensor | None, h_RF: Tensor, gate_RF: Tensor,
               w_in: Tensor, w_gate: Tensor | None, w_out: Tensor, b_out: Tensor | None,
               activation: str, precision: str, needs: Sequence[bool],
               main_grad_weights: Mapping[str, Tensor], sums: GradSums,
               rounded: RoundedCall | None = None,
               later: LaterGrads | None = None) -> list[Tensor | None]:
    """Compute the gradients like `expert_ffn_backward`, but with None for unneeded gradients.

    Gradients of parameters with a `main_grad` are added to `main_grad`. If several calls share
    `sums`, only the last call returns weight gradients. later: object that collects weight
    gradients, or None.
    """
    w_in, w_gate, w_out = _factors(rounded, w_in, w_gate, w_out)
    token_R = tokens_of_rows(source_R, position_TK)
    x, grad_y, gate = x.contiguous(), grad_y.contiguous(), None if w_gate is None else gate_RF
    scale_R = None
    if gates_TK is not None:
        gates_N = gates_TK.reshape(-1).to(accumulate_dtype(grad_y.dtype))
        scale_R = take_values(gates_N[None], source_R)
    g_h, g_gate, scaled_RF, dots_CR = products_for(precision).act_backward(
        grad_y, groups, w_out, h_RF, gate, scale_R, token_R, activation, precision)
    rounded_products = ROUNDED.get(precision)
    weights = RowWeightGrads(groups, "ieee" if rounded_products else precision, rounded_products,
                             main_grad_weights, sums)
    first = functools.partial(weights.first, x, token_R, g_h if needs[2] else None,
                              g_gate if needs[4] else None)

    def last() -> Tensor | None:
        return weights.one("w_out_LFD", scaled_RF, grad_y, None, token_R) if needs[6] else None

    if later is not None:
        later.add(lambda: dict(zip(WEIGHTS, (*first(), last()), strict=True)))
    grad_in, grad_gate = first() if later is None else (None, None)
    return [
        _grad_x(groups, g_h, g_gate, w_in, w_gate, position_TK, precision) if needs[0] else None,
        _grad_gates(groups, dots_CR, grad_y, b_out, token_R, position_TK).to(gates_TK.dtype)
        if needs[1] and gates_TK is not None else None,
        grad_in,
        expert_bias_grad(g_h, groups, None, None) if needs[3] else None,
        grad_gate,
        expert_bias_grad(g_gate, groups, None, None) if needs[5] else None,
        last() if later is None else None,
        expert_bias_grad(grad_y, groups, token_R, scale_R) if needs[7] else None,
    ]


def _fake_backward(grad_y: Tensor, x: Tensor, gates_TK: Any, source_R: Any, position_TK: Any,
                   h_RF: Tensor, gate_RF: Tensor, w_in: Tensor, w_gate: Any, w_out: Tensor,
                   b_out: Any, counts: Sequence[int] | None, lengths_L: Any, activation: str,
                   precision: str, needs: Sequence[bool]) -> list[Tensor]:
    groups, width, inner = w_in.shape
    shapes = [
        tuple(x.shape), None, (groups, width, inner), (groups, inner), (groups, width, inner),
        (groups, inner), (groups, inner, width), (groups, width)
    ]
    made = [
        x.new_empty(shape) if need and shape is not None else x.new_empty(0)
        for shape, need in zip(shapes, needs, strict=True)
    ]
    if needs[1]:
        made[1] = torch.empty_like(gates_TK)
    return made


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *operands, counts, lengths_L, activation, precision = inputs
    ctx.counts, ctx.activation, ctx.precision = counts, activation, precision
    ctx.save_for_backward(*_kept(operands, output), lengths_L)


def _kept(operands: Sequence[Tensor | None], output: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the tensors that forward saves for backward; see `_gradients`."""
    x, gates_TK, source_R, position_TK, w_in, _, w_gate, _, w_out, b_out = operands
    return (x, gates_TK, source_R, position_TK, output[1], output[2], w_in, w_gate, w_out, b_out)


def _backward(backward: Any, ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 4, 5, 6, 7, 8, 9)]
    *saved, lengths_L = ctx.saved_tensors
    made = backward(grads[0], *saved, ctx.counts, lengths_L, ctx.activation, ctx.precision, needed)
    x, gates, *rest = [g if need else None for g, need in zip(made, needed, strict=True)]
    return x, gates, None, None, *rest, None, None, None, None


def _operation(suffix: str, **options: Any) -> Any:
    define: Any = functools.partial(torch.library.custom_op, mutates_args=(), **options)
    forward = define(f"moe_plugin::expert_ffn{suffix}", _expert_ffn)
    backward = define(f"moe_plugin::expert_ffn_backward{suffix}", _expert_ffn_backward)
    forward.register_fake(_fake)
    backward.register_fake(_fake_backward)
    forward.register_autograd(functools.partial(_backward, backward), setup_context=_setup)
    return forward


def _not_captured() -> dict[str, Any]:
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    return {} if tag is None else {"tags": (tag,)}


expert_ffn = _operation("")
# Counts of the host are copied to the device from temporary memory, which a replayed CUDA graph
# cannot read. The tag excludes the operation from CUDA graphs of mode reduce-overhead. Without the
# tag, such a capture ends with the error of `machine.to_device`.
expert_ffn_uneven = _operation("_uneven", **_not_captured())


class _Direct(torch.autograd.Function):
    """An autograd function that computes `expert_ffn` for real tensors.

    This function is not a torch operation, because its backward may write to buffers such as
    `main_grad`.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *operands: Any) -> Tensor:
        settings: tuple[Any, ...] = call.activation, call.precision, call.rounded
        output = _forward(call.groups, *(*operands, *settings))
        ctx.call = call
        ctx.save_for_backward(*_kept(operands, output))
        return output[0]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        needed = [ctx.needs_input_grad[i] for i in (1, 2, 5, 6, 7, 8, 9, 10)]
        if call.later is not None:
            needed[2::2] = call.wanted
        x, gates, *rest = _gradients(
            call.groups, grad_y, *(
                *ctx.saved_tensors, call.activation, call.precision, needed,
                call.main_grad_weights, call.sums, call.rounded, call.later))
        if call.rounded is not None:
            call.rounded.spent()
        return None, x, gates, None, None, *rest


class _Saved:
    """A replacement for an autograd context, with the tensors that `_Direct` saves."""

    call: _Call
    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


class _Stashed(torch.autograd.Function):
    """An autograd function like `_Direct`, for rows that are stored with `keep`."""

    @staticmethod
    def forward(ctx: Any, keep: Callable[[Tensor], KeptRows], call: _Call,
                *operands: Any) -> Tensor:
        ctx.inner = _Saved()
        y = _Direct.forward(ctx.inner, call, *operands)
        saved, ctx.inner.saved_tensors = ctx.inner.saved_tensors, ()
        # the input, and the values before the activation
        rows = [each for each in (saved[0], saved[4], saved[5]) if each.numel()]

        def stand_in(saved: Tensor | None) -> Tensor | None:
            if saved is None or not any(saved is one for one in rows):
                return saved
            # An attribute of a saved tensor is freed with it; one of the context would live longer.
            token: Any = saved.new_empty(0)
            token.kept = keep(saved)
            return token

        ctx.save_for_backward(*map(stand_in, saved))
        ctx.rows = tuple(any(saved_one is one for one in rows) for saved_one in saved)
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        inner = copy.copy(ctx.inner)
        inner.saved_tensors = tuple(
            saved.kept.rows() if kept else saved
            for saved, kept in zip(ctx.saved_tensors, ctx.rows, strict=True))
        inner.needs_input_grad = ctx.needs_input_grad[1:]
        return None, *_Direct.backward(inner, grad_y)


def _grad_x(groups: RowGroups, g_h: Tensor, g_gate: Tensor | None, w_in: Tensor,
            w_gate: Tensor | None, position_TK: Tensor | None, precision: str) -> Tensor:
    w_in = w_in.transpose(1, 2)
    if w_gate is None or g_gate is None:
        rows_RD = products_for(precision).back(g_h, groups, w_in, None, None, precision)
    else:
        rows_RD = products_for(precision).sum(g_h, g_gate, groups, w_in, w_gate.transpose(1, 2),
                                           precision)
    return rows_RD if position_TK is None else sum_rows(rows_RD, position_TK, None)


def _grad_gates(groups: RowGroups, dots_CR: Tensor, grad_y: Tensor, b_out: Tensor | None,
                token_R: Tensor | None, position_TK: Tensor | None) -> Tensor:
    """Return the gradient of each choice's gate: `<u, a>` plus the contribution of the bias."""
    assert token_R is not None and position_TK is not None
    if b_out is not None and grad_y.shape[0] and dots_CR.numel():
        share_TL = grad_y.to(dots_CR.dtype) @ b_out.to(dots_CR.dtype).t()
        dots_CR = torch.cat([dots_CR, share_TL[token_R.clamp(min=0), groups.group_R][None]])
    return take_values(dots_CR, position_TK)
