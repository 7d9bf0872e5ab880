"""Simulated pipelines: published tables, and properties of any of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.cli.planning.pipeline import trace
from moe_plugin.planner.pipeline.schedules import MODES, Pipeline, idle, order

pytestmark = pytest.mark.fast

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
