"""Processors for ranks, on machines made of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.hosts.plain import binding
from moe_plugin.hosts.plain.binding import (
    bind,
    gpu_node,
    local_place,
    numa_nodes,
    parse_cpu_list,
    plan,
)


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
    assert "NUMA node of GPU 0000:8b:00.0; 2 rank(s) share NUMA node 1 with 8 processors" in bound[
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
    with pytest.raises(ValueError, match="the local rank of this process is unknown"):
        local_place({})
    with pytest.raises(ValueError, match="local rank 4 is out of range for 4"):
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


SCRIPTS = Path(__file__).parents[3] / "scripts"
PRINTS = "import os; print('bound', os.environ['LOCAL_RANK'], sorted(os.sched_getaffinity(0)))"
LAUNCHES = {"train_fairseq.sh": ["{data}", "{out}", "2"], "train_megatron.sh": ["text", "{out}"],
            "slurm_fairseq.sh": ["{data}"], "slurm_megatron.sh": ["{data}"],
            "train_elastic.sh": ["--ranks", "2", "--replicas", "1", "--restarts", "0", "plain",
                                 "{out}"]}


def _environment(tmp_path: Path) -> Path:
    """A virtual environment whose programs say where they may run: torchrun and binding are real.
    """
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    tells = venv / "fairseq-train"
    tells.write_text(PRINTS)
    (venv / "torchft_lighthouse").write_text("#!/bin/sh\nexec sleep 60\n")
    python = venv / "python"
    # what runs behind the binding is `python -u ...`
    python.write_text(f'''#!/bin/sh
if [ "$1" = -u ] && [ "$2" != -m -o "$3" != moe_plugin.hosts.plain.binding ]
then exec "{sys.executable}" "{tells}"
fi
exec "{sys.executable}" "$@"
''')
    for path in venv.iterdir():
        path.chmod(0o755)
    return venv


@pytest.mark.distributed
@pytest.mark.parametrize("name", [
    name if name == "train_megatron.sh" else pytest.param(name, marks=pytest.mark.slow)
    for name in LAUNCHES])
def test_every_launch_script_binds_its_ranks(name: str, tmp_path: Path) -> None:
    """On a machine of two NUMA nodes, made of files."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    sysfs = machine(tmp_path / "sys", dict(enumerate(map(str, cpus))))
    venv, data, out = _environment(tmp_path), tmp_path / "data", tmp_path / "out"
    (out / "data").mkdir(parents=True)
    (out / "data" / "corpus.idx").touch()
    data.mkdir()
    (data / "dict.txt").touch()
    for command, text in (("scontrol", "echo 127.0.0.1"), ("srun", 'exec "$@"')):
        (venv / command).write_text(f"#!/bin/sh\n{text}\n")
        (venv / command).chmod(0o755)
    shutil.copytree(SCRIPTS, tmp_path / "repository" / "scripts")  # whose .venv is not the real one
    words = [word.format(data=data, out=out) for word in LAUNCHES[name]]
    done = subprocess.run(
        ["bash", str(tmp_path / "repository" / "scripts" / name), *words], capture_output=True,
        text=True, check=False, timeout=120, env={
            **os.environ, "NUMA": str(sysfs), "VENV": str(venv.parent), "PYTHON": f"{venv}/python",
            "PATH": f"{venv}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n", "SLURM_NNODES": "1",
            "SLURM_JOB_ID": "11", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(SCRIPTS.parent)})
    log = done.stdout + done.stderr + "".join(p.read_text() for p in out.glob("*.log"))
    assert {f"bound {rank} [{cpus[rank % len(cpus)]}]" for rank in (0, 1)} <= set(
        log.splitlines()), log


def test_several_launchers_share_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sysfs = machine(tmp_path, {0: "0-3", 1: "4-7"})
    bound: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: bound.append(tuple(cpus)))
    monkeypatch.setattr(binding, "gpu_bus_ids", list)
    for first in (0, 2):
        for rank in range(2):
            bind(rank, 2, sysfs, first, 4)
    assert bound == [(0, 1), (2, 3), (4, 5), (6, 7)]
    with pytest.raises(ValueError, match="has no folder devices/system.*Use /sys"):
        bind(0, 1, tmp_path / "none")
