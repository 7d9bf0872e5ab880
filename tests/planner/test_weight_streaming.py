"""Segments of a model through one device: against all cuts, memory, stalls, accumulation."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.offload.schedule import BlockProfile, ModelProfile
from moe_plugin.planner.offload.weight_streaming import (
    Layer,
    Streamed,
    StreamPlan,
    fewest_batches,
    layers_of,
    plan,
)

pytestmark = pytest.mark.fast


def even(count: int, load_s: float = 4.0) -> list[Layer]:
    """Layers of 100 bytes that compute 3 s and load 4 s."""
    return [Layer(name=str(j), forward_s=1.0, backward_s=2.0, load_s=load_s, out_s=load_s / 2,
                  weight_bytes=100, gradient_bytes=100, kept_bytes=2, workspace_bytes=5)
            for j in range(count)]


@st.composite
def models(draw: st.DrawFn, most: int = 6) -> Streamed:
    """Layers of various sizes, room that is tight or not; times are whole numbers, none 0: what
    takes no time has no memory in a ledger of moments.
    """
    number, time = st.integers(0, 6), st.integers(1, 6)
    layers = [Layer(name=str(j), forward_s=draw(time), backward_s=draw(time),
                    load_s=draw(st.integers(1, 12)), out_s=draw(st.integers(1, 12)),
                    weight_bytes=draw(number), gradient_bytes=draw(number), kept_bytes=draw(number),
                    workspace_bytes=draw(number)) for j in range(draw(st.integers(1, most)))]
    model = Streamed(layers, draw(st.integers(1, 4)), 10**9, draw(st.integers(0, 3)))
    outcomes = [model.schedule(ends).run().peak for ends in all_ends(len(layers))]
    model.limit = draw(st.integers(min(outcomes), max(outcomes)))
    return model


def all_ends(size: int) -> list[tuple[int, ...]]:
    """All 2^(n - 1) cuts."""
    return [(*cut, size) for count in range(size) for cut in combinations(range(1, size), count)]


@settings(max_examples=40, deadline=None)
@given(models())
def test_the_cuts_are_the_best_of_all(model: Streamed) -> None:
    made = plan(model.layers, model.batches, model.limit, model.base)
    costs = {ends: (model.seconds(ends), StreamPlan(model, ends, 0).edge_bytes)
             for ends in all_ends(len(model.layers))}
    assert (made.seconds, made.edge_bytes) == min(costs.values())
    for ends, (seconds, _) in costs.items():
        if seconds < math.inf:  # raises where memory is exceeded
            outcome = model.schedule(ends).run()
            assert outcome.seconds == seconds and outcome.peak <= model.limit
            assert outcome.memory[-1][1] == model.base
        else:
            with pytest.raises(ValueError, match="above the limit"):
                model.schedule(ends).run()


def test_twelve_layers_against_all_cuts() -> None:
    layers = [replace(x, load_s=1.0 + j % 4, forward_s=1.0 + j % 3, kept_bytes=1 + 7 * j % 5)
              for j, x in enumerate(even(12))]
    made = plan(layers, 2, 1100)
    assert made.seconds == min(map(made.model.seconds, all_ends(12)))


@settings(max_examples=60, deadline=None)
@given(models(), st.data())
def test_nothing_stalls_if_and_only_if_copies_are_hidden(model: Streamed,
                                                        data: st.DataObject) -> None:
    model.limit = 10**9
    ends = data.draw(st.sampled_from(all_ends(len(model.layers))))
    made = StreamPlan(model, ends, model.seconds(ends))
    assert (made.stall_s == 0) == made.hides
    stalls = [StreamPlan(Streamed(model.layers, g, 10**9), ends, 0).stall_s for g in range(1, 6)]
    assert stalls == sorted(stalls, reverse=True)


def test_more_micro_batches_hide_what_one_does_not() -> None:
    layers, limit = even(8), 1000
    plans = [plan(layers, g, limit) for g in range(1, 7)]
    per_batch = [p.seconds / p.model.batches for p in plans]
    assert per_batch == sorted(per_batch, reverse=True)
    found = fewest_batches(layers, limit)
    assert found and found.hides and found.stall_s == 0
    assert not any(p.hides for p in plans[:found.model.batches - 1])
    assert fewest_batches(even(8, load_s=1e6), limit) is None
    roomy = plan(layers, 1, 10**6)
    assert sum(roomy.counts) == 8 and roomy.outcome.peak <= 10**6


def test_of_equal_cuts_the_thinnest_edges() -> None:
    layers = [replace(x, load_s=0.0, out_s=0.0, kept_bytes=width)
              for x, width in zip(even(6), (9, 9, 1, 9, 9, 9), strict=True)]
    made = plan(layers, 1, 46 + 5 + 600 + 400)
    assert made.ends == (2, 6)
    assert made.edge_bytes == min(StreamPlan(made.model, e, 0).edge_bytes for e in all_ends(6)
                                  if made.model.seconds(e) == made.seconds)


def test_forty_eight_layers() -> None:
    layers = [replace(x, load_s=3.0 + j % 3, kept_bytes=1 + j % 4) for j, x in enumerate(even(48))]
    made = plan(layers, 2, 2000)
    assert made.outcome.peak <= 2000 and made.outcome.seconds == pytest.approx(made.seconds)


def test_bad_input_is_refused_by_name() -> None:
    layers = even(3)
    with pytest.raises(ValueError, match="limit of 304 bytes is too .* needs? 40. bytes"):
        plan(layers, 1, 304)
    for call, match in ((lambda: plan([], 1, 9), "has 0 layers; it must have from 1 to"),
                        (lambda: plan(layers, 0, 9), "accumulated micro-batches is 0"),
                        (lambda: replace(layers[0], load_s=math.inf), "'0': load_s=inf must be")):
        with pytest.raises(ValueError, match=match):
            call()
    block = BlockProfile(name="a", forward_s=1, backward_s=2, activation_bytes=8, kept_bytes=3,
                         parameter_bytes=10, gradient_bytes=20, workspace_bytes=4)
    with pytest.raises(ValueError, match="out_bytes_s=0.0 must be > 0"):
        layers_of(ModelProfile(blocks=[block], in_bytes_s=1.0))
    (layer,) = layers_of(ModelProfile(blocks=[block], in_bytes_s=5.0, out_bytes_s=10.0))
    assert (layer.backward_s, layer.load_s, layer.out_s, layer.workspace_bytes) == (3, 2, 2, 12)
