"""Weight gradients that the pieces of one pass add up: the values of autograd's sum, one tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_plugin.kernels.expert_ffn import FFNParameters, strategies
from moe_plugin.kernels.weight_grads import GradSums
from moe_plugin.kernels.workspace import Workspace
from moe_plugin.records import RowCounts
from tests.kernels.row_rules import RULES, rows_computed

pytestmark = pytest.mark.fast

D, F = 4, 6
# rows by expert; the second expert has none; the last two are multiplied together after one of
# them has a value
L, PIECES = 5, [[2, 0, 3, 0, 1], [0, 0, 1, 2, 0], [1, 0, 0, 2, 2]]


def _parameters(gated: bool, sums: GradSums | None) -> FFNParameters:
    g = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(L, *shape, generator=g, dtype=torch.float64).requires_grad_()

    return FFNParameters(weight(D, F), weight(F), weight(D, F) if gated else None, None,
                         weight(F, D), weight(D), "gelu", Workspace(), sums=sums)


def _grads(name: str, gated: bool, sums: GradSums | None) -> list[list[torch.Tensor]]:
    """Of two passes through one graph."""
    p, g = _parameters(gated, sums), torch.Generator().manual_seed(2)
    weights = [w for w in (p.w_in_LDF, p.w_gate_LDF, p.w_out_LFD, p.bias_in_LF) if w is not None]
    total = torch.zeros((), dtype=torch.float64)
    for counts in PIECES:
        x = torch.randn(sum(counts), D, generator=g, dtype=torch.float64)
        total = total + strategies.get(name)(x, RowCounts(counts), p).square().sum()
    return [list(torch.autograd.grad(total, weights, retain_graph=True)) for _ in range(2)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("name", "how"), [*(("fused", how) for how in RULES), ("loop", "own"),
                                           ("kernels", "own")])
def test_sums_are_autograds(name: str, how: str, gated: bool) -> None:
    expected = _grads("loop", gated, None)[0]
    with rows_computed(how):
        passes = _grads(name, gated, GradSums())
    for found in passes:
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
            assert not ours[1].any()


def _errors(name: str, pieces: int, gated: bool) -> list[float]:
    """Relative errors of the weight gradients in bfloat16, for the same rows in equal pieces."""
    counts, errors = [32 // pieces * 8] * L, []
    made: dict[torch.dtype, list[torch.Tensor]] = {}
    for dtype in (torch.bfloat16, torch.float64):
        g, sums = torch.Generator().manual_seed(3), GradSums()
        shapes = [(24, 32), (32, ), (24, 32), (32, ), (32, 24), (24, )]
        weights = [torch.randn(L, *shape, generator=g).bfloat16().to(dtype).requires_grad_()
                   for shape in shapes]
        if not gated:
            weights[2] = weights[3] = None
        p = FFNParameters(*weights, "gelu", Workspace(), sums=sums)
        x_LND, grad_LND = (torch.randn(L, 256, 24, generator=g).bfloat16().to(dtype)
                           for _ in range(2))
        each = zip(x_LND.chunk(pieces, 1), grad_LND.chunk(pieces, 1), strict=True)
        y = [strategies.get(name)(x.flatten(0, 1), RowCounts(counts), p).flatten() @ grad.flatten()
             for x, grad in each]
        sum(y).backward()
        made[dtype] = [w.grad.double() for w in weights[::2] if w is not None]
    for got, exact in zip(made[torch.bfloat16], made[torch.float64], strict=True):
        errors.append(float((got - exact).norm() / exact.norm()))
    return errors


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["fused", "kernels"])
def test_pieces_in_16_bits_are_as_accurate_as_one_call(name: str, gated: bool) -> None:
    """Each gradient is rounded once more, because each piece is, but no sum of pieces is."""
    rounding = 2**-9  # the largest error of a rounded value, relative to it
    for pieces, whole in zip(_errors(name, 16, gated), _errors(name, 1, gated), strict=True):
        assert 1e-3 < pieces < math.hypot(whole, rounding)


class FailsOnce(torch.autograd.Function):
    """A gradient that goes through, but for the first time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.failed = False
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if not ctx.failed:
            ctx.failed = True
            raise RuntimeError("aborted")
        return grad


@pytest.mark.parametrize("name", ["fused", "kernels"])
def test_a_backward_pass_that_was_aborted_leaves_nothing(name: str) -> None:
    """It has been through one of three pieces when it ends; the next one is over the same graph."""
    x, counts = torch.randn(5, D, dtype=torch.float64), RowCounts([2, 0, 3, 0, 0])

    def grads(name: str, sums: GradSums | None) -> tuple[torch.Tensor, ...]:
        p = _parameters(True, sums)
        pieces = []
        for scale in (1, 2, 3):  # backward comes to the last one first
            piece = strategies.get(name)(x * scale, counts, p)
            pieces.append(FailsOnce.apply(piece) if sums is not None and scale == 2 else piece)
        y = sum(piece.square().sum() for piece in pieces)
        weights = [p.w_in_LDF, p.w_gate_LDF, p.w_out_LFD]
        if sums is not None:
            with pytest.raises(RuntimeError, match="aborted"):
                torch.autograd.grad(y, weights, retain_graph=True)
        return torch.autograd.grad(y, weights)

    for ours, theirs in zip(grads(name, GradSums()), grads("loop", None), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_pieces_write_into_one_gradient() -> None:
    p, made = _parameters(False, GradSums()), []

    class Counting(Workspace):
        def empty(self, purpose, shape, like):
            made.append(purpose)
            return super().empty(purpose, shape, like)

    p = FFNParameters(**{**vars(p), "memory": Counting()})
    x = torch.randn(5, D, dtype=torch.float64)
    counts = RowCounts([2, 0, 3, 0, 0])
    sum(strategies.get("fused")(x, counts, p).sum() for _ in range(4)).backward()
    assert made.count("gradient w_in_LDF") == made.count("gradient w_out_LFD") == 1
    assert p.w_in_LDF.grad is not None and p.w_out_LFD.grad is not None


class WeightSized(TorchDispatchMode):
    """Notes the operations that make or change a tensor of a weight's shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.seen = shape, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape and (
                func._schema.name not in ("aten::detach", "aten::transpose")):
            self.seen.append(func._schema.name.removeprefix("aten::"))
        return out


@pytest.mark.parametrize("kept_by_host", [False, True])
def test_pieces_of_the_kernels_make_one_gradient(kept_by_host: bool) -> None:
    """Autograd alone would make one for each of four pieces, and add them in three more passes."""
    p = _parameters(False, GradSums())
    redirected = {}
    if kept_by_host:
        redirected = {"w_in_LDF": p.w_in_LDF, "w_out_LFD": p.w_out_LFD}
        for w in redirected.values():
            w.main_grad, w.grad_added_to_main_grad = torch.zeros_like(w), False
    p = FFNParameters(**{**vars(p), "main_grad_weights": redirected})
    x, counts = torch.randn(5, D, dtype=torch.float64), RowCounts([2, 0, 3, 0, 0])
    y = sum(strategies.get("kernels")(x, counts, p).sum() for _ in range(4))
    with WeightSized(p.w_in_LDF.shape) as made:
        y.backward()
    assert made.seen == (["zeros_like"] if kept_by_host else ["new_empty"])
    if kept_by_host:
        assert all(w.grad_added_to_main_grad and w.main_grad.any() for w in redirected.values())
        assert not any(w.grad.any() for w in redirected.values()), "a hook may read them"
    assert p.w_in_LDF.grad is not None and p.w_out_LFD.grad is not None
