"""Measuring a processor: the fit recovers what made the times; the command writes a file that can
be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_plugin.bench.device import ROWS, fit_products
from moe_plugin.cli.main import main
from moe_plugin.planner.device import Device, load_device


def test_the_fit_recovers_a_device() -> None:
    true = Device(flops=3e11, half_rows=40, launch_s=1e-5)
    operations = 2.0 * 512 * 2048
    times = [true.matmul_s(n, operations * n) for n in ROWS]
    flops, half_rows = fit_products(ROWS, times, true.launch_s, operations)
    assert flops == pytest.approx(3e11, rel=1e-6) and half_rows == pytest.approx(40, rel=1e-6)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "d.yaml"
    assert main(["profile-device", "--model-dim", "64", "--hidden-dim", "64", "--out",
                 str(out)]) == 0
    found = load_device(out)
    assert found.flops > 1e6 and found.memory_bytes_s > 1e6 and "GFLOP/s" in capsys.readouterr().out
    assert main(["profile-device", "--device", "cuda:7", "--out", str(out)]) == 2
