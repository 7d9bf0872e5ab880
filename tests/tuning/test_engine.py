"""The tuner as a state machine: no ranks, no clock, only what it is told."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_plugin.planner.choice import LayoutChoice, legal_choices
from moe_plugin.planner.trials import ContestRules
from moe_plugin.tuning.decisions import KeptDecision, TunerSettings
from moe_plugin.tuning.engine import DISTURBED, PAUSE, Tuner

CHOICES = list(legal_choices(2, 8, degrees=(1, 2, 4), algorithms=("linear", "2dh")))


def tuner(predicted: dict[LayoutChoice, float] | None = None, **rules) -> Tuner:
    table = predicted or {c: 1.0 + i for i, c in enumerate(CHOICES)}
    contest = {name: rules.pop(name) for name in ("least", "gain", "behind") if name in rules}
    return Tuner(lambda bucket: table,
                 TunerSettings(contest=ContestRules(**{"least": 2, **contest}), **rules))


def drive(t: Tuner, truth, calls: int, bucket=lambda call: (0,),
          delay: int = 0) -> tuple[float, list[LayoutChoice]]:
    """Run `calls` calls against true seconds (choice, call) -> s. Returns total time and choices;
    times arrive `delay` calls late.
    """
    total, chosen, late = 0.0, [], []
    for call in range(calls):
        if late and late[0][0] + delay < call:
            t.record(*late.pop(0)[1])
        choice = t.choose(bucket(call))
        seconds = truth(choice, call)
        total += seconds
        chosen.append(choice)
        if t.wants_time(bucket(call)):
            late.append((call, (bucket(call), choice, seconds)))
    return total, chosen


def test_finds_the_best_of_all_when_all_are_tried() -> None:
    truth = {c: random.Random(i).uniform(1, 2) for i, c in enumerate(CHOICES)}
    t = tuner(tries=len(CHOICES), within=1e9, allowance=1000)
    _, chosen = drive(t, lambda c, _: truth[c], 200)
    assert truth[chosen[-1]] <= min(truth.values()) / (1 - t.settings.contest.gain)
    assert all(2 <= chosen.count(c) <= 5 for c in CHOICES if c != chosen[-1])


@given(st.lists(st.floats(0.5, 8.0), min_size=len(CHOICES), max_size=len(CHOICES)),
       st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_regret_is_bounded_by_the_trials(times: list[float], delay: int) -> None:
    """Total time <= best of the tried * calls + each trial's own excess + hysteresis and waiting
    for late times.
    """
    truth = dict(zip(CHOICES, times, strict=True))
    t = tuner(tries=4, within=1e9)
    calls = 300
    total, chosen = drive(t, lambda c, _: truth[c], calls, delay=delay)
    tried = CHOICES[:4]
    best = min(truth[c] for c in tried)
    assert set(chosen) <= set(tried) and t.explored <= t.settings.allowance
    # of each candidate one first call, two rounds and two checks; and waiting for late times
    exploring = sum(5 * (truth[c] - best) for c in tried) + 4 * (delay + 1) * (
        max(truth[c] for c in tried) - best)
    assert total <= calls * best / (1 - t.settings.contest.gain) + exploring + 1e-9


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
    t = tuner(gain=0.03)
    _, chosen = drive(t, lambda c, _: truth[c], 100)
    assert chosen[-1] == CHOICES[0]
    _, chosen = drive(tuner(gain=0.01), lambda c, _: truth[c], 100)
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
    t = tuner(table, allowance=8, budget=0.0, behind=9.0)
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
    assert more.load_state(old) == ["send was unknown when the state was saved"]
    [bucket] = old["buckets"]
    assert not more.known(tuple(bucket["bucket"]))
    assert [len(b["measured"]) for b in more.state()["buckets"]] == [len(bucket["measured"])]
    gone = Tuner(lambda bucket: {LayoutChoice(r=0, kernel="loop"): 1.0})
    [why] = gone.load_state(old)
    assert "is not possible any more" in why


def test_no_candidates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate is possible"):
        Tuner(lambda bucket: {}).choose((0,))


def names(**rules) -> Tuner[int, str]:
    """A tuner of names without predictions."""
    return Tuner(lambda bucket: dict.fromkeys("cba"), TunerSettings(
        tries=None, allowance=math.inf, contest=ContestRules(**{"least": 2, **rules})))


def issue(t: Tuner[int, str], seconds, calls: int = 60) -> list[str]:
    """The trials of some calls, whose times are `seconds(name, how many it had)`."""
    issued: list[str] = []
    for _ in range(calls):
        name = t.choose(0)
        if t.wants_time(0) and t.entries[0].running:
            t.record(0, name, seconds(name, issued.count(name)))
            issued.append(name)
    return issued


def test_without_predictions_all_are_tried_in_their_order() -> None:
    t = names(warm_up=1)
    assert [(t.choose(0), t.record(0, "cba"[i % 3], 1.0))[0] for i in range(9)] == list("cba" * 3)
    assert t.choose(0) == "c" and not t.exploring(0) and t.known(0)


def test_a_warm_up_does_not_count() -> None:
    t = names(warm_up=1)
    issued = issue(t, lambda name, n: {"a": 1.0, "b": 0.9, "c": 1.0}[name] if n else
                   {"a": 0.1, "b": 2.0, "c": 2.0}[name], 12)
    assert "".join(issued).startswith("cba" * 3) and t.choose(0) == "b"


@pytest.mark.parametrize("delay", [0, 2])
def test_candidates_far_behind_are_timed_twice(delay: int) -> None:
    """The first call in a process may be one of them."""
    slow = {c: 1.0 + i for i, c in enumerate(CHOICES[:4])}
    t = tuner(dict.fromkeys(slow, 1.0), tries=4, least=4, behind=2.5, allowance=1000)
    for bucket in ((0,), (9,)):
        _, chosen = drive(t, lambda c, _: slow[c], 60, lambda call, b=bucket: b, delay)
        assert [chosen[:48].count(c) for c in list(slow)[2:]] == [2, 2]
        assert chosen[-1] == CHOICES[0] and chosen.count(CHOICES[1]) >= 4


def test_what_a_first_call_costs_excludes_nobody() -> None:
    """The fastest one takes long in its first call of the process."""
    fast, slow = CHOICES[:2]
    t, seen = tuner({slow: 1.0, fast: 1.0}), []

    def truth(choice: LayoutChoice, call: int) -> float:
        seen.append(choice)
        return 0.5 if choice == fast and seen.count(fast) > 1 else 1.0 + 9.0 * (choice == fast)

    _, chosen = drive(t, truth, 10)
    assert chosen[-1] == fast


def test_times_of_candidates_that_were_left_early_correct_no_prediction() -> None:
    predicted, (near, far) = {CHOICES[0]: 1.0, CHOICES[1]: 1.0}, CHOICES[:2]
    t = tuner(predicted, tries=2)
    drive(t, lambda c, _: 2.0 if c == near else 50.0, 10)
    measured = t.entries[(0,)].measured
    assert measured == {near: 2.0} and t.latest((0,)).choice == near
    t.known((1,))
    assert t.entries[(1,)].predicted == {near: 2.0, far: 2.0}


def test_a_candidate_that_cannot_run_is_not_tried_again() -> None:
    t = names(warm_up=1)
    assert "".join(issue(t, lambda name, _: math.inf if name == "c" else 1.0, 9)) == "cbababa"[:7]
    assert t.latest(0).choice == "b" and "c not measured, b 1 s" in t.latest(0).why
    t = names()
    issue(t, lambda name, _: math.inf)
    assert t.known(0) and t.latest(0).choice == "c" and t.latest(0).event == "keep"


class Known:
    """Decisions of earlier processes."""

    def __init__(self, **results: KeptDecision) -> None:
        self.results = {int(name[1:]): kept for name, kept in results.items()}

    def get(self, bucket: int) -> KeptDecision | None:
        return self.results.get(bucket)

    def put(self, bucket: int, kept: KeptDecision) -> None:
        self.results[bucket] = kept

    def forget(self, bucket: int) -> None:
        self.results.pop(bucket, None)


def test_memory_replaces_trials() -> None:
    memory = Known(_1=KeptDecision("a", "by hand"), _2=KeptDecision("gone", ""))
    t = Tuner(lambda bucket: dict.fromkeys("cba"), TunerSettings(tries=None), memory)
    assert t.known(1) and t.choose(1) == "a"
    assert (t.latest(1).event, t.latest(1).why) == ("restore", "by hand")
    assert not t.known(2) and not t.known(3)
    for _ in range(12):
        name = t.choose(3)
        if t.wants_time(3):
            t.record(3, name, {"a": 1.3, "b": 1.0, "c": 1.2}[name])
    kept = memory.results[3]
    assert (kept.name, kept.why) == ("b", "measured: c 1.2 s, b 1 s, a 1.3 s")
    assert kept.spread == 0 and kept.seconds == {"a": 1.3, "b": 1.0, "c": 1.2}


def test_a_kept_decision_that_is_wrong_is_found_out_and_replaced() -> None:
    """By one round after a few calls, which others confirm."""
    memory = Known(_0=KeptDecision("a", "in a bad moment", 0.01, {"a": 0.1, "b": 70.0}, {"c": 9.0}))
    t = Tuner(lambda bucket: dict.fromkeys("cba"),
              TunerSettings(tries=None, watch=math.inf), memory)
    assert t.known(0)
    issued = issue(t, lambda name, _: {"a": 1.5, "b": 1.0, "c": 9.0}[name], 40)
    assert t.latest(0).choice == "b" and memory.results[0].name == "b" and len(issued) <= 12
    assert "c" not in issued  # what was far behind is not tried again as long as it costs much


def test_a_decision_that_is_no_better_than_chance_is_not_kept() -> None:
    memory = Known()
    t = Tuner(lambda bucket: dict.fromkeys("ab"), TunerSettings(
        tries=None, contest=ContestRules(smallest=False, behind=9.0)), memory)
    issued: list[str] = []
    for _ in range(400):
        name = t.choose(0)
        if t.wants_time(0) and t.entries[0].running:
            issued.append(name)
            t.record(0, name, 1.0 if name == "a" else (0.4, 2.4)[issued.count("b") % 2])
    assert t.latest(0).choice == "a" and not memory.results
    assert "differ by less than their spread" in t.latest(0).why


def test_calls_without_a_time_are_not_watched() -> None:
    watched: list[float] = []
    entry = SimpleNamespace(contest=None, running=False, settled="a")
    tuner = SimpleNamespace(entries={0: entry}, _watch=lambda *args: watched.append(args[2]))
    for seconds in (0.0, 1.0, math.inf):
        Tuner.record(tuner, 0, "a", seconds)
    assert watched == [1.0]


def test_a_candidate_at_the_bound_is_tried() -> None:
    entry = SimpleNamespace(predicted={"a": 1.0, "b": 2.0, "c": 2.5}, measured={}, settled="a")
    rules = SimpleNamespace(settings=TunerSettings(tries=3, within=2.0), always=tuple)
    assert Tuner._tried(rules, entry) == ["a", "b"]


@pytest.mark.parametrize(("calls", "goes_on"), [(2 * PAUSE - 1, False), (2 * PAUSE, True)])
def test_a_disturbed_contest_waits_for_each_earlier_round(calls: int, goes_on: bool) -> None:
    contest = SimpleNamespace(rounds=[1, 2], spread=lambda: 2 * DISTURBED, contenders=lambda: "ab")
    entry = SimpleNamespace(open=True, contest=contest, checks=SimpleNamespace(calls=calls))
    rich = SimpleNamespace(settings=TunerSettings(), _affords=lambda *_: True)
    assert Tuner._goes_on(rich, entry) is goes_on


@pytest.mark.parametrize("more", [0, 1])
def test_a_calm_contest_has_the_least_number_of_rounds(more: int) -> None:
    rules = TunerSettings()
    contest = SimpleNamespace(rounds=[1] * (rules.contest.least + more), spread=lambda: 0.0,
                              contenders=lambda: "ab")
    entry = SimpleNamespace(open=True, contest=contest, checks=SimpleNamespace(calls=0))
    tuner = SimpleNamespace(settings=rules, _affords=lambda *_: True)
    assert Tuner._goes_on(tuner, entry) is not bool(more)


def test_decisions_are_reported_once() -> None:
    t = tuner()
    drive(t, lambda c, _: 1.0, 50)
    assert [d.event for d in t.pop_decisions()] == ["predict", "explore", "settle"]
    assert t.pop_decisions() == () and len(t.log) == 3
