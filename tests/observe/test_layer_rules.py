"""Rules about layers at their bounds, for few and many experts, one, two and all of them a token:
a run in which each must speak, and one just below. What is over is named with its steps.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from moe_plugin.observe.findings import findings
from moe_plugin.observe.history import LayerRecord, RunRecord
from moe_plugin.observe.layer_rules import LAYER_RULES, RECENT, LayerRule
from moe_plugin.observe.report.page import render
from moe_plugin.observe.watch import view

pytestmark = pytest.mark.fast

TOKENS, LITTLE = 1000.0, 0.01
SIZES = [(experts, k) for experts in (2, 4, 8, 64) for k in (1, 2, experts)]
ROUTED = [(experts, k) for experts, k in SIZES if k < experts]


def record(load: list[float], k: int, **other: Any) -> LayerRecord:
    """A record of `TOKENS` tokens with k choices each."""
    assert math.isclose(sum(load), k * TOKENS)
    values = {"max_over_mean": max(load) * len(load) / sum(load), "drop_fraction": 0.0,
              "entropy": 0.9 * math.log(len(load)), "losses": {"switch": 1.0}, **other}
    return LayerRecord(step=0, layer="a", load=tuple(load), tokens=TOKENS, **values)


def run_of(*records: LayerRecord) -> RunRecord:
    """A run with a record a step, from step 0."""
    return RunRecord(name="r", host="", layers={"a": [replace(r, step=step)
                                                      for step, r in enumerate(records)]})


def rules(found: LayerRecord) -> set[str]:
    return {one.rule for one in findings(run_of(*[found] * RECENT))}


def even(experts: int, k: int) -> list[float]:
    return [k * TOKENS / experts] * experts


def towards_the_same(experts: int, k: int, way: float) -> list[float]:
    """A load `way` of the way from an even one to that of k experts which all tokens choose."""
    return [k * TOKENS * ((1 - way) / experts + way * (e < k) / k) for e in range(experts)]


def peaked(experts: int, k: int, peak: float) -> list[float]:
    """One expert has `peak` times the mean load, the others what is left."""
    busiest = peak * k * TOKENS / experts
    return [busiest, *[(k * TOKENS - busiest) / (experts - 1)] * (experts - 1)]


@pytest.mark.parametrize(("experts", "k"), ROUTED)
def test_collapse_from_three_quarters_of_the_way_to_the_same_experts(experts: int, k: int) -> None:
    assert "collapse" in rules(record(towards_the_same(experts, k, 1.0), k))
    assert "collapse" in rules(record(towards_the_same(experts, k, 0.75 + LITTLE), k))
    assert "collapse" not in rules(record(towards_the_same(experts, k, 0.75 - LITTLE), k))
    assert rules(record(even(experts, k), k)) == set()


def test_a_z_loss_balances_nothing() -> None:
    uneven = towards_the_same(8, 1, 0.6)
    for name, missing in (("switch", False), ("load_balancing_loss", False), ("z", True),
                          ("z_loss", True)):
        assert ("no_balance" in rules(record(uneven, 1, losses={name: 1.0}))) == missing, name


def test_a_router_may_balance_without_a_loss() -> None:
    uneven = towards_the_same(8, 1, 0.6)
    for calls, rule in ((0.0, "no_balance"), (2.0, "uneven")):
        assert rules(record(uneven, 1, losses={}, calls=2.0, self_balanced_calls=calls)) == {rule}


def test_two_of_four_experts_for_all_tokens() -> None:
    (found, dead) = findings(run_of(*[record([TOKENS, TOKENS, 0, 0], 2)] * 40))
    assert found.rule == "collapse" and dead.rule == "dead_experts"
    assert ("2.0 times the mean load, where 2.0 would mean all tokens on the same experts"
            in found.title)


def test_many_experts_a_token_may_share_a_busy_one() -> None:
    # half of 64 experts a token: seven of eight tokens choose the busiest, the others are even
    (found,) = findings(run_of(*[record(peaked(64, 32, 1.75), 32)] * RECENT))
    assert found.rule == "uneven"


@pytest.mark.parametrize(("experts", "k"), ROUTED)
@pytest.mark.parametrize(("rule", "losses"), [("uneven", {"switch": 1.0}), ("no_balance", {})])
def test_uneven_from_half_of_the_way_or_twice_the_mean(experts: int, k: int, rule: str,
                                                       losses: dict[str, float]) -> None:
    bound = min(2.0, 1 + 0.5 * (experts / k - 1))  # 2: half of the way is twice the mean or more
    above, below = peaked(experts, k, bound + LITTLE), peaked(experts, k, bound - LITTLE)
    assert rules(record(above, k, losses=losses)) == {rule}
    assert rules(record(below, k, losses=losses)) == set()


def test_uneven_is_said_next_to_its_bounds() -> None:
    (found,) = findings(run_of(*[record(peaked(4, 2, 1.6), 2)] * RECENT))
    assert found.title == ("the busiest expert has 1.6 times the mean load (uneven from 1.5 on, "
                           "2.0 would mean all tokens on the same experts) in a")


@pytest.mark.parametrize("experts", [2, 4, 8, 64])
def test_all_experts_for_every_token_are_even(experts: int) -> None:
    assert rules(record(even(experts, experts), experts)) == set()
    assert rules(record(even(experts, experts), experts, losses={})) == set()


@pytest.mark.parametrize(("experts", "k"), ROUTED)
def test_dead_experts_are_those_without_any_token(experts: int, k: int) -> None:
    whole = even(experts, k)
    none = [k * TOKENS / (experts - 1)] * (experts - 1) + [0.0]
    one = [(k * TOKENS - 1) / (experts - 1)] * (experts - 1) + [1.0]
    assert "dead_experts" in rules(record(none, k))
    assert "dead_experts" not in rules(record(one, k))
    records = [record(none, k)] * (RECENT - 1)
    assert "dead_experts" not in {f.rule for f in findings(run_of(*records, record(whole, k)))}


@pytest.mark.parametrize(("experts", "k"), SIZES)
def test_bounds_that_do_not_depend_on_the_experts(experts: int, k: int) -> None:
    load = even(experts, k)
    assert rules(record(load, k, drop_fraction=0.10 + LITTLE)) == {"drops"}
    assert rules(record(load, k, drop_fraction=0.10)) == set()
    assert rules(record(load, k, calls=10.0, store={"stalls": 6.0})) == {"waits_for_experts"}
    assert rules(record(load, k, calls=10.0, store={"stalls": 5.0})) == set()
    sure, unsure = 0.019 * math.log(experts), 0.021 * math.log(experts)
    assert rules(record(load, k, entropy=sure)) == (set() if k == 1 else {"sure_router"})
    assert rules(record(load, k, entropy=unsure)) == set()


@pytest.mark.parametrize(("experts", "k"), ROUTED)
def test_a_collapse_that_is_over_is_named(experts: int, k: int) -> None:
    fine, collapsed = record(even(experts, k), k), record(towards_the_same(experts, k, 1.0), k)
    run = run_of(*[fine] * 22, *[collapsed] * 35, *[fine] * 20)
    found = {one.rule: one for one in findings(run)}
    assert "collapsed in a (steps 22 to 56, recovered): the busiest expert had" in found[
        "collapse"].title
    assert all(one.past for one in found.values()) and findings(run, past=False) == []
    assert "Routing had collapsed in a (steps 22 to 56, recovered)" in render(run)
    out = io.StringIO()
    console = Console(file=out, width=120, height=60)
    console.print(view(run, console))
    assert "! routing had collapsed in a (steps 22 to 56, recovered)" in out.getvalue()


def test_what_lasts_has_its_first_step_and_comes_first() -> None:
    fine, bad = record(even(4, 2), 2), record(towards_the_same(4, 2, 1.0), 2)
    dropping = record(even(4, 2), 2, drop_fraction=0.5)
    run = run_of(*[bad] * 9, *[fine] * 6, *[bad] * 6, *[fine] * 5, *[dropping] * 9)
    lasts, over, dead = findings(run)
    assert lasts.title == "50 % of the choices are dropped in a since step 26" and not lasts.past
    assert "a (steps 0 to 8, 15 to 20, recovered)" in over.title and over.past
    assert dead.rule == "dead_experts" and dead.past
    assert findings(run_of(*[bad] * 9))[0].title.startswith("routing has collapsed in a: ")


def test_the_uneven_beginning_of_a_run_is_not_named() -> None:
    fine, uneven = record(even(8, 2), 2), record(peaked(8, 2, 2.5), 2)
    assert findings(run_of(*[uneven] * 24, *[fine] * 80)) == []
    (found,) = findings(run_of(*[uneven] * 26, *[fine] * 70))
    assert found.title == ("the busiest expert had 2.5 times the mean load (uneven from 2 on, "
                           "4.0 would mean all tokens on the same experts) in a (steps 0 to 25, "
                           "recovered)")


def test_a_few_tokens_say_nothing_of_collapse() -> None:
    one = LayerRecord(step=0, layer="a", load=(1.0, 1.0, *[0.0] * 6), tokens=1.0)
    assert "collapse" not in rules(one)
    many = LayerRecord(step=0, layer="a", load=(8.0, 8.0, *[0.0] * 6), tokens=8.0)
    assert "collapse" in rules(many)


def _drawn(draw: random.Random) -> LayerRecord:
    """A record that may be fine or not, with numbers that may be absent."""
    experts, k = draw.choice(SIZES)
    peak = draw.choice([1.0, draw.random() ** 3])
    busy = draw.sample(range(experts), k)
    load = [TOKENS * k / experts * (1 - peak) + TOKENS * peak * (i in busy)
            for i in range(experts)]
    return LayerRecord(
        step=0, layer="a", load=draw.choice([tuple(load), tuple(load), ()]),
        tokens=draw.choice([TOKENS, TOKENS, None]),
        max_over_mean=draw.choice([max(load) * experts / sum(load), None]),
        drop_fraction=draw.choice([None, 0.0, 0.3 * draw.random()]),
        entropy=draw.choice([None, math.nan, draw.random() ** 4 * math.log(experts)]),
        losses=draw.choice([{}, {"z": 1.0}, {"switch": 1.0}]), calls=10.0,
        store=draw.choice([{}, {"stalls": 10 * draw.random(), "hits": 1.0}]))


@pytest.mark.parametrize("rule", LAYER_RULES, ids=lambda rule: rule.name)
def test_groups_without_a_suspect_are_not_a_problem(rule: LayerRule) -> None:
    """Such groups of a long run are skipped; here, each is judged."""
    draw = random.Random(0)
    seen = set[tuple[bool, bool]]()
    for _ in range(3000):
        fine = [_drawn(draw) for _ in range(RECENT)]
        group = [draw.choice(fine[:draw.randint(1, RECENT)]) for _ in range(RECENT)]
        suspects = any(rule.suspect(one) for one in group)
        bad = rule.judge([rule.measure(one) for one in group]) is not None
        assert suspects or not bad, group
        seen.add((suspects, bad))
    assert {(False, False), (True, True)} <= seen
