"""The benchmark of rows that are sent once: what its page says of its numbers, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.lab.bench.studies import STUDIES, once
from moe_plugin.lab.emulate import why_not

COMMAND = [sys.executable, "-m", "moe_plugin.cli.main", "bench", "once"]


def test_the_page_compares_with_rows_and_with_the_formula() -> None:
    ranks = [{"rows": [0.1, 0.4 + rank / 10, 0.9], "nodes": [0.1] * 3} for rank in range(2)]
    cell = {"grid": "2x2", "width": 8, "hidden": 0, "k": 8, "seconds": once.summary(ranks)}
    page = STUDIES["once"].page({"rounds": 3, "tokens": 8, "rate": 1e9, "load": [0, 0],
                                 "cells": [cell]})
    assert "| 2x2   | 8 | 8 | 500 (1.00) | 100 (0.20) | 0.45" in page and "| 0.25" in page


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_it_runs(tmp_path: Path) -> None:
    subprocess.run([*COMMAND, "--out", str(tmp_path), "--quick"], check=True, timeout=200)
    cells = json.loads((tmp_path / "data" / "once.json").read_text())["cells"]
    assert [list(cell["seconds"]) for cell in cells] == [list(once.ALL)[:3], list(once.ALL)]
