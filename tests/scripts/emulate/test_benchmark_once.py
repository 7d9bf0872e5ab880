"""The benchmark of rows that are sent once: what its page says of its numbers, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.planner.choice import SENDS
from scripts.bench.studies import STUDIES, once
from scripts.emulate import why_not

COMMAND = [sys.executable, "-m", "moe_plugin.cli.main", "bench", "once"]


def test_the_page_compares_with_rows_and_with_the_formula() -> None:
    ranks = [{"seconds": {"rows": [0.1, 0.4 + rank / 10, 0.9], "ranks": [0.2] * 3,
                          "nodes": [0.1] * 3, "auto": [0.11] * 3}} for rank in range(2)]
    cell = {"width": 8, "k": 8, "seconds": once.medians(ranks), "layout": "r=1 d=1 linear auto"}
    page = STUDIES["once"].page({"about": [], "exchange-2x2": {
        "grid": "2x2", "rounds": 3, "tokens": 8, "rate": 1e9, "load": [0, 0], "cells": [cell]}})
    assert ("| 8     | 8 | 500 (1.00) | 200 (0.40) | 100 (0.20) | 110 (0.22) | 1.10 " in page
            and "| 0.45 " in page and "| 0.25 " in page)


def test_columns_in_pieces_and_the_floor_are_on_the_page_where_they_were_measured() -> None:
    seconds = {"rows": 1.0, "ranks": 0.8, "nodes": 0.7, "ranks, d=2": 0.6, "nodes, d=2": 0.5,
               "auto": 0.55}
    part = {"grid": "8x4", "rounds": 3, "tokens": 8, "rate": 1e9, "load": [0, 0], "cells": [
        {"width": 512, "k": 8, "seconds": seconds, "layout": "r=1 d=2 linear auto"}]}
    page = STUDIES["once"].page({"about": [], "exchange-8x4": part})
    [row] = [line for line in page.splitlines() if line.startswith("| 512")]
    cells = [cell.strip() for cell in row.split("|")]
    assert cells[5:10] == ["700 (0.70)", "600 (0.60)", "500 (0.50)", "550 (0.55)", "1.10"]
    # rows of 2,048 bytes to 7/8 x 8 (1 - (7/8)^8) other nodes, 8 pairs of 6; as rows 8 of them
    assert cells[-2] == f"{(8 * (1 - (7 / 8)**8) * 2048 + 48) / (8 * 2048):.2f}" == "0.66"
    for name in once.IN_PIECES:
        del seconds[name]
    assert "floor" not in STUDIES["once"].page({"about": [], "exchange-8x4": part}).lower()


def test_whole_steps_are_compared_with_todays_best() -> None:
    seconds = dict(zip(once.SIDES, (0.2, 0.4, 0.3, 0.1, 0.1), strict=True))
    cell = {"shape": "width 8", "seconds": seconds, "losses": dict.fromkeys(seconds, 1.0),
            "layouts": dict.fromkeys(seconds, "r=1 d=1 linear auto")}
    page = STUDIES["once"].page({"about": [], "megatron-4x2": {
        "host": "megatron", "grid": "4x2", "steps": 3, "rate": 1e9, "load": [0, 0],
        "cells": [cell]}})
    assert "## Whole steps in Megatron-core, 4x2" in page and "| 100 (0.50)" in page


def test_the_predicted_table_has_all_nodes_and_what_is_published() -> None:
    page = STUDIES["once"].page({"about": [], "predicted": [2, 8, 512]})
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    assert [line[1].strip() for line in lines[2:]] == ["2", "8", "512"]
    assert lines[3][-4].strip() == "51" and lines[4][-4].strip() == ""


def test_parts_that_are_there_are_left_out(tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_plugin.cli.main import main

    measured = []

    def part(name: str) -> tuple:
        return (lambda args: measured.append(name) or [name], lambda found: iter(found))

    monkeypatch.setattr(once, "PARTS", {name: part(name) for name in "abc"})
    monkeypatch.setattr(once, "OPTIONS", {})
    monkeypatch.setattr("scripts.bench.study.NEEDS", {"nodes": lambda: None})
    words = ["bench", "once", "--out", str(tmp_path)]
    assert main([*words, "--parts", "b"]) == 0 and main([*words, "--resume"]) == 0
    assert measured == ["b", "a", "c"]
    assert sorted(json.loads((tmp_path / "data" / "once.json").read_text())) == ["a", "b", "c"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_it_runs(tmp_path: Path) -> None:
    subprocess.run([*COMMAND, "--out", str(tmp_path), "--quick"], check=True, timeout=400)
    found = json.loads((tmp_path / "data" / "once.json").read_text())
    assert list(found["exchange-2x2"]["cells"][0]["seconds"]) == [
        *SENDS, *once.IN_PIECES, "auto"]
    assert list(found["megatron-2x2"]["cells"][0]["seconds"]) == list(once.SIDES)
