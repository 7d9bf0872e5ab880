"""Every way to compute experts: gradients in float64, frozen parts, autocast, recomputation,
determinism, memory.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_plugin.comm import LocalComm
from moe_plugin.config import from_dict
from moe_plugin.experts import strategies
from moe_plugin.experts.gates import named_activation
from moe_plugin.kernels import expert_ffn
from moe_plugin.kernels.activations import ACTIVATIONS
from moe_plugin.layer import MoELayer
from moe_plugin.records import RowPlan
from moe_plugin.routing.replay import checkpoint
from tests.combinations import Cell, all_pairs, name_of
from tests.experts.problems import SMALL, Largest, make_layer, parameters, problem, with_gates
from tests.kernels.problems import SHAPES

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("cell", all_pairs({
    "name": strategies.names(), "activation": list(ACTIVATIONS), "gated": [False, True],
    "bias": [False, True], "empty_slots": [False, True], "tokens": [False, True]
}), ids=name_of)
def test_gradcheck(cell: Cell) -> None:
    """tokens: gathers its rows from tokens and sums them; otherwise rows in, rows out."""
    strategy = strategies.get(cell["name"])
    x, gates, p, plan = problem(SMALL, cell["gated"], cell["bias"], cell["empty_slots"])
    inputs = [t for t in p.values() if t is not None]
    given = parameters(p, cell["activation"])
    if cell["tokens"]:
        assert torch.autograd.gradcheck(
            lambda x, gates, *_: strategy(x, with_gates(plan, gates), given), (x, gates, *inputs),
            fast_mode=True)
    else:
        rows = torch.randn(plan.counts.total, SMALL.width, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda rows, *_: strategy(rows, plan.counts, given),
                                        (rows, *inputs), fast_mode=True)


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(name: str, shape: str) -> None:
    for gated, empty_slots in itertools.product([False, True], repeat=2):
        x, gates, p, plan = problem(SHAPES[shape], gated, True, empty_slots)
        wanted = [x, gates, *(t for t in p.values() if t is not None)]
        results = []
        for strategy in (name, "loop"):
            y = strategies.get(strategy)(x, plan, parameters(p, "silu"))
            results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-10,
                atol=1e-10 * max(1.0,
                                 float(theirs.detach().abs().max()) if theirs.numel() else 1.0))


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("gated", [False, True])
def test_rows_in_another_order_are_taken_and_put_back(name: str, gated: bool) -> None:
    """As they arrive from other ranks: the same as copies into the experts' order and back."""
    _, _, p, plan = problem(SHAPES["plain"], gated, True, False)
    counts, width = plan.counts, SHAPES["plain"].width
    rows = torch.randn(counts.total, width, dtype=torch.float64, requires_grad=True)
    order_R = torch.randperm(counts.total)
    inverse_R = torch.argsort(order_R)
    wanted = [rows, *(t for t in p.values() if t is not None)]
    mapped = RowPlan(order_R, inverse_R[:, None], None, counts, complete=True)
    results = []
    for y in (strategies.get(name)(rows, mapped, parameters(p, "silu")),
              strategies.get(name)(rows[order_R], counts, parameters(p, "silu"))[inverse_R]):
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", strategies.names())
def test_frozen_parameters_get_no_gradient(name: str) -> None:
    for frozen in ("x", "gates", "w_in_LDF", "bias_in_LF", "w_gate_LDF", "bias_gate_LF",
                   "w_out_LFD", "bias_out_LD"):
        x, gates, p, plan = problem(SMALL, True, True, False)
        every = {"x": x, "gates": gates, **p}
        free = torch.autograd.grad(
            strategies.get(name)(x, plan, parameters(p, "gelu")).square().sum(),
            list(every.values()))
        every[frozen].requires_grad_(False)
        strategies.get(name)(x, plan, parameters(p, "gelu")).square().sum().backward()
        assert every[frozen].grad is None
        for (label, tensor), want in zip(every.items(), free, strict=True):
            if label != frozen:
                torch.testing.assert_close(
                    tensor.grad, want,
                    msg=lambda m, label=label: f"{label} with {frozen} frozen: {m}")


