"""Derived numbers of committed pages are computed again, apart from the code that wrote them: from
the numbers that they are ratios, percentages and means of. Each row has its source.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.problem import Problem
from scripts.bench.study import ROOT, read_numbers

BENCHMARKS = ROOT / "docs" / "benchmarks"


def data(name: str) -> Any:
    return read_numbers(BENCHMARKS / "data" / f"{name}.json")


def tables(page: Path, first: str) -> list[dict[str, str]]:
    """Rows, by column, of all tables whose first column has this head."""
    found, head = [], []
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif head[0] == first and not line.startswith("| -"):
            found.append(dict(zip(head, cells, strict=True)))
    return found


def layers() -> list[tuple[str, dict[str, str]]]:
    wanted = []
    for one in data("layer")["one_rank"]:
        for mine in (one, *one["peers"]):
            wanted.append((mine["name"], {
                "ratio": f"{mine['median_ms'] / one['bound_ms']:.2f}",
                "ratio of minima": f"{mine['min_ms'] / one['bound_min_ms']:.2f}"}))
    return wanted


def stages() -> list[tuple[str, dict[str, str]]]:
    return [(one["case"], {
        "each / once": f"{one['each_s'] / one['once_s']:.2f}",
        "largest first / once": f"{one['largest_s'] / one['once_s']:.2f}",
        "predicted": f"{one['each_predicted_s'] / one['once_predicted_s']:.2f}",
        "predicted, order": f"{one['largest_predicted_s'] / one['once_predicted_s']:.2f}",
        "difference": f"{one['once_s'] / one['once_predicted_s'] - 1:+.0%}"})
        for one in data("stage_layouts")["rows"]]


def peers() -> list[tuple[str, dict[str, str]]]:
    return [(f"{one['rate_mbit_s']:.0f}", {
        "factor": f"{one['peers_tokens_s'] / one['pipeline_tokens_s']:.2f}"})
        for one in data("peers")["rows"]]


def trained() -> list[tuple[str, dict[str, str]]]:
    wanted = []
    for one in data("train"):
        seconds = {side["name"]: side["seconds"] for side in one["sides"]}
        kinds = {side["name"]: side["kind"] for side in one["sides"]}
        ms = {name: statistics.median(of) for name, of in seconds.items()}
        native = min((name for name in ms if kinds[name] == "native"), key=ms.__getitem__)
        least = min(min(seconds[name]) for name in ms if kinds[name] == "native")
        if one.get("evaluate"):
            pieces = ms["moe-plugin, pieces by load"]
            cells = {"native / one piece": f"{ms[native] / ms['moe-plugin']:.2f}",
                     "native / pieces": f"{ms[native] / pieces:.2f}",
                     "one piece / pieces": f"{ms['moe-plugin'] / pieces:.2f}"}
        else:
            best = min(ms[name] for name in ms if kinds[name] == "ours")
            dense = min(ms[name] for name in ms if kinds[name] == "dense")
            cells = {"native / ours": f"{ms[native] / ms['moe-plugin']:.2f}",
                     "ratio of minima": f"{least / min(seconds['moe-plugin']):.2f}",
                     "slower than our best": f"{100 * (ms['moe-plugin'] / best - 1):.0f} %",
                     "native / dense": f"{ms[native] / dense:.2f}"}
        wanted.append((one["shape"]["name"], cells))
    return wanted


PAGES: dict[str, tuple[str, Callable[[], list[tuple[str, dict[str, str]]]]]] = {
    "layer": ("forward + backward", layers), "stage_layouts": ("stages", stages),
    "peers": ("Mbit/s", peers), "train": ("shape", trained)}


@pytest.mark.parametrize("name", PAGES)
def test_a_row_s_ratios_are_those_of_its_numbers(name: str) -> None:
    first, wanted_of = PAGES[name]
    rows = tables(BENCHMARKS / f"{name}.md", first)
    rows = [row for row in rows if row[first] != "GEMM bound"]
    wanted = sorted((key, sorted(cells.items())) for key, cells in wanted_of())
    shown = sorted((row[first], sorted(
        (head, row[head]) for head in columns_of(wanted) if head in row)) for row in rows)
    assert shown == wanted  # none is left out, and none has no source


@pytest.mark.parametrize(("part", "first"), [("two_ranks", "forward and backward on two ranks"),
                                             ("generated", "forward pass of 64 tokens")])
def test_ratios_of_layers_in_one_table(part: str, first: str) -> None:
    wanted: dict[str, dict[str, str]] = {}
    for one in data("layer")[part]:
        label = Problem.of(one).label()
        for mine in (one, *one["peers"]):
            ratio = mine["median_ms"] / one["bound_ms"]
            wanted.setdefault(mine["name"], {})[label] = f"{ratio:.2f}"
    shown = {row.pop(first): {label: cell.split(", ")[1] for label, cell in row.items() if cell}
             for row in tables(BENCHMARKS / "layer.md", first)}
    assert shown == wanted


def columns_of(wanted: list[tuple[str, list[tuple[str, str]]]]) -> list[str]:
    return sorted({head for _, cells in wanted for head, _ in cells})


def test_published_results_have_their_measurement() -> None:
    """Each row of the headlines that was measured says where, and this page is there."""
    for row in data("headlines")["rows"]:
        assert (row["measured"] is None) or row["page"] == "" or (
            BENCHMARKS / f"{row['page']}.md").exists(), row["result"]
        assert row["measured"] is not None or row["what"], row["result"]


def test_stored_ratios_are_those_of_their_parts() -> None:
    """Wherever a committed row has both."""
    seen = 0
    for path in (BENCHMARKS / "data").glob("*.json"):
        for row in rows_in(read_numbers(path)):
            if {"ratio_to_bound", "median_ms", "bound_ms"} <= set(row):
                assert row["ratio_to_bound"] == pytest.approx(row["median_ms"] / row["bound_ms"])
                seen += 1
            if {"factor", "peers_tokens_s", "pipeline_tokens_s"} <= set(row):
                assert row["factor"] == pytest.approx(
                    row["peers_tokens_s"] / row["pipeline_tokens_s"])
                seen += 1
    assert seen > 20


def rows_in(value: Any) -> list[dict[str, Any]]:
    """All mappings in a study's numbers."""
    if isinstance(value, dict):
        return [value, *(row for one in value.values() for row in rows_in(one))]
    if isinstance(value, list):
        return [row for one in value for row in rows_in(one)]
    return []
