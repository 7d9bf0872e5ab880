"""Backward through experts whose weights are not kept: they are fetched again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_plugin.memory.experts.rows import counts_of, parts, with_counts
from moe_plugin.records import ExpertRows, RowCounts, RowPlan

if TYPE_CHECKING:
    from moe_plugin.memory.experts.stored import StoredExperts


class Refetched(torch.autograd.Function):
    """Experts' rows; in backward their weights are fetched, and the result computed, again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates_TK: Tensor | None, experts: StoredExperts,
                work: ExpertRows, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, gates_TK)
        device = x.device.type
        ctx.autocast = {"device_type": device, "enabled": torch.is_autocast_enabled(device),
                        "dtype": torch.get_autocast_dtype(device)}
        ctx.experts, ctx.rows, ctx.strategy = experts, work.rows, work.strategy
        ctx.like = parameters
        if isinstance(ctx.rows, RowPlan):
            ctx.rows = dataclasses.replace(ctx.rows, weights_TK=None)
        return experts.compute(work)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, gates_TK), experts, rows = ctx.saved_tensors, ctx.experts, ctx.rows
        counts = counts_of(rows)
        active = [expert for expert, n in enumerate(counts) if n]
        wanted = ctx.needs_input_grad
        sums = [torch.zeros_like(p) if needed else None
                for p, needed in zip(ctx.like, wanted[4:], strict=True)]
        names = list(experts.shapes)
        call = partial(_gradients, ctx, names=names, sums=sums)
        room = experts.store.room(len(active))
        if not active:
            grad_x = torch.zeros_like(x)
            grad_gates = None if gates_TK is None else torch.zeros_like(gates_TK)
        elif len(active) <= room:
            grad_x, grad_gates = call(x, gates_TK, grad, active=active,
                                      rows=with_counts(rows, [counts[e] for e in active]))
        else:  # rows, not tokens
            both = zip(parts(x, rows, room), parts(grad, rows, room), strict=True)
            grad_x, grad_gates = torch.cat([
                call(x_RD, None, grad_RD, rows=RowCounts([part.host[e] for e in chosen]),
                     active=chosen)[0]
                for (x_RD, part, chosen), (grad_RD, _, _) in both]), None
        if experts.training:
            experts.store.forget()  # an optimizer's step comes next
        return (grad_x if wanted[0] else None, grad_gates if wanted[1] else None, None, None, *sums)


def _gradients(ctx: Any, x: Tensor, gates_TK: Tensor | None, grad: Tensor, *,
               rows: RowCounts | RowPlan, active: Sequence[int], names: Sequence[str],
               sums: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Of x and gates; those of active experts' parameters are put into `sums`."""
    experts: StoredExperts = ctx.experts
    with experts.fetched(active) as tensors, torch.enable_grad(), torch.autocast(**ctx.autocast):
        x = x.detach().requires_grad_()
        inputs = [x]
        if gates_TK is not None:
            gates_TK = gates_TK.detach().requires_grad_()
            rows = dataclasses.replace(rows, weights_TK=gates_TK)
            inputs.append(gates_TK)
        leaves = [tensors[name].requires_grad_() for name in names if sums]
        y = experts.call(x, rows, experts.template.compute_parameters(
            dict(zip(names, leaves, strict=False)) or tensors), ctx.strategy)
    found = torch.autograd.grad(y, inputs + leaves, grad, allow_unused=True)
    for total, part in zip(sums, found[len(inputs):], strict=True):
        if total is not None and part is not None:
            total[list(active)] = part.to(total.device, total.dtype)
    return found[0], found[1] if gates_TK is not None else None
