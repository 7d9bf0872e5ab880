"""What a call keeps for its backward pass, in bytes, counted from what autograd saves; the table of
docs/activations.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_plugin.experts import strategies
from moe_plugin.records import RowPlan
from tests.experts.problems import parameters, problem
from tests.kernels.problems import Shape

pytestmark = pytest.mark.fast
SHAPE = Shape(tokens=64, width=48, experts=4, top_k=2, inner=32)
D, F, K = SHAPE.width, SHAPE.inner, SHAPE.top_k
GATES, MAPS = 4 * K, 16 * K  # float32; where each row is from and goes, int64
# by strategy, `recompute_activation`: bytes per token of a gated expert in bfloat16
KEPT: dict[tuple[str, bool], int] = {
    ("kernels", False): 2 * D + 4 * K * F,  # as SonicMoE: tokens, values before the activation
    ("fused", False): 2 * D + 4 * K * F,
    ("grouped", True): 4 * K * F + 4 * K * D,  # instead of the tokens their rows, and results
    ("grouped", False): 8 * K * F + 4 * K * D,  # and the activation's value and the products
    ("loop", True): 4 * K * F + 4 * K * D,
    ("loop", False): 8 * K * F + 4 * K * D,
}


def kept_bytes(compute: Callable[..., Tensor], recompute: bool) -> tuple[float, float]:
    """Bytes a token of floating-point and of integer tensors that autograd saves of a call, without
    the experts' parameters.
    """
    x, gates, named, plan = problem(SHAPE, True, False, False, torch.bfloat16)
    gates = gates.detach().float().requires_grad_()
    plan = RowPlan(plan.source_R, plan.position_TK, gates, plan.counts)
    p = dataclasses.replace(parameters(named, "silu"), recompute=recompute)
    weights = {t.untyped_storage().data_ptr() for t in named.values() if t is not None}
    kept: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = compute(x, plan, p)
    assert y.requires_grad

    def total(floating: bool) -> float:
        return sum(t.untyped_storage().nbytes() for address, t in kept.items()
                   if address not in weights
                   and t.is_floating_point() == floating) / SHAPE.tokens

    return total(True), total(False)


@pytest.mark.parametrize(("name", "recompute"), KEPT)
def test_bytes_a_token(name: str, recompute: bool) -> None:
    floating, integer = kept_bytes(strategies.get(name), recompute)
    assert floating == KEPT[name, recompute] + GATES
    # `fused` keeps its maps in its context; `grouped` also a number for each expert
    assert integer <= MAPS + 16 * SHAPE.experts / SHAPE.tokens


def test_a_copy_of_gathered_rows_is_counted() -> None:
    def gathers(x: Tensor, plan: RowPlan, p: object) -> Tensor:
        rows_RD = x[plan.source_R // K]
        return rows_RD * rows_RD

    floating, integer = kept_bytes(gathers, False)
    assert (floating, integer) == (2 * K * D, 8 * K)
