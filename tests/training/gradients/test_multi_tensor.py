"""Norms, scaling and Adam for many tensors at once, by torch and by apex."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_plugin.training.gradients import fused
from moe_plugin.training.gradients.multi_tensor import scale_, squared_norm

pytestmark = pytest.mark.fast


# Norm and scaling of many tensors at once, by torch and by apex.


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


# Which Adam, norms and gradient functions are used, and the reasons.


NOTHING = {"torch_fused": False, "old": False, "fp16_stats": False}


def _active(dtypes: set[torch.dtype] = frozenset(), **given: bool) -> tuple[str, str]:  # type: ignore[assignment]
    choice = fused.fairseq_adam(dtypes, **{**NOTHING, **given})
    return choice.active, choice.reason


def test_without_apex_the_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _active() == ("fairseq", "apex needs a CUDA device, and there is none")
    assert _active(torch_fused=True) == ("torch", "--moe-fused-adam")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    active, reason = _active()
    assert active == "fairseq" and "No module named 'amp_C'" in reason
    rows = {choice.role: choice for choice in fused.choices()}
    assert rows["layer norm"].active == "torch.nn.LayerNorm"
    assert "No module named 'fused_layer_norm_cuda'" in rows["RMS norm"].reason
    assert rows["gradient norm"].active == "torch._foreach_norm"
    assert rows["Megatron --optimizer adam"].active == "torch.optim.AdamW"
    assert "--moe-fused-adam" in rows["Megatron --optimizer adam"].reason
    assert rows["fairseq --fp16-adam-stats"].active == "torch's fused Adam"


def test_with_apex_all_is_apex(apex: list[str]) -> None:
    rows = {choice.role: choice.active for choice in fused.choices()}
    assert rows.pop("Transformer Engine") == "no"
    assert len(rows) == 7 and all(active.startswith("apex ") for active in rows.values())


@pytest.mark.parametrize("other", ["torch_fused", "fp16_stats"])
def test_flags_that_exclude_each_other(other: str) -> None:
    with pytest.raises(ValueError, match=r"leave one of the two flags out"):
        _active(old=True, **{other: True})
    assert _active(torch_fused=True, fp16_stats=True) == ("torch", "--moe-fused-adam")


def test_the_adam_of_fairseq_with_apex(apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _active(fp16_stats=True)[0] == _active({torch.bfloat16})[0] == "apex"
    assert _active(old=True) == ("fairseq", "--use-old-adam")
    # an apex without the deprecated extension
    monkeypatch.setitem(fused.APEX, fused.ADAM_16_BIT, ("no_such", "adam", "no_such"))
    assert _active({torch.float32}) == ("apex", "apex.optimizers.FusedAdam imports")
    assert _active({torch.bfloat16, torch.float32})[0] == "torch"
    active, reason = _active(fp16_stats=True)
    assert active == "torch" and "No module named 'no_such'" in reason


def test_a_broken_apex_is_no_error(apex: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("apex.normalization.FusedRMSNorm")
    part = fused.apex(fused.RMS_NORM)
    assert part.value is None and "AttributeError" in part.reason
    assert fused.apex(fused.LAYER_NORM).value is not None
