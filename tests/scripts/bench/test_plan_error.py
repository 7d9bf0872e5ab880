"""`bench plan-error`: its page from records by hand, the model that it predicts."""

from __future__ import annotations

import argparse

import pytest

from moe_plugin.config.flags import add_arguments, config_from_flags
from scripts.bench.studies import STUDIES
from scripts.bench.studies.plan_error import DROPLESS, model_of
from scripts.bench.train.fairseq import flags_of
from scripts.bench.train.sides import FIXED, SHAPES

pytestmark = pytest.mark.fast


def row(layout: str, host: str, predicted: float, measured: float,
        place: str = "one node") -> dict:
    return {"place": place, "host": host, "shape": "few", "layout": layout,
            "predicted": predicted, "measured": measured}


def test_the_page_says_what_is_missed() -> None:
    study = STUDIES["plan-error"]
    found = {"cells": [row("r=1", "fairseq", 0.12, 0.1), row("r=0", "fairseq", 0.1, 0.2),
                       row("r=1", "megatron", 0.1, 0.1)]}
    page = " ".join(study.page(found).split())
    assert "differs from the measured time by 23.3% on average." in page
    assert "In 0 of 1 pairs, the layout that was predicted to be faster was also faster" in page
    assert "differ by 5% or more, the prediction is right for 0 of 1 pairs." in page
    assert "| fairseq | 2 | 35.0% | -15.0% | 0 of 1 |" in page
    assert ("| one node | fairseq | few | experts' weights gathered, no all-to-all, one piece | "
            "200 | 100 | -50% |") in page
    assert study.code.failures(found) == [
        "0 of 1 pairs of layouts are in the predicted order, fewer than 95%"]
    assert study.code.failures({"cells": found["cells"][2:]}) == []


def test_pairs_are_of_one_network() -> None:
    cells = [row("r=1", "fairseq", 0.1, 0.1), row("r=0", "fairseq", 0.3, 0.2),
             row("r=1", "fairseq", 0.1, 0.3, "slow"), row("r=0", "fairseq", 0.2, 0.25, "slow")]
    page = " ".join(STUDIES["plan-error"].page({"cells": cells}).split())
    assert "pairs of layouts on the same network" in page and "In 1 of 2 pairs" in page


@pytest.mark.parametrize("host", ["megatron", "fairseq"])
def test_what_trains_is_dropless(host: str) -> None:
    settings = {**FIXED["linear"], **DROPLESS}
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    config = config_from_flags({}, settings) if host == "megatron" else config_from_flags(
        vars(parser.parse_args(flags_of(settings))), {"dispatch.capacity_factor": 1.0})
    assert config.dispatch.capacity_factor is None and config.dispatch.name == "ragged"
    assert config.parallel.mode == "fixed" and config.comm.all_to_all == "linear"


def test_the_model_is_the_one_that_trains() -> None:
    shape = SHAPES["few"]
    for host, first in (("megatron", True), ("fairseq", False)):
        model = model_of(shape, host)
        assert model.moe_layers == model.layers == shape.layers and model.moe_first is first
        assert model.global_batch * model.sequence == shape.tokens
        assert sum(model.parameter_bytes().values()) == 16  # weight, gradient, two moments
