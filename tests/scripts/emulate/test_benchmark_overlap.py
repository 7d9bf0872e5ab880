"""The benchmark of overlap: what its page says of its numbers, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.studies import STUDIES, overlap
from scripts.emulate import why_not

COMMAND = [sys.executable, "-m", "moe_plugin.cli.main", "bench", "overlap"]


def test_the_page_compares_with_the_larger_of_exchange_and_products() -> None:
    names = overlap.layouts([2], ["rows", "peers"])
    assert list(names) == ["d=1", "d=2 rows", "d=2 peers"]
    ranks = [{"names": list(names), "seconds": {
        "exchange": [0.1], "products forward": [0.16 + rank / 25], "products backward": [0.15],
        **{f"{name} {way}": [0.1 * (1 + rank)] * 3 for name in names
           for way in ("forward", "backward")}}} for rank in range(2)]
    cell = {"rate": 5e7, **overlap.summary(ranks)}
    page = STUDIES["overlap"].page(
        {"rounds": 3, "tokens": 8, "load": [0, 0], "cells": {"cpu": [cell]}})
    # of the slowest rank
    assert "| 50     | forward   | 100      | 200     | 200 (1.00) |" in page
    assert "| 50     | backward  | 100      | 150     | 200 (1.33) |" in page
    assert "at most 1.10 times the limit in 1 of 2 rows." in page


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_it_runs(tmp_path: Path) -> None:
    sizes = "--rounds 1 --rates 1e9 --degrees 2 --tokens 16"
    subprocess.run([*COMMAND, "--out", str(tmp_path), *sizes.split()],
                   check=True, timeout=200)
    cells = json.loads((tmp_path / "data" / "overlap.json").read_text())["cells"]
    assert list(cells) == ["cpu", "wait", "many", "s2"]
    for name, (cell,) in cells.items():
        cuts = {"many": ["rows", "experts", "peers"], "s2": ["rows"]}.get(name, ["rows", "peers"])
        assert list(cell["forward"]["total"]) == ["d=1", *(f"d=2 {cut}" for cut in cuts)]
    assert (tmp_path / "overlap.md").read_text().count("\n| 1000 ") == 8
