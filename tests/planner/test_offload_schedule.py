"""Offload schedules: streams, stalls, an exact ledger of memory."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_plugin.planner.offload.schedule import STREAMS, OffloadSchedule, OffloadStep

pytestmark = pytest.mark.fast


def test_a_schedule_by_hand() -> None:
    steps = (
        OffloadStep("in a", "in", 2.0, takes=10, block="a"),
        OffloadStep("in b", "in", 3.0, takes=20, block="b"),
        OffloadStep("a", "compute", 1.0, ("in a",), takes=5, frees=15, block="a"),
        OffloadStep("b", "compute", 1.0, ("in b",), takes=5, block="b"),
        OffloadStep("out b", "out", 4.0, ("b",), frees=25, block="b"),
    )
    outcome = OffloadSchedule(steps, limit=135, base=100).run()
    assert outcome.seconds == 10.0
    assert outcome.stalls == {"a": 2.0, "b": 2.0} and outcome.stall_s == 4.0
    assert outcome.memory == ((0.0, 100), (0.0, 110), (2.0, 130), (2.0, 135), (3.0, 120),
                              (5.0, 125), (10.0, 100))
    assert (outcome.peak, outcome.peak_step) == (135, "a")
    assert (outcome.moved_in, outcome.moved_out) == (30, 25)
    assert outcome.occupancy == 0.2
    assert outcome.started["b"] == 5.0 and outcome.ended["b"] == 6.0
    events = json.loads(json.dumps(outcome.trace()))["traceEvents"]
    assert {e["ph"] for e in events} == {"X", "M", "C"}
    with pytest.raises(ValueError, match="step 'a' raises .* to 135 bytes.*limit of 134"):
        OffloadSchedule(steps, limit=134, base=100).run()


def test_what_ends_frees_before_what_starts_takes() -> None:
    steps = (OffloadStep("a", "compute", 1.0, takes=8, frees=8),
             OffloadStep("none", "compute", 0.0, ("a",), takes=8, frees=8),
             OffloadStep("b", "in", 1.0, ("none",), takes=8))
    assert OffloadSchedule(steps, limit=8).run().peak == 8


def test_one_queue_of_copies_takes_turns() -> None:
    steps = (OffloadStep("in", "in", 2.0, takes=8), OffloadStep("out", "out", 3.0),
             OffloadStep("again", "in", 1.0))
    assert OffloadSchedule(steps).run().seconds == 3.0
    assert OffloadSchedule(steps, duplex=False).run().seconds == 6.0


@pytest.mark.parametrize(("make", "match"), [
    (lambda: OffloadStep("a", "side", 1.0),
     "stream 'side' is unknown. Choose from compute, in, out"),
    (lambda: OffloadStep("a", "in", float("inf")), "seconds=inf must be a finite number"),
    (lambda: OffloadStep("a", "in", 1.0, takes=-1), "takes=-1"),
    (lambda: OffloadSchedule((OffloadStep("a", "out", 1.0, frees=3),)).run(),
     "'a' frees 3 bytes, which is 3 more"),
    (lambda: OffloadSchedule((), limit=1, base=2).run(), "the resident memory .* 2 bytes"),
    (lambda: OffloadSchedule((OffloadStep("a", "in", 1.0, ("b",)),)).run(), "issued before: .'b'."),
])
def test_bad_schedules_are_refused(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OffloadStep, ...]:
    """Random steps with times that often coincide; each frees what it takes, or all at the end."""
    steps: list[OffloadStep] = []
    for index in range(draw(st.integers(0, 12))):
        names = [s.name for s in steps]
        after = tuple(draw(st.sets(st.sampled_from(names), max_size=3))) if names else ()
        takes = draw(st.integers(0, 5))
        steps.append(OffloadStep(str(index), draw(st.sampled_from(STREAMS)),
                                 draw(st.integers(0, 3)),
                                 after, takes, draw(st.sampled_from((0, takes)))))
    return tuple(steps)


@given(schedules())
def test_the_ledger_equals_a_count_at_every_instant(steps: tuple[OffloadStep, ...]) -> None:
    outcome = OffloadSchedule(steps, base=7).run()
    assert outcome.stall_s + outcome.timeline.busy("compute") == max(
        (s.end for s in outcome.timeline.spans if s.task.resource == "compute"), default=0)
    spans = dict(zip((s.name for s in steps), outcome.timeline.spans, strict=True))
    for time in (0.5 + n for n in range(40)):  # ends and starts are whole numbers
        held = 7 + sum(s.takes for s in steps if spans[s.name].start < time)
        held -= sum(s.frees for s in steps if spans[s.name].end < time)
        last = [size for at, size in outcome.memory if at < time][-1]
        assert held == last <= outcome.peak
    assert outcome.peak == max(size for _, size in outcome.memory)
