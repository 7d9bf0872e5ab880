"""The committed table of trained gates: every registered router in both hosts, its loss falls, its
balance holds; and how it is made.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.routing import routers

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "benchmarks" / "data" / "gates.json"


def rows(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def check(found: list[dict], steps: int) -> None:
    for row in found:
        where = (row["gate"], row["host"])
        assert row["steps"] == steps and row["last_loss"] < row["first_loss"] and row[
            "busiest"] <= row["most"], where
        assert 0 <= row["drops"] < 1 and row["step_ms"] > 0, where


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_every_router_was_trained_a_hundred_steps(host: str) -> None:
    mine = [row for row in rows(TABLE) if row["host"] == host]
    names = sorted(row["gate"] for row in mine)
    assert names == [name for name in routers.names() if not name.startswith("test_")
                     ], "train a new router: moe-plugin bench gates"
    check(mine, 100)
    entropy = json.loads(TABLE.read_text(encoding="utf-8"))["unigram_entropy"]
    # it learned more than the frequencies of bytes
    assert all(row["last_loss"] < entropy for row in mine)
    page = TABLE.parents[1].joinpath("gates.md").read_text(encoding="utf-8")
    assert all(f"| {row['gate']}" in page for row in mine)


@pytest.mark.slow
@pytest.mark.distributed
def test_it_is_made_by_the_script(tmp_path: Path) -> None:
    pytest.importorskip("fairseq"), pytest.importorskip("megatron.core")
    command = [
        sys.executable, "-m", "moe_plugin.cli.main", "bench", "gates", "--gates", "base",
        "expert_choice", "--out",
        str(tmp_path), "--runs",
        str(tmp_path / "runs")
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880,
                          check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = rows(tmp_path / "data" / "gates.json")
    assert len(found) == 4
    check(found, 100)
