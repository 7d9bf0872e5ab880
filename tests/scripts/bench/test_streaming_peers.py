"""Peers that stream a model against a pipeline of them, over poor links."""

from __future__ import annotations

import pytest

from scripts.bench.headline_models import pipelined_s, streamed_gpt, streamed_s

pytestmark = pytest.mark.fast

PLAN, WEIGHTS = streamed_gpt()
RATES = [10**n / 8 for n in range(10, 5, -1)]


def ratio(bytes_s: float, every: int, size: int) -> float:
    return pipelined_s(PLAN, bytes_s) / streamed_s(PLAN, bytes_s, every, size)


def test_a_point_of_twenty_times() -> None:
    assert PLAN.hides and PLAN.outcome.peak <= 11 * 2**30
    assert ratio(10e6 / 8, 500, WEIGHTS) > 25
    assert streamed_s(PLAN, 10e6 / 8, 500, WEIGHTS) > PLAN.seconds


def test_the_ratio_grows_as_the_bandwidth_falls() -> None:
    for size in (WEIGHTS, 0):
        ratios = [ratio(rate, 500, size) for rate in RATES]
        assert ratios == sorted(ratios)
        # a fast network favours the pipeline, which computes no forward again: they cross
        assert ratios[0] < 1 < ratios[1]
    # averaging at each step costs more than a pipeline's activations
    assert ratio(10e6 / 8, 1, WEIGHTS) < 1
