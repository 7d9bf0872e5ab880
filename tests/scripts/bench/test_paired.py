"""Differences over equal seeds, and the study that rests on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.bench.paired import best_rates, compare, paired
from scripts.bench.quickstart import settings
from scripts.bench.studies import quality


@pytest.mark.parametrize("count", [2, 3, 5, 8, 30])
def test_interval_is_that_of_the_paired_t_test(count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    side = [0.1 * (i % 3) + 0.01 * i for i in range(count)]
    other = [0.15 * (i % 2) + 0.02 * i for i in range(count)]
    found = paired(side, other)
    interval = stats.ttest_rel(side, other).confidence_interval(0.95)
    assert found.mean - found.half == pytest.approx(interval.low, rel=1e-3)
    assert found.mean + found.half == pytest.approx(interval.high, rel=1e-3)
    assert found.significant == (stats.ttest_rel(side, other).pvalue < 0.05)
    assert (found.lower, found.seeds) == (sum(a < b for a, b in zip(side, other, strict=True)),
                                          count)


def test_a_sign_is_significant_or_said_not_to_be() -> None:
    same = [1.0, 2.0, 3.0]
    clear = paired([0.9, 1.89, 2.91], same)
    assert clear.significant and clear.shown() == "-0.100 (-0.125 to -0.075)"
    unclear = paired([0.9, 2.1, 2.9], same)
    assert not unclear.significant and unclear.shown(100, 0).endswith(", not significant")
    assert not paired([0.0], [1.0]).significant and "one seed" in paired([0.0], [1.0]).shown()
    with pytest.raises(ValueError, match="zip"):
        paired([1.0], same)


def test_each_side_takes_its_best_rate_and_the_tables_leave_the_search_out() -> None:
    ran: list[tuple[str, float, int]] = []

    def run(side: str, rate: float, seed: int) -> dict[str, Any]:
        ran.append((side, rate, seed))
        return {"loss": abs(rate - {"a": 0.1, "b": 0.4}[side]) + seed}

    found = compare(2, {"a": (0.3, 0.1, 0.2), "b": (0.2, 0.4)}, 3, run, "loss")
    assert {side: best_rates(found["search"][side])[0] for side in "ab"} == {"a": 0.1, "b": 0.4}
    assert [r["loss"] for r in found["runs"]["a"]] == [2, 3, 4] == [
        r["loss"] for r in found["runs"]["b"]]
    assert {(side, rate) for side, rate, seed in ran if seed > 1} == {("a", 0.1), ("b", 0.4)}
    tried = {seed: sorted((s, rate) for s, rate, n in ran if n == seed) for seed in (0, 1)}
    assert tried[0] == [("a", 0.1), ("a", 0.2), ("a", 0.3), ("b", 0.2), ("b", 0.4)]
    assert tried[1] == [("a", 0.1), ("a", 0.2), ("b", 0.2), ("b", 0.4)]


def test_a_rate_that_was_lucky_once_is_not_taken() -> None:
    luck = {(0.1, 0): 1.0, (0.2, 0): 0.9, (0.1, 1): 1.0, (0.2, 1): 2.0, (0.3, 0): 1.1}
    found = compare(1, {"a": (0.1, 0.2, 0.3)}, 1, lambda _, rate, seed: {
        "loss": luck.get((rate, seed), rate)}, "loss")
    assert found == {"search": {"a": {"0.1": [1.0, 1.0], "0.2": [0.9, 2.0], "0.3": [1.1]}},
                     "runs": {"a": [{"loss": 0.1}]}}


@pytest.mark.parametrize("host", quality.ADAM)
def test_sides_differ_in_experts_and_inner_width_alone(host: str) -> None:
    s = {**settings(20), **quality.SIZES}
    moe, active, total = (
        quality.side_command(host, side, s, Path("data"), Path("run"))
        for side in quality.INNER)
    inner = "--decoder-ffn-embed-dim" if host == "fairseq" else "--ffn-hidden-size"
    assert [side[side.index(inner) + 1] for side in (moe, active, total)] == ["128", "256", "1024"]
    dense = [word for word in active if word.startswith("--moe-") or "expert" in word]
    assert dense == [word for word in active if word == "--moe-cpu"]
    assert set(active) - set(moe) <= {"256", "cross_entropy"}
    assert [w for w in active if w != "256"] == [w for w in total if w != "1024"]


def test_flops_and_parameters_are_equal_where_the_page_says_so() -> None:
    sizes = {side: quality.text_sizes(side) for side in quality.INNER}
    router = 2 * 64 * 8  # layers, width, experts
    assert sizes["moe"][0] - sizes["active"][0] == 2 * router
    assert sizes["moe"][1] - sizes["total"][1] == router
    # six experts that a token does not visit
    assert sizes["total"][0] - sizes["active"][0] == 2 * 2 * 2 * 64 * 128 * 6
