"""The benchmark of rows on other ranks: what stands is measured in layers of its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moe_plugin.lab.emulate import why_not

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "benchmark_spill.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_spill", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_stands_is_measured_with_replicas_and_without() -> None:
    """In the committed numbers; a layer that never ends a step has no replicas to measure."""
    script = _script()
    assert script.STANDING not in script.POLICIES
    report = json.loads((ROOT / "docs" / "benchmarks" / "spill.json").read_text(encoding="utf-8"))
    times = report[script.STANDING]["times"]
    assert list(times) == list(script.LOADS)
    hot, even = times[script.HOT], times["even"]
    assert hot["place"]["rows"] > 0 == even["place"]["rows"]
    assert hot[script.STANDING]["rows"] < hot["never"]["rows"]
    assert even[script.STANDING]["rows"] == even["never"]["rows"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
def test_it_measures_what_stands_and_keeps_the_rest(tmp_path: Path) -> None:
    shutil.copy(ROOT / "docs" / "benchmarks" / "spill.json", tmp_path)
    before = json.loads((tmp_path / "spill.json").read_text())
    subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path), "--only", "standing",
                    "--rounds", "2", "--rate", "1e9"], check=True, timeout=200)
    after = json.loads((tmp_path / "spill.json").read_text())
    assert after["times"] == before["times"]
    assert after["standing"]["rounds"] == 2
    assert after["standing"]["times"]["even"]["place"]["rows"] == 0
