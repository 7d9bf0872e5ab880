"""The tuner as a state machine: no ranks, no clock, only what it is told."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.tuning.engine import Tuner, TunerSettings

CHOICES = list(legal_choices(2, 8, degrees=(1, 2, 4), algorithms=("linear", "2dh")))


def tuner(predicted: dict[LayoutChoice, float] | None = None, **rules) -> Tuner:
    table = predicted or {c: 1.0 + i for i, c in enumerate(CHOICES)}
    return Tuner(lambda bucket: table, TunerSettings(**rules))


def drive(t: Tuner, truth, calls: int, bucket=lambda call: (0,),
          delay: int = 0) -> tuple[float, list[LayoutChoice]]:
    """Run `calls` calls against true seconds (choice, call) -> s. Returns total time and choices;
    times arrive `delay` calls late.
    """
    total, chosen, late = 0.0, [], []
    for call in range(calls):
        if len(late) > delay:
            t.record(*late.pop(0))
        choice = t.choose(bucket(call))
        seconds = truth(choice, call)
        total += seconds
        chosen.append(choice)
        if t.wants_time(bucket(call)):
            late.append((bucket(call), choice, seconds))
    return total, chosen


def test_finds_the_best_of_all_when_all_are_tried() -> None:
    truth = {c: random.Random(i).uniform(1, 2) for i, c in enumerate(CHOICES)}
    t = tuner(tries=len(CHOICES), within=1e9, allowance=1000)
    _, chosen = drive(t, lambda c, _: truth[c], 200)
    assert chosen[-1] == min(CHOICES, key=truth.get)
    assert chosen.count(chosen[-1]) == 200 - 2 * (len(CHOICES) - 1)


@given(st.lists(st.floats(0.5, 8.0), min_size=len(CHOICES), max_size=len(CHOICES)),
       st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_regret_is_bounded_by_the_trials(times: list[float], delay: int) -> None:
    """Total time <= best of the tried * calls + each trial's own excess + hysteresis and waiting
    for late times.
    """
    truth = dict(zip(CHOICES, times, strict=True))
    t = tuner(tries=4, within=1e9, samples=2)
    calls = 300
    total, chosen = drive(t, lambda c, _: truth[c], calls, delay=delay)
    tried = CHOICES[:4]
    best = min(truth[c] for c in tried)
    assert set(chosen) <= set(tried)
    exploring = sum(2 * (truth[c] - best)
                    for c in tried) + (delay + 1) * (max(truth[c] for c in tried) - best)
    assert total <= calls * best / (1 - t.settings.hysteresis) + exploring + 1e-9


def test_few_candidates_are_tried_and_exploring_stays_in_its_budget() -> None:
    t = tuner()
    _, chosen = drive(t, lambda c, _: 1.0 + c.d, 2000, bucket=lambda call: (call // 500,))
    assert t.explored <= 0.02 * 2000
    assert len(set(chosen)) <= 4


def test_candidates_predicted_far_slower_are_not_tried() -> None:
    t = tuner({c: 1.0 if c.r == 1 and c.d == 1 else 5.0 for c in CHOICES}, within=2.0)
    _, chosen = drive(t, lambda c, _: 1.0, 50)
    assert {(c.r, c.d) for c in chosen} == {(1, 1)}


def test_what_is_always_timed_is_found_however_slow_it_is_predicted() -> None:
    plain, gone = CHOICES[-1], "no candidate"
    t = Tuner(lambda bucket: {c: 1.0 + i for i, c in enumerate(CHOICES)},
              TunerSettings(tries=2), always=lambda: [plain, gone])
    _, chosen = drive(t, lambda c, _: 0.5 if c == plain else 1.0, 30)
    assert chosen[-1] == plain and set(chosen) == {*CHOICES[:2], plain}


def test_a_gain_within_the_hysteresis_changes_nothing() -> None:
    truth = {c: 1.0 if i == 0 else 0.98 for i, c in enumerate(CHOICES)}
    t = tuner(hysteresis=0.03)
    _, chosen = drive(t, lambda c, _: truth[c], 100)
    assert chosen[-1] == CHOICES[0]
    _, chosen = drive(tuner(hysteresis=0.01), lambda c, _: truth[c], 100)
    assert chosen[-1] != CHOICES[0]


def test_each_bucket_has_its_own_best() -> None:
    def truth(choice: LayoutChoice, call: int) -> float:
        few = call % 2
        return (2.0 if choice.r == 0 else 1.0) if few else (1.0 if choice.r == 0 else 2.0)

    t = tuner({c: 1.0 for c in CHOICES if c.d == 1}, tries=99, allowance=1000)
    _, chosen = drive(t, truth, 200, bucket=lambda call: (call % 2,))
    assert all((c.r == 0) == (call % 2 == 0) for call, c in enumerate(chosen) if call > 60)


def test_drift_is_noticed_once_and_explored_again() -> None:
    first, second = CHOICES[0], CHOICES[1]

    def truth(choice: LayoutChoice, call: int) -> float:
        return {first: 1.0 if call < 200 else 3.0, second: 1.5}.get(choice, 9.0)

    t = tuner()
    _, chosen = drive(t, truth, 500)
    assert chosen[150] == first and chosen[-1] == second
    assert sum(d.event == "explore" for d in t.log) == 2
    switched = max(i for i, c in enumerate(chosen) if c == first)
    assert 200 <= switched < 260


def test_noise_below_the_drift_threshold_explores_nothing_again() -> None:
    noise = random.Random(3)
    t = tuner()
    drive(t, lambda c, _: (1.0 + CHOICES.index(c)) * noise.uniform(0.9, 1.1), 1000)
    assert sum(d.event == "explore" for d in t.log) == 1


def test_single_outliers_are_no_drift() -> None:
    t = tuner()
    drive(t, lambda c, call: 10.0 if call % 16 == 0 else 1.0 + CHOICES.index(c), 1000)
    assert sum(d.event == "explore" for d in t.log) == 1


def test_times_that_never_arrive_do_not_block() -> None:
    t = tuner()
    chosen = [t.choose((0,)) for _ in range(40)]
    assert chosen[-1] == CHOICES[0] and t.log[-1].event == "keep"


def test_a_new_bucket_learns_from_its_neighbour() -> None:
    """Where the model is wrong about a choice in one bucket, it is corrected in the next, also
    without a trial there.
    """
    table = {c: 1.0 + 0.1 * i for i, c in enumerate(CHOICES[:4])}
    truth = {c: s * (5.0 if c == CHOICES[0] else 1.0) for c, s in table.items()}
    t = tuner(table, allowance=8, budget=0.0)
    drive(t, lambda c, _: truth[c], 30)
    assert t.choose((1,)) == CHOICES[1]


def test_ranks_with_different_clocks_decide_alike() -> None:
    """Each rank measures something else; what is recorded is the maximum, so all copies stay in
    step.
    """
    ranks, noise = 8, [random.Random(rank) for rank in range(8)]
    copies = [tuner(drift=0.02, patience=1, allowance=500) for _ in range(ranks)]
    for call in range(600):
        bucket = (call // 37 % 3,)
        chosen = {copy.choose(bucket) for copy in copies}
        assert len(chosen) == 1
        assert len({copy.wants_time(bucket) for copy in copies}) == 1
        local = [
            noise[r].uniform(0.5, 3.0) * (1 + CHOICES.index(next(iter(chosen))))
            for r in range(ranks)
        ]
        for copy in copies:
            copy.record(bucket, next(iter(chosen)), max(local))
    assert len({json.dumps(copy.state()) for copy in copies}) == 1
    assert copies[0].explored > 16  # the noise made it explore: the agreement was put to the test


def test_state_round_trip() -> None:
    t, again = tuner(), tuner()
    drive(t, lambda c, _: 2.0 - c.d / 4, 200, bucket=lambda call: (call % 3, 1))
    again.load_state(json.loads(json.dumps(t.state())))
    assert json.loads(json.dumps(again.state())) == json.loads(json.dumps(t.state()))
    for bucket in ((0, 1), (1, 1), (2, 1)):
        assert again.choose(bucket) == t.choose(bucket)


def test_state_of_other_ranks_keeps_what_is_still_possible() -> None:
    t = tuner()
    drive(t, lambda c, _: 1.0 if c.r == 4 else 2.0, 100)
    smaller = Tuner(lambda bucket: {LayoutChoice(r=0): 1.0})
    smaller.load_state(t.state())
    assert smaller.choose((0,)) == LayoutChoice(r=0)
    with pytest.raises(ValueError, match="version 0"):
        smaller.load_state({**t.state(), "version": 0})


def test_state_from_before_a_field_existed() -> None:
    """Choices had no `send`: they are those with its default. Where it is open now, a bucket is
    measured again, and said to be.
    """
    t = tuner()
    drive(t, lambda c, _: 2.0 - c.d / 4, 200)
    old = json.loads(json.dumps(t.state()))
    for bucket in old["buckets"]:
        for choice in (bucket["settled"], *(c for c, _ in bucket["measured"])):
            del choice["send"]
    same = tuner()
    assert same.load_state(old) == []
    assert json.loads(json.dumps(same.state())) == json.loads(json.dumps(t.state()))
    sends = {dataclasses.replace(c, send=send): 1.0 for c in CHOICES for send in ("rows", "ranks")}
    more = Tuner(lambda bucket: sends)
    assert more.load_state(old) == ["send was not known when it was saved"]
    [bucket] = old["buckets"]
    assert not more.known(tuple(bucket["bucket"]))
    assert [len(b["measured"]) for b in more.state()["buckets"]] == [len(bucket["measured"])]
    gone = Tuner(lambda bucket: {LayoutChoice(r=0, kernel="loop"): 1.0})
    [why] = gone.load_state(old)
    assert "is not possible here any more" in why


def test_no_candidates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate is possible"):
        Tuner(lambda bucket: {}).choose((0,))


def names(**rules) -> Tuner[int, str]:
    """A tuner of names without predictions."""
    return Tuner(lambda bucket: dict.fromkeys("cba"),
                 TunerSettings(tries=None, allowance=math.inf, **rules))


def test_without_predictions_all_are_tried_in_their_order() -> None:
    t = names(warm_up=1, samples=2)
    assert [t.choose(0) for _ in range(9)] == ["c", "b", "a"] * 3
    assert t.choose(0) == "c" and t.exploring(0) and not t.known(0)


def test_a_warm_up_does_not_count_and_a_slow_one_leaves_one_sample() -> None:
    for slow, rounds in ((10.0, 4), (1.0, 2)):
        t = names(warm_up=1, samples=3, slow_warm_up_s=slow)
        issued = []
        for name in t.trials(0):
            issued.append(name)
            t.record(0, name, {"a": 0.1, "b": 2.0, "c": 2.0}[name] if len(issued) < 4 else
                     {"a": 2.0, "b": 0.1, "c": 2.0}[name])
        assert issued == ["c", "b", "a"] * rounds and t.known(0)
        assert t.choose(0) == "b" and t.latest(0).measured_s == 0.1


@pytest.mark.parametrize("delay", [0, 2])
def test_candidates_far_behind_are_timed_once(delay: int) -> None:
    """One sample each, then only those within the factor get the others, late times or not; before
    that, one of a first call in the process.
    """
    slow = {c: 1.0 + i for i, c in enumerate(CHOICES[:4])}
    t = tuner(dict.fromkeys(slow, 1.0), tries=4, samples=4, prune=2.5, allowance=1000)
    for first, bucket in ((1, (0,)), (0, (9,))):
        _, chosen = drive(t, lambda c, _: slow[c], 60, lambda call, b=bucket: b, delay)
        trials = [chosen[:48].count(c) for c in list(slow)[2:]]
        assert all(1 <= n - first <= 1 + (delay > 0) for n in trials) and chosen[-1] == CHOICES[0]
        assert chosen.count(CHOICES[1]) == 4  # 2.0 <= 2.5: all samples


def test_what_a_first_call_costs_excludes_nobody() -> None:
    """The fastest one takes long in its first call of the process."""
    fast, slow = CHOICES[:2]
    t, seen = tuner({fast: 1.0, slow: 1.0}, prune=1.5), []

    def truth(choice: LayoutChoice, call: int) -> float:
        seen.append(choice)
        return 0.5 if choice == fast and seen.count(fast) > 1 else 1.0 + 9.0 * (choice == fast)

    _, chosen = drive(t, truth, 10)
    assert chosen.count(slow) == 2 and chosen[-1] == fast


def test_times_of_candidates_that_were_left_early_correct_no_prediction() -> None:
    predicted, (near, far) = {CHOICES[0]: 1.0, CHOICES[1]: 1.0}, CHOICES[:2]
    t = tuner(predicted, samples=3, prune=1.5, tries=2)
    drive(t, lambda c, _: 2.0 if c == near else 50.0, 10)
    measured = t.entries[(0,)].measured
    assert measured == {near: 2.0} and t.latest((0,)).choice == near
    t.known((1,))
    assert t.entries[(1,)].predicted == {near: 2.0, far: 2.0}


def settled_with(finals: int, early: dict[str, list[float]], truth: dict[str, float],
                 **rules) -> tuple[str, list[str]]:
    """What is settled, and the trials, where the first samples of a name are `early`."""
    t, issued = names(finals=finals, **rules), []
    for name in t.trials(0):
        issued.append(name)
        times = early.get(name, [])
        number = issued.count(name) - 1
        t.record(0, name, times[number] if number < len(times) else truth[name])
    return t.latest(0).choice, issued


@pytest.mark.parametrize("early", [{"b": [1.3, 1.3]}, {"a": [0.8, 1.1]}, {"b": [1.2, 1.3],
                                                                       "a": [0.9, 0.9]}], ids=str)
def test_two_finalists_are_timed_again_and_the_better_one_wins(early: dict) -> None:
    """Noise in the first samples slows the best one, or flatters its rival."""
    truth = {"a": 1.1, "b": 1.0, "c": 1.4}
    assert settled_with(0, early, truth)[0] == "a"
    settled, issued = settled_with(3, early, truth)
    assert settled == "b" and issued == ["c", "b", "a"] * 2 + ["a", "b"] * 3


def test_finals_choose_better_under_noise() -> None:
    """Of ten candidates with noise of up to a half, over many runs: the mean loss falls."""
    def loss(finals: int) -> float:
        total = 0.0
        for seed in range(200):
            noise = random.Random(seed)
            truth = {c: noise.uniform(1.0, 1.3) for c in CHOICES[:10]}
            t = tuner(dict.fromkeys(truth, 1.0), tries=10, finals=finals, allowance=1000)
            _, chosen = drive(t, lambda c, _, truth=truth, noise=noise: truth[c] * noise.uniform(
                1.0, 1.5), 40)
            assert sum(d.event == "settle" for d in t.log) == 1
            total += truth[chosen[-1]] / min(truth.values()) - 1
        return total / 200

    assert loss(3) < 0.9 * loss(0)


def test_no_finals_where_nothing_is_close_or_times_are_not_equal_yet() -> None:
    truth = {"a": 5.0, "b": 1.0, "c": 5.0}
    assert len(settled_with(3, {}, truth, samples=4, prune=1.5)[1]) < 3 * 4  # no rival
    t, issued = names(finals=3), []
    for name in t.trials(0):
        issued.append(name)
        t.record(0, name, 1.0, lambda values: values)
    assert issued == ["c", "b", "a"] * 2 and t.known(0)


@pytest.mark.parametrize("delay", [0, 2, 5])
def test_finals_with_late_times_and_with_none(delay: int) -> None:
    truth = {c: 1.0 + 0.01 * i for i, c in enumerate(CHOICES[:3])}
    t = tuner(truth, tries=3, finals=2, hysteresis=0.0)
    _, chosen = drive(t, lambda c, _: truth[c], 60, delay=delay)
    assert chosen[-1] == CHOICES[0] and chosen.count(CHOICES[1]) == 4
    # the times of finals never arrive: what was measured before them decides
    t = tuner(truth, tries=3, finals=2)
    drive(t, lambda c, _: truth[c] * (2.0 if c == CHOICES[0] else 1.0), 6)
    t.record((0,), CHOICES[2], truth[CHOICES[2]])
    for _ in range(20):
        t.choose((0,))
    assert t.latest((0,)).event == "settle" and t.latest((0,)).choice == CHOICES[1]


def test_a_candidate_that_cannot_run_is_not_tried_again() -> None:
    t, issued = names(warm_up=1), []
    for name in t.trials(0):
        issued.append(name)
        t.record(0, name, math.inf if name == "c" else 1.0)
    assert issued == ["c", "b", "a", "b", "a", "b", "a"]
    assert t.latest(0).choice == "b" and "c not measured, b 1 s" in t.latest(0).why
    t = names()
    for name in t.trials(0):
        t.record(0, name, math.inf)
    assert t.known(0) and t.latest(0).choice == "c" and t.latest(0).event == "keep"


def test_ranks_agree_when_a_bucket_settles() -> None:
    """Each has its own times; the function that reduces them is called once, with one value per
    candidate in the candidates' order.
    """
    mine = [{"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 9.0, "b": 2.0, "c": 1.0}]
    agreed = [max(m[c] for m in mine) for c in "cba"]
    for times in mine:
        t, asked = names(), []

        def agree(values: list[float], asked=asked) -> list[float]:
            asked.append(values)
            return agreed

        for name in t.trials(0):
            t.record(0, name, times[name], agree)
        assert t.latest(0).choice == "b" and asked == [[times[c] for c in "cba"]]


def test_memory_replaces_trials() -> None:
    class Known:
        def __init__(self) -> None:
            self.results: dict[int, tuple[str, str]] = {1: ("a", "by hand"), 2: ("gone", "")}

        def get(self, bucket: int) -> tuple[str, str] | None:
            return self.results.get(bucket)

        def put(self, bucket: int, name: str, why: str) -> None:
            self.results[bucket] = name, why

    memory = Known()
    t = Tuner(lambda bucket: dict.fromkeys("cba"), TunerSettings(tries=None), memory)
    assert t.known(1) and t.choose(1) == "a"
    assert (t.latest(1).event, t.latest(1).why) == ("restore", "by hand")
    assert not t.known(2) and not t.known(3)
    for name in t.trials(3):
        t.record(3, name, {"a": 3.0, "b": 1.0, "c": 2.0}[name])
    assert memory.results[3] == ("b", t.latest(3).why)
    assert t.latest(3).why == "measured: c 2 s, b 1 s, a 3 s"


def test_decisions_are_reported_once() -> None:
    t = tuner()
    drive(t, lambda c, _: 1.0, 50)
    assert [d.event for d in t.pop_decisions()] == ["predict", "explore", "settle"]
    assert t.pop_decisions() == () and len(t.log) == 3


def test_needs_no_torch() -> None:
    code = ("import sys, moe_plugin.tuning.engine, moe_plugin.planner; assert 'torch' not in "
            "sys.modules")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
