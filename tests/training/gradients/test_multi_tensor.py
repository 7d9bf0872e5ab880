"""Norm and scaling of many tensors at once, by torch and by apex."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_plugin.training.gradients.fused import scale_, squared_norm

pytestmark = pytest.mark.fast


def _tensors() -> list[Tensor]:
    """Of several dtypes, shapes and strides; the fourth is not contiguous, the last is empty."""
    torch.manual_seed(0)
    return [
        torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(4, 2).half(),
        torch.randn(6, 4).t(), torch.randn(2).double(), torch.zeros(0)
    ]


def _sum_of_squares(tensors: list[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _check(tensors: list[Tensor], factor: float | Tensor) -> None:
    before = [tensor.clone() for tensor in tensors]
    found = squared_norm(tensors)
    assert found.dtype == torch.float64 and found.shape == ()
    assert float(found) == pytest.approx(_sum_of_squares(tensors), rel=1e-6)
    scale_(tensors, factor)
    for old, new in zip(before, tensors, strict=True):
        torch.testing.assert_close(new, (old.double() * float(factor)).to(old.dtype))


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3)])
def test_by_torch(factor: float | Tensor) -> None:
    _check(_tensors(), factor)


def test_by_apex(apex: list[str]) -> None:
    _check(_tensors(), 0.3)
    # float32 and float16 apart; bfloat16, float64 and what is not contiguous stay with torch
    assert apex == 1 * ["multi_tensor_l2norm"] + 1 * ["multi_tensor_scale"]
    apex.clear()
    _check(_tensors()[:3], 0.3)
    assert sorted(apex) == 2 * ["multi_tensor_l2norm"] + 2 * ["multi_tensor_scale"]
    apex.clear()
    scale_(_tensors()[:1], torch.tensor(0.5))  # apex would wait for the number
    assert apex == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_the_norm(bad: float, request: pytest.FixtureRequest) -> None:
    for fixture in (None, "apex"):
        if fixture:
            request.getfixturevalue(fixture)
        assert not squared_norm([torch.ones(2), torch.tensor([1.0, bad])]).isfinite()


def test_nothing_has_no_norm() -> None:
    assert float(squared_norm([])) == float(squared_norm([], copies=[])) == 0.0
    scale_([], 2.0)


def test_copies_of_several_ranks_count_once(apex: list[str]) -> None:
    tensors = [torch.full((4,), 3.0) for _ in range(3)]
    found = float(squared_norm(tensors, copies=[1, 2, 2]))
    assert found == pytest.approx(36.0 + 2 * 36.0 / 2)
    assert apex == 2 * ["multi_tensor_l2norm"]
