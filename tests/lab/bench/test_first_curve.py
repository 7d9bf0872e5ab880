"""The study of README's ways in, and the picture on top of README: what they read, what they draw.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from moe_plugin.lab.bench.studies.first_curve import body, ways
from moe_plugin.lab.bench.study import read_numbers
from moe_plugin.lab.bench.train.curves import SHAPE, curve, draw, smoothed
from moe_plugin.lab.bench.train.results import newest, reports
from moe_plugin.lab.bench.train.sides import OURS
from moe_plugin.planner.units import show_time

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = ROOT / "docs" / "benchmarks" / "data" / "train.json"


def test_each_way_in_ends_with_a_report() -> None:
    found = ways((ROOT / "README.md").read_text(encoding="utf-8"))
    assert list(found) == ["Plain PyTorch", "transformers", "fairseq", "Megatron-core"]
    for commands in found.values():
        *lines, last = commands.strip().splitlines()
        assert lines and last.startswith("moe-plugin report runs/")


def test_each_way_in_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.split("\n## Four ways in\n")[1].split("\n## ")[0]
    for section in part.split("\n### ")[1:]:
        code = [line for block in section.split("```")[1::2] for line in block.splitlines()[1:]]
        assert 0 < len(code) <= 8, section.splitlines()[0]


def test_readme_has_the_measured_times() -> None:
    found = read_numbers(NUMBERS.with_name("first_curve.json"))
    shown = [show_time(one["seconds"]) for one in found["ways"]]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{', '.join(shown[:-1])} and {shown[-1]} after setting up" in text
    assert all(one["seconds"] < 60 for one in found["ways"][:2])


def test_set_up_is_counted_apart() -> None:
    found = {"clone_s": 1.0, "versions": {}, "ways": [{"way": "a", "seconds": 20.0}],
             "setup": {"seconds": 99.0, "steps": [["torch", "60"]]}}
    page = "\n".join(body(found))
    assert "| a   | 20 s             | 2 min" in page and "| torch         | 60 s    |" in page
    assert "step of setup" not in "\n".join(body({**found, "setup": None}))


def test_the_picture_s_curves_are_equal_losses_at_measured_seconds(tmp_path: Path) -> None:
    numbers = read_numbers(NUMBERS)
    shown = [one for one in newest(reports(numbers))
             if one.shape.name == SHAPE and one.place.startswith("one machine")]
    assert [one.host for one in shown] == ["megatron", "fairseq"]
    for report in shown:
        (ours_s, ours), (native_s, native) = map(curve, (report.side(OURS), report.best("native")))
        assert len(ours_s) == len(ours) and ours_s[-1] == pytest.approx(
            sum(report.side(OURS).seconds))
        # fairseq logs three decimals of a loss in bits
        unit = 1e-3 * math.log(2) if report.host == "fairseq" else 0.0
        assert ours == pytest.approx(native, abs=unit + 1e-5) and ours_s[-1] < native_s[-1]
    draw(numbers, str(tmp_path / "curves.png"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_a_line_is_the_mean_of_neighbouring_steps() -> None:
    losses = [float(i % 2) for i in range(200)]
    found = smoothed(losses)
    assert len(found) == 200 and found[0][1:] == found[100][1:] == (0.0, 1.0)
    assert all(0.4 < mean < 0.6 for mean, _, _ in found)
    assert smoothed([3.0, 1.0]) == [(3.0, 3.0, 3.0), (1.0, 1.0, 1.0)]
