"""fairseq's search for the first number that is not finite, in models with experts."""

from __future__ import annotations

import logging
import math
import re

import pytest

pytest.importorskip("fairseq")

from fairseq.nan_detector import NanDetector  # noqa: E402

from tests.hosts.fairseq.small import language_model, tokens  # noqa: E402


@pytest.mark.parametrize("where", ["router", "experts"])
def test_it_names_modules_of_ours(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Which return records: forward from the router, backward from the experts."""
    model = language_model(moe_capacity_factor="none", moe_dispatch="ragged")
    [layer] = [each for name, each in model.named_modules() if name.endswith(".moe")]
    if where == "router":
        layer.router.weight_ED.data[0, 0] = math.nan
    else:
        layer.experts.register_forward_hook(
            lambda _, given, y: y.register_hook(lambda gradient: gradient * math.nan) and None)
    with caplog.at_level(logging.WARNING), NanDetector(model):
        model(tokens())[0].sum().backward()
    first = {"router": "moe.router, .*, forward", "experts": "moe.*, backward"}[where]
    found = [record.getMessage() for record in caplog.records if "detected in" in record.msg]
    assert found and re.search(first, found[0]), found
