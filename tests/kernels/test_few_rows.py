"""Strategy `few`: compiled functions for experts with few rows, compared with float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_plugin.dispatch.rows import exact_rows
from moe_plugin.experts import strategies
from moe_plugin.kernels.cpu.few_rows import MOST, why_not_few
from moe_plugin.kernels.cpu.native.functions import why_not
from moe_plugin.kernels.expert_ffn import FFNParameters
from moe_plugin.kernels.weight_grads import GradSums
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import RowCounts, RowPlan

pytestmark = [pytest.mark.fast, pytest.mark.skipif(
    why_not("silu") is not None, reason="compiled functions are unavailable")]
TOKENS, EXPERTS = 21, 4
FIELDS = ("w_in_LDF", "bias_in_LF", "w_gate_LDF", "bias_gate_LF", "w_out_LFD", "bias_out_LD")


def drawn(width: int, inner: int, gated: bool, bias: bool, rows: int = TOKENS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = [(EXPERTS, width, inner), (EXPERTS, inner)] * 2 + [(EXPERTS, inner, width),
                                                                (EXPERTS, width)]
    made = {name: torch.randn(shape, generator=g, dtype=torch.float64) / 3
            for name, shape in zip(FIELDS, shapes, strict=True)
            if (gated or "gate" not in name) and (bias or "bias" not in name)}
    return made | {"x": torch.randn(rows, width, generator=g, dtype=torch.float64),
                   "gates": torch.rand(TOKENS, 2, generator=g, dtype=torch.float64)}


def computed(name: str, values: dict[str, Tensor], ids_TK: Tensor | None, dtype: torch.dtype,
             turned: bool = False) -> list[Tensor]:
    """The output and all gradients in float64, from values rounded to bfloat16."""
    t: dict[str, Any] = dict.fromkeys(FIELDS) | {n: v.bfloat16().to(dtype) for n, v in
                                                 values.items()}
    t["gates"] = t["gates"].to(torch.float64 if dtype == torch.float64 else torch.float32)
    for n in FIELDS:
        if turned and n.startswith("w_") and t[n] is not None:
            t[n] = t[n].mT.contiguous().mT
    given = {n: v.requires_grad_() for n, v in t.items() if v is not None}
    p = FFNParameters(*(t[n] for n in FIELDS), "silu", Workspace())
    rows: Any = RowCounts([5, 0, 15, 1])
    if ids_TK is not None:
        rows = exact_rows(ids_TK, t["gates"], EXPERTS)
    if name == "few":
        assert why_not_few(t["x"], rows, p) is None
    y = strategies.get(name)(t["x"], rows, p)
    wanted = [v for n, v in given.items() if n != "gates" or ids_TK is not None]
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).bfloat16().to(dtype)
    grads = torch.autograd.grad(y, wanted, weight.view_as(y))
    return [v.detach().double() for v in (y, *grads)]


@pytest.mark.parametrize(("width", "inner"), [(32, 64), (33, 71), (6, 4), (300, 270)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["rows", "tokens", "some choices without experts"])
def test_output_and_gradients(width: int, inner: int, gated: bool, dtype: torch.dtype,
                              how: str) -> None:
    ids_TK = None
    if how != "rows":
        ids_TK = torch.stack([torch.arange(TOKENS) % 3, torch.full((TOKENS,), 3)], 1)
        if how != "tokens":
            ids_TK[::4] = -1
    bias, turned = inner % 2 == 0, inner % 4 == 0
    values = drawn(width, inner, gated, bias)
    got = computed("few", values, ids_TK, dtype, turned)
    for mine, want in zip(got, computed("loop", values, ids_TK, torch.float64), strict=True):
        bound = 2e-6 if dtype == torch.float32 else 6e-3
        assert float((mine - want).norm()) <= bound * float(want.norm())


def test_threads_change_no_bit() -> None:
    values, threads = drawn(300, 270, True, True), torch.get_num_threads()
    try:
        results = []
        for number in (1, 3):
            torch.set_num_threads(number)
            results.append(computed("few", values, None, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))


def test_other_operands_are_computed_by_fused() -> None:
    values = drawn(8, 8, False, False, MOST[torch.float32] + 1)
    x, w_in, w_out = (values[n].float() for n in ("x", "w_in_LDF", "w_out_LFD"))
    p = FFNParameters(w_in, None, None, None, w_out, None, "silu", Workspace())
    every, none = RowCounts([len(x), 0, 0, 0]), RowCounts([0] * EXPERTS)
    assert "rows of an expert" in (why_not_few(x, every, p) or "")
    assert why_not_few(x, RowCounts([len(x) - 1, 1, 0, 0]), p) is None
    assert why_not_few(x[:0], none, p) is not None
    assert why_not_few(x, every, replace(p, sums=GradSums())) is not None
    assert why_not_few(x.double(), every, p) == "no compiled functions"
    some = RowCounts([1, 0, 0, 0])
    assert why_not_few(x[:1], some, replace(p, w_in_LDF=w_in.repeat(1, 1, 2)[:, :, :8])) is not None
    plan = RowPlan(torch.tensor([0, -1]), torch.tensor([[0]]), None, RowCounts([2, 0, 0, 0]))
    assert why_not_few(x[:1], plan, p) == "empty slots"
    for rows, given in ((every, x), (none, x[:0])):
        assert torch.equal(strategies.get("few")(given, rows, p),
                           strategies.get("fused")(given, rows, p))
