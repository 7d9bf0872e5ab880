"""Processors for ranks, on machines made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.hosts.plain.binding import gpu_node, local_place, numa_nodes, parse_cpu_list, plan


def machine(folder: Path, nodes: dict[int, str], gpus: dict[str, int] | None = None) -> Path:
    """A /sys with these NUMA nodes and PCI devices."""
    for node, cpus in nodes.items():
        path = folder / f"devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(cpus + "\n")
    for bus_id, node in (gpus or {}).items():
        path = folder / f"bus/pci/devices/{bus_id}"
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    return folder


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11] and parse_cpu_list("\n") == []


def test_beside_the_gpu(tmp_path: Path) -> None:
    """Two sockets, four GPUs whose order is not that of the sockets."""
    ids = ["0000:0a:00.0", "0000:8a:00.0", "0000:0b:00.0", "0000:8b:00.0"]
    sysfs = machine(tmp_path, {0: "0-7", 1: "8-15"}, dict(zip(ids, (0, 1, 0, 1), strict=True)))
    bound = [plan(i, 4, ids, set(range(16)), sysfs) for i in range(4)]
    assert [b.node for b in bound] == [0, 1, 0, 1]
    assert [b.cpus for b in bound] == [(0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7), (12, 13, 14, 15)]
    assert "of its GPU 0000:8b:00.0; 2 rank(s) share NUMA node 1 with 8 processors" in bound[
        3].why


def test_without_gpus_ranks_are_spread(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, {0: "0-3", 1: "4-7"})
    bound = [plan(i, 4, [], set(range(8)), sysfs) for i in range(4)]
    assert [b.cpus for b in bound] == [(0, 1), (2, 3), (4, 5),
                                       (6, 7)] and "spread evenly" in bound[0].why


def test_gpus_whose_node_is_not_known(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, {0: "0-3"}, {"0000:0a:00.0": -1})
    assert gpu_node(sysfs, "0000:0A:00.0") is None and gpu_node(sysfs, "0000:ff:00.0") is None
    assert "spread evenly" in plan(0, 1, ["0000:0a:00.0"], {0, 1}, sysfs).why


def test_only_allowed_processors_and_more_ranks_than_processors(tmp_path: Path) -> None:
    sysfs = machine(tmp_path, {0: "0-3", 1: "4-7"})
    assert numa_nodes(sysfs, {1, 2}) == {0: [1, 2]}
    assert [plan(i, 3, [], {1, 2}, sysfs).cpus for i in range(3)] == [(1,), (1,), (2,)]
    assert numa_nodes(tmp_path / "none", {5, 3}) == {0: [3, 5]}


def test_place_from_launchers() -> None:
    assert local_place({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}) == (1, 4)
    assert local_place({"SLURM_LOCALID": "2", "SLURM_NTASKS_PER_NODE": "8"}) == (2, 8)
    with pytest.raises(ValueError, match="the local rank of this process is not known"):
        local_place({})
    with pytest.raises(ValueError, match="local rank 4 of 4"):
        plan(4, 4)


def test_it_becomes_the_command_bound() -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    environment = {
        **os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(len(os.sched_getaffinity(0)))
    }
    done = subprocess.run(
        [sys.executable, "-m", "moe_plugin.hosts.plain.binding", sys.executable, "-c", code],
        capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == str(sorted(
        os.sched_getaffinity(0))[:1]) and "rank 0 of" in done.stderr
