"""Warnings of dropped choices: of training and of validation once each, just above the bound."""

from __future__ import annotations

import pytest
import torch

from moe_plugin import MoELayer
from moe_plugin.config import from_dict
from moe_plugin.observe.features import WARN_ABOVE, DropCount, DropWarning
from moe_plugin.utils.run_feature import StepFacts

pytestmark = pytest.mark.fast


def test_training_and_validation_are_warned_of_once_each(caplog: pytest.LogCaptureFixture) -> None:
    warn = DropWarning()
    for step in (1, 2):
        warn.after_log(StepFacts(step, dropped=WARN_ABOVE))
        warn.after_evaluation(step, WARN_ABOVE)
    assert not caplog.records
    for step in (3, 4):
        warn.after_log(StepFacts(step, dropped=WARN_ABOVE + 0.01))
        warn.after_evaluation(step, 0.56)
    training, validation = (r.getMessage() for r in caplog.records)
    assert training.startswith("step 3: 11 % of the choices found no slot")
    assert validation.startswith("validation at step 3: 56 % of the choices found no slot")
    assert "--moe-capacity-factor none" in training and "--moe-capacity-factor none" in validation
    assert "--moe-eval-token-fraction" in validation and "--moe-eval" not in training


def test_drops_of_several_calls_are_counted() -> None:
    settings = {"model_dim": 8, "num_experts": 4, "router": {"name": "switch", "top_k": 1},
                "dispatch": {"name": "padded", "capacity_factor": 1.0}}
    layer, count = MoELayer(from_dict(settings)), DropCount()
    with torch.no_grad():
        layer.router.weight_ED.zero_()  # all tokens to the first expert, which has a quarter
    for tokens in (32, 64):
        count.add(layer(torch.ones(tokens, 8)).stats)
    assert count.take() == 0.75 and count.take() == 0.0
    count.add(None)
    dropless = MoELayer(from_dict({"model_dim": 8, "num_experts": 4}))
    count.add(dropless(torch.ones(8, 8)).stats)
    assert count.take() == 0.0
