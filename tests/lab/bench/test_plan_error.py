"""`bench plan-error`: its page from records by hand, the model that it predicts."""

from __future__ import annotations

import pytest

from moe_plugin.lab.bench.studies import STUDIES
from moe_plugin.lab.bench.studies.plan_error import model_of
from moe_plugin.lab.bench.train.shapes import SHAPES
from moe_plugin.observe.history.predictions import PredictionRecord
from moe_plugin.planner.prediction import Prediction

pytestmark = pytest.mark.fast


def row(layout: str, host: str, predicted: float, measured: float) -> dict:
    made = Prediction(task=host, plan=layout, memory_bytes=1e6, parts={
        "products": [0.9 * predicted, predicted, 1.1 * predicted]})
    found = PredictionRecord(step=18, host=host, predicted=made, machine="one", steps=10,
                             seconds=measured, parts={"products": measured}, memory_bytes=2e6)
    return {"place": "one node", "shape": "few", "layout": layout, **found.as_row()}


def test_the_page_says_what_is_missed() -> None:
    study = STUDIES["plan-error"]
    found = {"cells": [row("r=1", "fairseq", 0.12, 0.1), row("r=0", "fairseq", 0.1, 0.2),
                       row("r=1", "megatron", 0.1, 0.1)]}
    page = " ".join(study.page(found).split())
    assert "The step is off by 23.3% on average; the aim is 5%, which is missed." in page
    assert "in 0 of 1 pairs, and in 0 of 1 whose steps differ by 5% or more" in page
    assert "| fairseq | 2 | 35.0% | 35.0% | | | 50.0% | 0 of 2 | 0 of 1 |" in page
    assert "| one node | fairseq | few | r=0 | 200 | 100 | 90 to 110 | -50% | -50% |" in page
    assert study.code.failures(found) == ["steps are off by 23.3% on average, more than 5%"]
    assert study.code.failures({"cells": found["cells"][2:]}) == []


def test_the_model_is_the_one_that_trains() -> None:
    shape = SHAPES["few"]
    for host, first in (("megatron", True), ("fairseq", False)):
        model = model_of(shape, host)
        assert model.moe_layers == model.layers == shape.layers and model.moe_first is first
        assert model.global_batch * model.sequence == shape.tokens
        assert sum(model.parameter_bytes().values()) == 16  # weight, gradient, two moments