@pytest.mark.parametrize("name", strategies.names())
def test_autocast(name: str) -> None:
    x, gates, p, plan = problem(SHAPES["plain"], True, True, False, torch.float32)
    plan = with_gates(plan, gates.detach().float().requires_grad_())
    want = strategies.get("loop")(x, plan, parameters(p, "silu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = strategies.get(name)(x, plan, parameters(p, "silu"))
    assert got.dtype == torch.bfloat16
    grads = torch.autograd.grad(got.float().square().mean(),
                                [x, plan.weights_TK, p["w_in_LDF"], p["bias_out_LD"]])
    truth = torch.autograd.grad(want.square().mean(),
                                [x, plan.weights_TK, p["w_in_LDF"], p["bias_out_LD"]])
    for mine, theirs in zip([got, *grads], [want, *truth], strict=True):
        assert mine.dtype == theirs.dtype or mine is got
        assert float(((mine.float() - theirs).norm() / theirs.norm()).detach()) < 0.03


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_every_time(name: str, dtype: torch.dtype) -> None:
    x, gates, p, plan = problem(SHAPES["plain"], True, True, False, dtype)
    plan = with_gates(plan, gates.detach().float().requires_grad_())
    runs = []
    for _ in range(2):
        y = strategies.get(name)(x, plan, parameters(p, "gelu"))
        runs.append(
            [y, *torch.autograd.grad(y.float().square().sum(), [x, plan.weights_TK, *p.values()])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", strategies.names())
def test_recomputation(name: str) -> None:
    layer, x = make_layer(name), torch.randn(33, 16, requires_grad=True)
    plain = torch.autograd.grad(layer(x).output.square().sum(), [x, *layer.parameters()])
    again = torch.autograd.grad(
        checkpoint(lambda v: layer(v).output, x).square().sum(), [x, *layer.parameters()])
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_inference_keeps_nothing() -> None:
    layer, x = make_layer(), torch.randn(33, 16)
    with torch.no_grad():
        quiet = layer(x).output
    assert quiet.grad_fn is None
    torch.testing.assert_close(quiet, layer(x).output.detach())


@pytest.mark.parametrize("dispatch,factor", [("ragged", None), ("padded", 1.0)])
@pytest.mark.parametrize("name", ["auto", "kernels"])
def test_no_dense_intermediate(name: str, dispatch: str, factor: float | None) -> None:
    tokens, experts, k, width, inner = 256, 64, 2, 8, 8
    layer = MoELayer(width, LocalComm(), num_experts=experts, router={"top_k": k},
                     experts={"hidden_dim": inner, "compute": name},
                     dispatch={"name": dispatch, "capacity_factor": factor})
    with Largest() as seen:
        layer(torch.randn(tokens, width)).output.sum().backward()
    # logits; rows; weights
    allowed = max(tokens * experts, 2 * tokens * k * max(width, inner), experts * width * inner)
    assert seen.numel <= allowed < tokens * k * experts, (f"{seen.made_by} makes {seen.numel} "
                                                          "elements")


def test_grouped_is_refused_where_torch_has_no_grouped_product(monkeypatch: pytest.MonkeyPatch,
                                                               ) -> None:
    monkeypatch.setattr(expert_ffn, "HAS_GROUPED", False)
    assert "grouped" not in strategies.names()
    settings = {"model_dim": 8, "num_experts": 2, "experts": {"compute": "grouped"}}
    with pytest.raises(ValueError, match="'grouped' cannot run here: .*needs torch >= 2.10"):
        MoELayer(from_dict(settings))
    dropping = {**settings, "experts": {"dropout": 0.5}}
    assert MoELayer(from_dict(dropping))(torch.randn(5, 8)).output.isfinite().all()


@pytest.mark.parametrize("function, name", [
    (torch.nn.ReLU(inplace=True), "relu"), (torch.nn.SiLU(inplace=True), "silu"),
    (torch.nn.GELU(approximate="tanh"), "gelu_tanh"), (torch.nn.Tanh(), None),
    (torch.nn.Bilinear(2, 2, 2), None)])
def test_an_activation_is_named_by_its_values(function: torch.nn.Module, name: str | None) -> None:
    """Also if it writes into its argument, and however often it is asked."""
    assert [named_activation(function) for _ in range(2)] == [name, name]
    assert named_activation(torch.nn.functional.silu) == "silu"
