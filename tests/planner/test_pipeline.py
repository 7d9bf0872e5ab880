"""Simulated pipelines: schedules of micro-batches, and slices that flow through stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.cli.planning.pipeline import trace
from moe_plugin.planner.pipeline.choice import StageProfile, predict
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline, equal_slices, idle, order
from moe_plugin.planner.pipeline.slices import (
    SliceProfile,
    SliceTimes,
    cut,
    cut_batch,
    fit,
    fit_batches,
    latency,
    slice_seconds,
)

pytestmark = pytest.mark.fast


# Simulated pipelines: published tables, and properties of any of them.


TIMES = st.floats(0.0, 4.0)
LINES = st.builds(Pipeline, stages=st.integers(1, 5), micro_batches=st.integers(1, 9),
                  forward_s=TIMES, backward_s=st.floats(2.0, 6.0), send_s=TIMES,
                  delayed_s=st.floats(0.0, 2.0))


@pytest.mark.parametrize("stages, batches, send, blocking, overlapped, eager, ideal", [
    (4, 16, 0, 57, 57, 57, 57), (4, 16, 0.5, 74.5, 71, 60, 57), (4, 16, 1.0, 92, 85, 63, 57),
    (8, 32, 0.5, 154.5, 151, 124, 117), (8, 32, 1.0, 192, 185, 131, 117),
])
def test_pipelines_by_how_they_send(stages: int, batches: int, send: float, blocking: float,
                                    overlapped: float, eager: float, ideal: float) -> None:
    """Forward 1 s, backward 2 s."""
    line = Pipeline(stages=stages, micro_batches=batches, send_s=send)
    assert [line.simulate(mode).seconds for mode in ("blocking", "overlapped", "eager")] == [
        blocking, overlapped, eager]
    assert line.ideal_s == ideal
    assert line.peak_activations("overlapped") == list(range(stages, 0, -1))
    assert line.peak_activations("eager") == list(range(2 * stages - 1, 0, -2))


def test_an_unknown_way_to_send_is_refused() -> None:
    with pytest.raises(ValueError, match="is unknown. Choose from paired, blocking, "
                                         "overlapped, eager"):
        Pipeline(stages=2, micro_batches=2).simulate("late")


@given(LINES, st.sampled_from(MODES))
def test_each_pass_runs_once_and_after_what_it_needs(line: Pipeline, mode: str) -> None:
    spans = {span.task.name: span for span in line.simulate(mode).spans}
    for kind, stage, batch in itertools.product(("forward", "backward"), range(line.stages),
                                                range(line.micro_batches)):
        this = spans.pop(f"{kind} {stage} {batch}")
        other = stage - 1 if kind == "forward" else stage + 1
        if 0 <= other < line.stages:
            assert this.start >= spans[f"send {kind} {other} {batch}"].end
        if kind == "backward":
            passes = order(line.stages, stage, line.micro_batches, mode)
            assert passes.index(("forward", batch, 0)) < passes.index(("backward", batch, 0))
            late = spans.pop(f"weights {stage} {batch}", this)
            assert late is this or late.start >= this.end
    assert all(name.startswith("send ") for name in spans)
    assert len(spans) == 2 * (line.stages - 1) * line.micro_batches


@given(LINES)
def test_pairs_wait_at_least_as_long_as_senders_alone(line: Pipeline) -> None:
    assert line.simulate("paired").seconds >= line.simulate("overlapped").seconds - 1e-9 \
        - line.delayed_s[0] * line.micro_batches


def test_pairs_of_two_stages_by_hand() -> None:
    """Forward 1 s, transfer 1 s, backward 2 s."""
    line = Pipeline(stages=2, micro_batches=2, send_s=1.0)
    ends = {span.task.name: span.end for span in line.simulate("paired").spans}
    assert ends["send forward 0 0"] == 2 and ends["backward 1 0"] == 5
    # stage 0 has computed its second forward since 3; the two transfers cross, in turn
    assert sorted([ends["send forward 0 1"], ends["send backward 1 0"]]) == [6, 7]
    assert ends["backward 0 0"] == 9 and ends["backward 1 1"] == 10
    assert ends["send backward 1 1"] == 11 and ends["backward 0 1"] == 13


@given(LINES, st.sampled_from(MODES))
def test_activations_alive_are_those_of_the_first_forwards(line: Pipeline, mode: str) -> None:
    depth = {"eager": lambda behind: 2 * behind - 1}.get(mode, lambda behind: behind)
    assert line.peak_activations(mode) == [
        min(line.micro_batches, depth(line.stages - stage)) for stage in range(line.stages)]
    timeline = line.simulate(mode)
    assert timeline.seconds >= line.ideal_s - line.delayed_s[0] * line.stages - 1e-9
    assert -1e-9 <= idle(timeline, line.stages) <= 1


def test_delayed_gradients_of_weights_hide_sending() -> None:
    """Each stage waits for half of a backward before it, not for all of it."""
    for slices in (0, 1):
        at_once, delayed = (
            Pipeline(stages=4, micro_batches=16, slices=slices, send_s=1.0, delayed_s=late)
            .simulate("eager").seconds for late in (0.0, 1.0))
        assert (at_once, delayed) == (63, 60)


def test_stages_may_differ() -> None:
    """The slowest stage decides: 16 times 6 s, and what comes before and after it."""
    line = Pipeline(stages=2, micro_batches=16, forward_s=(1.0, 2.0), backward_s=(2.0, 4.0))
    assert line.ideal_s == line.simulate("eager").seconds == 15 * 6 + 9
    events = trace(line.simulate("eager"))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"][:2] == ["stage 0", "stage 1"]


@pytest.mark.parametrize("wrong, words", [
    ({"stages": 0}, "stages=0"),
    ({"forward_s": (1.0, 2.0, 3.0)}, "one number for each of 2 stages"),
    ({"send_s": -1.0}, "send_s=-1.0"), ({"delayed_s": 3.0}, "larger than backward_s=2.0"),
])
def test_bad_pipelines_are_named(wrong: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Pipeline(**{"stages": 2, "micro_batches": 2, **wrong})


# Slices that flow through stages: the best cut, timelines, memory, fitted times.


def _times(length: int, context: int) -> float:
    return 0.4 + 0.3 * max(length, 3) + 0.04 * length * context


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    for ends in itertools.product((False, True), repeat=total - 1):
        cuts = [0, *(i + 1 for i, cut_here in enumerate(ends) if cut_here), total]
        yield tuple(b - a for a, b in itertools.pairwise(cuts))


@pytest.mark.parametrize(("length", "stages", "seconds", "slices"), [
    (8, 2, 5.6, (8,)), (12, 4, 13.74, (6, 3, 3)), (14, 8, 25.52, (6, 3, 3, 2))])
def test_published_cases(length: int, stages: int, seconds: float,
                         slices: tuple[int, ...]) -> None:
    found = cut(_times, length, stages)
    assert found.slices == slices and found.seconds == pytest.approx(seconds, abs=1e-9)


@given(st.integers(1, 9), st.integers(1, 8), st.randoms(use_true_random=False))
def test_the_cut_is_the_best_of_all(length: int, stages: int, chance: random.Random) -> None:
    table = {(part, start): chance.choice((chance.random(), 0.5, 2 * chance.random()))
             for part in range(1, length + 1) for start in range(length)}

    def times(part: int, start: int) -> float:
        return table[part, start]

    best = min(latency(slice_seconds(times, slices), stages) for slices in _compositions(length))
    found = cut(times, length, stages)
    assert sum(found.slices) == length and found.seconds == pytest.approx(best, rel=1e-12)
    near = cut(times, length, stages, gap_s=0.25)
    assert best * (1 - 1e-12) <= near.seconds <= best + (stages - 1) * 0.25 + 1e-9


def test_a_bound_is_tried_within_the_gap_of_each_value() -> None:
    """Two slices are best and need the bound 1.2 s; above it one slice has the least sum."""
    seconds = {(1, 0): 1.0, (1, 1): 1.2, (2, 0): 2.1}
    for gap_s in (0.0, 0.1, 0.25):
        found = cut(lambda length, context: seconds[length, context], 2, 3, gap_s=gap_s)
        assert found.slices == (1, 1) and found.seconds == pytest.approx(4.6)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.floats(0, 1), st.floats(0, 1))
def test_batches_and_slices_together(batch: int, length: int, stages: int, fixed: float,
                                     context_s: float) -> None:
    def times(size: int, part: int, start: int) -> float:
        return fixed + max(2, size * part) + context_s * size * part * start

    best = min(
        sum(min(latency(slice_seconds(lambda l, c, size=size: times(size, l, c),  # noqa: E741
                                      slices), stages) for slices in _compositions(length))
            for size in sizes) for sizes in _compositions(batch))
    found = cut_batch(times, batch, length, stages)
    assert found.seconds == pytest.approx(best, rel=1e-12)
    assert sum(size for size, _ in found.groups) == batch
    assert found.seconds == pytest.approx(sum(group.seconds for _, group in found.groups))


def test_times_of_batches_are_fitted_to_each_slice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for a slice with every number of sequences."""
    made, init = [], SliceTimes.__init__
    times = fit_batches([(size, 8, 0, float(size)) for size in (1, 2, 4)])
    monkeypatch.setattr(SliceTimes, "__init__",
                        lambda self, *given: (made.append(given), init(self, *given))[1])
    assert [times(size, 8, 0) for size in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert times(2, 16, 0) == 4 and len(made) == 2


def test_times_of_other_numbers_of_sequences() -> None:
    times = fit_batches([(2, 8, 0, 1.0), (2, 8, 8, 1.5), (4, 8, 0, 3.0), (4, 8, 8, 3.5)])
    assert [times(b, 8, 0) for b in (1, 2, 3, 4, 8)] == [1, 1, 2, 3, 7]
    assert [times(b, 8, 8) for b in (2, 3)] == pytest.approx([1.5, 2.5])


def test_granularity_and_bad_input() -> None:
    assert all(part % 4 == 0 for part in cut(_times, 24, 8, granularity=4).slices)
    for arguments, message in (((0, 2), "length=0"), ((8, 0), "stages=0"), ((1 << 20, 2), "1024"),
                               ((8, 2, 3), "granularity=3")):
        with pytest.raises(ValueError, match=message):
            cut(_times, arguments[0], arguments[1], granularity=(*arguments, 1)[2])
    with pytest.raises(ValueError, match="must be seconds >= 0"):
        cut(lambda length, context: -1.0, 4, 2)
    with pytest.raises(ValueError, match="4 tokens cannot be divided"):
        cut(lambda length, context: float("inf"), 4, 2)
    with pytest.raises(ValueError, match="batch=0"):
        cut_batch(lambda size, length, context: 1.0, 0, 4, 2)


def test_the_formula_is_the_makespan_of_equal_stages() -> None:
    chance = random.Random(0)
    for _ in range(200):
        stages, count = chance.randint(1, 6), chance.randint(1, 7)
        seconds = tuple(chance.random() for _ in range(count))
        none = (0.0,) * count
        given = {"stages": stages, "micro_batches": 1, "slices": count}
        forward = Pipeline(**given, forward_s=seconds, backward_s=none)
        back = Pipeline(**given, forward_s=none, backward_s=seconds)
        for pipeline in (forward, back):
            assert pipeline.simulate().seconds == pytest.approx(latency(seconds, stages))


def test_one_slice_is_1f1b_and_slices_keep_less_alive() -> None:
    one = [Pipeline(stages=4, micro_batches=8, slices=1, send_s=send) for send in (0.0, 0.5)]
    assert one[0].simulate().seconds == (8 + 4 - 1) * 3
    assert one[1].simulate().seconds > one[0].simulate().seconds
    assert one[0].peak_activations(sizes=[64]) == [256, 192, 128, 64]
    four = Pipeline(stages=4, micro_batches=8, slices=4, forward_s=0.25, backward_s=0.5)
    assert four.simulate().seconds < 0.85 * one[0].simulate().seconds
    assert four.peak_activations(sizes=[16] * 4) == [112, 96, 80, 64]
    with pytest.raises(ValueError, match="for each of 1 slices"):
        Pipeline(stages=2, micro_batches=1, slices=1, backward_s=(1.0, 2.0))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_every_slice_once_and_backward_after_the_later_slices(stages: int, batches: int,
                                                              slices: int) -> None:
    for stage in range(stages):
        units = order(stages, stage, batches, slices=slices)
        assert len(set(units)) == len(units) == 2 * batches * slices
        place = {unit: number for number, unit in enumerate(units)}
        for batch in range(batches):
            last = place["forward", batch, slices - 1]
            assert last < place["backward", batch, slices - 1]
            for part in range(1, slices):
                assert place["forward", batch, part - 1] < place["forward", batch, part]
                assert place["backward", batch, part] < place["backward", batch, part - 1]


def test_times_are_fitted_to_measurements() -> None:
    def true(length: int, context: int) -> float:
        return 0.5 + 0.01 * max(length, 30) + (1e-3 * context + 2e-5 * length * context)

    samples = [(length, start, true(length, start)) for length in (16, 32, 64, 128)
               for start in range(0, 128, length)]
    times = fit([*samples, *((16, 0, 9.0), (16, 0, true(16, 0)))])
    for length, start in ((16, 48), (24, 72), (64, 64), (100, 20), (128, 0), (256, 0)):
        assert times(length, start) == pytest.approx(true(length, start), rel=0.03)
    assert times(1, 0) == times(16, 0)
    assert fit([(8, 0, 2.0)])(16, 8) == 4.0
    for bad, message in (([], "no slice without context"), ([(0, 0, 1.0)], "is invalid")):
        with pytest.raises(ValueError, match=message):
            fit(bad)


def _profile(**values: Any) -> SliceProfile:
    times = fit([(length, start,
                  1e-4 + 1e-5 * max(length, 32) + 1e-7 * length * (start + length / 2))
                 for length in (32, 64, 128, 256) for start in range(0, 256, length)])
    given = {"length": 256, "multiple": 2, "stages": 4, "micro_batches": 2, "forward": times,
             "backward": times, **values}
    return SliceProfile(**given)


def test_slices_are_chosen_by_simulated_steps() -> None:
    profile = _profile()
    slices, seconds = profile.best()
    assert profile.granularity == 2 and sum(slices) == 256 and len(slices) > 1
    assert all(part % 2 == 0 for part in slices)
    for count in (1, 2, 4, 8):
        assert seconds <= profile.pipeline(equal_slices(256, 2, count)).simulate().seconds * 1.01
    slow = _profile(send_s=0.1)
    assert slow.best()[0] == (256,)  # what is fixed about a transfer costs more than slices gain
    assert _profile(micro_batches=100).best()[1] <= _profile(
        micro_batches=100).pipeline((256,)).simulate().seconds
    assert _profile(length=254, multiple=2).granularity == 2
    assert _profile(length=4096).granularity == 32
    assert equal_slices(22, 2, 3) == (8, 8, 6)


def test_given_slices_are_compared_with_other_schedules() -> None:
    samples = [[length, start, 1e-3 * length * (1 + 1e-3 * start)] for length in (16, 32, 64)
               for start in range(0, 64, length)]
    given = {"forward_s": [0.064] * 4, "backward_s": [0.128] * 4, "micro_batches": 2,
             "sequence": 64, "slice_samples": samples}
    best = {one.schedule: one for one in predict(StageProfile(**given))}
    mine = {one.schedule: one for one in predict(StageProfile(**given, slices=[40, 24]))}
    assert mine["terapipe"].slices == (40, 24) != best["terapipe"].slices
    assert best["terapipe"].seconds < mine["terapipe"].seconds < mine["1f1b"].seconds
    with pytest.raises(ValueError, match=r"slices=\[40\]"):
        StageProfile(**given, slices=[40])
