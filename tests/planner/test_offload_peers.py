"""Peers that stream a model against a pipeline of them, over poor links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_plugin.planner.offload.peers import Peers, versus_pipeline
from moe_plugin.planner.offload.weight_streaming import Layer, plan

pytestmark = pytest.mark.fast

# A GPT of 24 layers of width 2,048 (1.2B parameters) in 16 bits, sequences of 2,048 tokens one at a
# time, on 50 TFLOP/s, 12 GB/s from host memory and 11 GiB.
PARAMETERS, TOKENS = 12 * 2048**2, 2048
FORWARD = (2 * PARAMETERS * TOKENS + 4 * TOKENS**2 * 2048) / 50e12
LAYERS = [Layer(name=str(j), forward_s=FORWARD, backward_s=3 * FORWARD,
                load_s=2 * PARAMETERS / 12e9, out_s=2 * PARAMETERS / 12e9,
                weight_bytes=2 * PARAMETERS, gradient_bytes=2 * PARAMETERS,
                kept_bytes=2 * TOKENS * 2048, workspace_bytes=34 * TOKENS * 2048)
          for j in range(24)]
# 4 peers; each accumulates 8 micro-batches, and weights are averaged every 500 steps
PLAN = plan(LAYERS, 8, 11 * 2**30, 2**28)
PEERS = Peers(count=4, bytes_s=10e6 / 8, delay_s=0.01, average_every=500,
              averaged_bytes=24 * 2 * PARAMETERS)
RATES = [10**n for n in range(10, 5, -1)]  # bit/s


def test_a_point_of_twenty_times() -> None:
    assert PLAN.hides and PLAN.outcome.peak <= 11 * 2**30
    versus = versus_pipeline(PLAN, PEERS)  # 10 Mbit/s
    assert versus.ratio > 25
    assert versus.streamed > PLAN.seconds


def test_the_ratio_grows_as_the_bandwidth_falls() -> None:
    for peers in (PEERS, replace(PEERS, averaged_bytes=0)):
        ratios = [versus_pipeline(PLAN, replace(peers, bytes_s=rate / 8)).ratio for rate in RATES]
        assert ratios == sorted(ratios)
        # a fast network favours the pipeline, which computes no forward again: they cross
        assert ratios[0] < 1 < ratios[1]
    often = replace(PEERS, average_every=1)  # costs more than a pipeline's activations
    assert versus_pipeline(PLAN, often).ratio < 1


def test_bad_peers_are_refused() -> None:
    for change, match in (({"count": 1}, "count=1 must be from 2"),
                          ({"bytes_s": 0.0}, "bytes_s=0.0 must be"),
                          ({"average_every": 0}, "average_every=0")):
        with pytest.raises(ValueError, match=match):
            replace(PEERS, **change)
    with pytest.raises(ValueError, match="25 stages needs at least as many layers, .* 24"):
        versus_pipeline(PLAN, replace(PEERS, count=25))
