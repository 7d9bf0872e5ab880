"""Plots read well: no text over other text, sizes as sizes, ours marked; and those that are
committed can be drawn from the committed numbers.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from moe_plugin.cli.figures import log_scale, pyplot
from scripts.bench import plots
from scripts.bench.layer import results
from scripts.bench.studies import STUDIES

ROOT = Path(__file__).resolve().parents[3]
BENCHMARKS = ROOT / "docs" / "benchmarks"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, kept open and drawn."""
    saved: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, _: saved.append(figure))
    yield saved
    pyplot().close("all")


def numbers(name: str) -> Any:
    return json.loads((BENCHMARKS / "data" / f"{name}.json").read_text(encoding="utf-8"))


def overlapping(axis: Any, which: str) -> list[tuple[str, str]]:
    """Pairs of an axis' tick labels that lie over each other."""
    axis.figure.canvas.draw()
    side = getattr(axis, f"{which}axis")
    labels = [label for label in (*side.get_ticklabels(), *side.get_ticklabels(minor=True))
              if label.get_text() and label.get_visible()]
    boxes = [(label.get_text(), label.get_window_extent()) for label in labels]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2)
            if one.overlaps(other)]


def test_ticks_over_each_other_are_found() -> None:
    figure, axis = pyplot().subplots(figsize=(2, 2))
    axis.set(xscale="log", xlim=(1, 10))
    axis.set_xticks([1, 1.1, 10], ["1.0000", "1.1000", "10"])
    assert overlapping(axis, "x") == [("1.0000", "1.1000")]
    pyplot().close(figure)


def test_scaling_has_ticks_where_it_was_measured(figures: list[Any]) -> None:
    plots.scaling_plot(numbers("scaling"), "")
    [figure] = figures
    assert len(figure.axes) == 6
    for axis in figure.axes:
        assert not overlapping(axis, "x") and not overlapping(axis, "y")
        assert len(axis.get_yticks()) >= 3
    assert [tick.get_text() for tick in figure.axes[-2].get_xticklabels()] == [
        "4", "8", "16", "32", "64"]


@pytest.mark.parametrize("number", range(4))
def test_bars_are_marked_sorted_and_cut(figures: list[Any], number: int) -> None:
    found = numbers("layer")["one_rank"][number]
    plots.layer_plot(found, "")
    time = figures[0].axes[0]
    names = [label.get_text() for label in time.get_yticklabels()]
    assert names[0] == "moe-plugin"
    colors = [bar.get_facecolor() for bar in time.patches]
    assert len(set(colors)) == 2 and colors.count(colors[0]) == 1
    slowest = max(results(found), key=lambda one: one["median_ms"])["name"]
    assert names[-1] == {"einsum": "one-hot einsum"}.get(slowest, slowest)
    assert time.texts[-1].get_text().endswith("(cut)")
    shown = [bar.get_width() for bar in time.patches]
    assert shown[1:] == sorted(shown[1:])
    figures[0].canvas.draw()
    right = time.get_window_extent().x1
    assert all(text.get_window_extent().x1 <= right for text in time.texts)


def test_sizes_are_shown_as_sizes() -> None:
    figure, axis = pyplot().subplots()
    axis.plot([16384, 2**20], [1, 100])
    plots.size_ticks(axis, [16384, 2**20])
    log_scale(axis)
    figure.canvas.draw()
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["16 KiB", "1 MiB"]
    assert {"1", "10", "100"} <= {tick.get_text() for tick in axis.get_yticklabels()}
    pyplot().close(figure)


def test_committed_plots_are_drawn_from_committed_numbers(tmp_path: Path) -> None:
    for study in STUDIES.values():
        numbers_of = BENCHMARKS / study.numbers_name
        if study.stem in ("", "layer", "all_to_all") and numbers_of.exists():
            for name, draw in getattr(study.code, "PLOTS", {}).items():
                draw(json.loads(numbers_of.read_text(encoding="utf-8")), tmp_path / name)
    drawn = {path.name for path in tmp_path.iterdir()}
    committed = {path.name for kind in ("*.svg", "*.png") for path in BENCHMARKS.glob(kind)}
    # the page of a study that was removed keeps its picture
    assert drawn == committed - {"ranks.svg", "forest.png", "offload_plans.svg"}
