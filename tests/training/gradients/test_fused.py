"""Which Adam, norms and gradient functions are used, and the reasons."""

from __future__ import annotations

import pytest
import torch

from moe_plugin.training.gradients import fused

pytestmark = pytest.mark.fast

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
