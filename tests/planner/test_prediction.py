"""The file of a prediction, and what cannot be one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_plugin.planner.prediction import Prediction, dump_prediction, load_prediction

pytestmark = pytest.mark.fast
PARTS = {"products": [0.1, 0.2, 0.3], "exchange": [0.0, 0.1, 0.4]}


def test_a_step_is_the_sum_of_its_parts_and_survives_its_file(tmp_path: Path) -> None:
    made = Prediction(task="a model", plan="r=1", machine="one", basis="a fit", parts=PARTS,
                      memory_bytes=1e9, skew=1.5)
    path = tmp_path / "prediction.json"
    path.write_text(dump_prediction(made))
    assert load_prediction(path) == made
    assert made.seconds == pytest.approx((0.1, 0.3, 0.7))


@pytest.mark.parametrize("values, text", [
    ({"parts": {}}, "parts none must be some of products, exchange, optimizer"),
    ({"parts": {"copies": [0, 1, 2]}}, "parts copies must be some of"),
    ({"parts": {"products": [2, 1, 3]}}, "products=[2.0, 1.0, 3.0] must be low, middle and high"),
    ({"parts": {"products": [1, 2]}}, "products=[1.0, 2.0] must be low, middle and high"),
    ({"parts": {"products": [0, 1, "x"]}}, "could not convert string to float"),
    ({"parts": PARTS, "memory_bytes": -1}, "memory_bytes=-1.0 must be from 0"),
    ({"parts": PARTS, "skew": 0.5}, "skew=0.5 must be from 1 to"),
    ({}, "no prediction ('parts')"), ([1, 2], "no prediction"), (3, "no prediction"),
    ({"parts": PARTS, "seconds": 1}, "unexpected keyword argument 'seconds'"),
])
def test_what_is_no_prediction_is_refused(values: dict, text: str, tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as caught:
        load_prediction(path)
    assert text in str(caught.value)
