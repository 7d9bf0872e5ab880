"""The benchmark of rows on other ranks: what stands is measured in layers of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.studies import spill
from scripts.emulate import why_not

ROOT = Path(__file__).resolve().parents[3]

COMMAND = [sys.executable, "-m", "moe_plugin.cli.main", "bench", "spill"]


def test_what_stands_is_measured_with_replicas_and_without() -> None:
    """In the committed numbers; a layer that never ends a step has no replicas to measure."""
    assert spill.STANDING not in spill.POLICIES
    file = ROOT / "docs" / "benchmarks" / "data" / "spill.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    times = report[spill.STANDING]["times"]
    assert list(times) == list(spill.LOADS)
    hot, even = times[spill.HOT], times["even"]
    assert hot["place"]["rows"] > 0 == even["place"]["rows"]
    assert hot[spill.STANDING]["rows"] < hot["never"]["rows"]
    assert even[spill.STANDING]["rows"] == even["never"]["rows"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_it_measures_what_stands_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "docs" / "benchmarks" / "data" / "spill.json", tmp_path / "data")
    before = json.loads((tmp_path / "data" / "spill.json").read_text())
    subprocess.run([*COMMAND, "--out", str(tmp_path), "--parts", "standing",
                    "--rounds", "2", "--rate", "1e9"], check=True, timeout=200)
    after = json.loads((tmp_path / "data" / "spill.json").read_text())
    assert after["others"] == before["others"]
    assert after["standing"]["rounds"] == 2
    assert after["standing"]["times"]["even"]["place"]["rows"] == 0
