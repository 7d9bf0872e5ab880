"""`bench routing`: what of a trace is replayed, and its columns from the committed seconds."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest
import torch

from moe_plugin.planner.spill import LEAST_GAIN
from scripts.bench.replayed import excerpt, explain, picked
from scripts.bench.studies import STUDIES
from scripts.bench.studies.routing import AIM, TRACES, drifting, hot, summary, synthetic
from scripts.bench.study import read_numbers

pytestmark = pytest.mark.fast
KEY = ("decoder", None, 0)
BENCHMARKS = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"


@pytest.mark.parametrize(("total", "steps", "numbers"), [
    (3, 12, [0, 1, 2]), (9, 3, [0, 4, 8]), (20, 6, [0, 1, 9, 10, 18, 19]),
    (7, 6, [0, 1, 2, 3, 5, 6])])
def test_steps_are_of_three_places(total: int, steps: int, numbers: list[int]) -> None:
    assert picked(total, steps) == numbers


def test_ranks_and_tokens_as_by_hand() -> None:
    one, other = torch.tensor([[0, 1], [2, 3], [-1, -1], [4, 5]]), torch.tensor([[6, 7]] * 4)
    traces = [{KEY: [[one]]}, {KEY: [[other]]}]
    four = excerpt(traces, 8, 4, 1)
    assert [trace[KEY][0][0].tolist() for trace in four] == [
        [[0, 1], [2, 3]], [[4, 5]], [[6, 7]] * 2, [[6, 7]] * 2]
    [alone] = excerpt(traces, 8, 1, 1, tokens=14)  # each token twice
    assert alone[KEY][0][0].tolist() == [
        token for token in [[0, 1], [2, 3], [4, 5], *[[6, 7]] * 4] for _ in range(2)]
    with pytest.raises(ValueError, match="both chosen and dropped experts"):
        excerpt([{KEY: [[torch.tensor([[0, -1]])]]}], 8, 1, 1)
    with pytest.raises(ValueError, match="ranks=3 is not possible"):
        excerpt(traces, 8, 3, 1)


def test_synthetic_traces_are_what_they_are_called() -> None:
    for popularity, first, last in ((hot, 0, 0), (drifting, 0, 4)):
        [trace, *_] = synthetic(popularity, None)
        steps = trace[KEY]
        for number, busiest in ((0, first), (len(steps) // 2, last)):
            load_E = steps[number][0].flatten().bincount(minlength=8)
            assert int(load_E.argmax()) == busiest and load_E.max() > 1.8 * load_E.float().mean()


def test_columns_are_of_the_committed_seconds() -> None:
    found = read_numbers(BENCHMARKS / "data" / "routing.json")
    page = (BENCHMARKS / "routing.md").read_text(encoding="utf-8")
    assert list(found["traces"]) == list(TRACES)
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines()
             if line.startswith("|")]
    missed, below = [], []
    for name, one in found["traces"].items():
        part = page.split(f"\n## {name[0].upper()}{name[1:]}, ")[1].split("\n## ")[0]
        assert part.startswith(f"{len(one['third'])} calls")
        seconds = {what: {policy: numbers[what] for policy, numbers in one["policies"].items()}
                   for what in ("measured", "predicted")}
        share = {what: {policy: sum(one["balanced"][what]) / sum(s) for policy, s in of.items()}
                 for what, of in seconds.items()}
        for policy, s in seconds["measured"].items():
            [line] = re.findall(rf"^\| {policy} .*$", part, re.MULTILINE)
            shown = [cell.strip() for cell in line.split("|")[2:-1]]
            thirds = [sum(b for b, third in zip(one["balanced"]["measured"], one["third"],
                                                strict=True) if third == number)
                      / sum(x for x, third in zip(s, one["third"], strict=True)
                            if third == number) for number in range(3)]
            rows = mean(one["policies"][policy]["rows"]) / mean(one["mean_rows"])
            assert shown[1:] == [
                f"{share['measured'][policy]:.1%}", f"{share['predicted'][policy]:.1%}",
                *(f"{third:.1%}" for third in thirds),
                *(f"{sum(seconds[what]['never']) / sum(seconds[what][policy]):.2f}"
                  for what in ("measured", "predicted")),
                f"{rows:.2f}", f"{mean(one['policies'][policy]['lent']):.1f}"]
        plain = sum(seconds["predicted"]["never"])
        taken = min(seconds["predicted"], key=lambda p: sum(seconds["predicted"][p]))
        if sum(seconds["predicted"][taken]) >= plain * (1 - LEAST_GAIN):
            taken = "never"
        reached = share["measured"][taken]
        row = next(row for row in cells if row[0] == name)
        assert row[1:5] == [f"{share['measured']['never']:.1%}", taken, f"{reached:.1%}",
                            f"{share['predicted'][taken]:.1%}"]
        if reached < AIM:
            missed.append(f"{name} {reached:.1%}")
        if reached < share["measured"]["never"]:
            below.append(name)
    text = " ".join(page.split())
    assert (f"missed in these traces: {', '.join(missed)}. The policy should never" if missed else
            "reached in every trace. The policy should never") in text
    assert [row["trace"] for row in summary(found) if row["over"] < 1] == below


def record(never: float, lending: float) -> dict:
    """Two calls of two policies; seconds of the second."""
    return {"third": [0, 2], "mean_rows": [4, 4],
            "balanced": {"predicted": [1.0, 1.0], "measured": [1.0, 1.0]},
            "policies": {name: {"lent": [0, lent], "rows": [4, 6 - lent], "predicted": [1.0, 1.0],
                                "measured": [1.0, seconds]}
                         for name, lent, seconds in (("never", 0, never),
                                                     ("least_loaded", 1, lending))}}


def test_what_is_missed_is_said() -> None:
    made = {"grid": "2x1", "rate": 1e9, "tokens": 4, "steps": 5, "versions": {}}
    page = " ".join(STUDIES["routing"].page({**made, "traces": {
        "one": record(3.0, 1.2), "two": record(1.0, 2.0)}}).split())
    assert "missed in these traces: one 50.0%. The policy should never be slower" in page
    assert ("slowest of all policies has 0.667 times the throughput of the plain layer "
            '(`least_loaded` in the trace "two")') in page
    said = explain(record(3.0, 1.2), "2x1")
    assert ("Use parallel.spill: least_loaded (--moe-spill least_loaded). It saves 45%"
            in " ".join(said.split()))
    assert "Use parallel.spill: never." in explain(record(1.0, 2.0), "2x1")
