"""Measuring a processor: the fit recovers what made the times; the command writes a file that can
be read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.cli.measure.own_cluster import ROWS, fit_products
from moe_plugin.planner.cluster import Device, load_cluster, load_device
from moe_plugin.planner.prefill import load_kernels

pytestmark = pytest.mark.fast


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
    kernels = tmp_path / "k.yaml"
    assert main(["profile-device", "--model-dim", "64", "--hidden-dim", "64", "--out", str(out),
                 "--kernels", str(kernels), "--experts", "2"]) == 0
    profile = load_kernels(kernels)
    assert set(profile) == {"fused", "grouped"}
    assert all(k.points[0][0] == 1 and k.points[-1][0] >= 16 and k.seconds(2, 16) > 0
               for k in profile.values())
    assert main(["profile-device", "--device", "cuda:7", "--out", str(out)]) == 2


# data sheets: dense bf16 FLOP/s, bytes/s and bytes of memory
SHEETS = {"a100_80g": (312e12, 2.039e12, 80e9), "h100": (989e12, 3.35e12, 80e9),
          "h200": (989e12, 4.8e12, 141e9), "b200": (2.25e15, 8e12, 180e9)}


@pytest.mark.parametrize("name", SHEETS)
def test_shipped_devices_reach_a_part_of_their_data_sheet(name: str) -> None:
    device, (flops, bandwidth, memory) = load_device(f"configs/devices/{name}.yaml"), SHEETS[name]
    assert 0.45 < device.flops / flops < 0.55
    assert 0.6 < device.memory_bytes_s / bandwidth < 0.8
    assert device.memory_bytes == memory and device.name == name


# NVLink in bytes/s per direction, a card's bytes/s, the memory of which device
LINKS = {"a100_ib": (300e9, 25e9, "a100_80g"), "h100_ib": (450e9, 50e9, "h100"),
         "h200_ib": (450e9, 50e9, "h200")}


@pytest.mark.parametrize("name", LINKS)
def test_shipped_clusters_reach_a_part_of_their_links(name: str) -> None:
    cluster, (near, far, device) = load_cluster(f"configs/clusters/{name}.yaml"), LINKS[name]
    assert 1 / cluster.intra.beta_s / near == pytest.approx(5 / 6)
    assert 1 / cluster.inter.beta_s / far == pytest.approx(0.88)
    memory = load_device(f"configs/devices/{device}.yaml").memory_bytes_s
    assert cluster.copy_s == pytest.approx(1 / memory) and cluster.name == name
