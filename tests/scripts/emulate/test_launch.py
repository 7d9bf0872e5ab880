"""`moe-plugin emulate`: commands on every node, exit status, restarts, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from scripts.emulate import EmulatedCluster, why_not
from scripts.emulate.launch import start_torchrun, wait
from tests.distributed import heeds_ctrl_c

pytestmark = pytest.mark.distributed
EMULATE = [sys.executable, "-m", "moe_plugin.cli.main", "emulate"]
RANK = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from moe_plugin.comm import TorchComm
dist.init_process_group("gloo")
comm = TorchComm()
nodes = comm.prepare().nodes
total = comm.all_reduce(torch.tensor(float(comm.rank)))
mark = Path(sys.argv[1], f"died{comm.rank}")
if comm.rank == int(sys.argv[2]) and not mark.exists():
    mark.touch()
    os.kill(os.getpid(), 9)
line = f"rank {comm.rank} sum {total.item()} nodes {nodes} {os.uname().nodename}\\n"
os.write(1, line.encode())  # one call, so lines of several ranks do not mix
dist.barrier()
rank = dist.get_rank()
dist.destroy_process_group()
time.sleep(3 * rank)  # nodes end after the first one, which has the store of the rendezvous
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    if why_not():
        pytest.skip(why_not())


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*EMULATE, *argv], capture_output=True, text=True, timeout=300,
                          check=False)


def test_a_plain_command_on_each_node_and_its_exit_status() -> None:
    done = run(
        "2x3", "--plain", "--delay", "0ms", "--", "sh", "-c",
        "echo $(hostname) $NODE_RANK $NNODES $NPROC_PER_NODE $MASTER_ADDR; exit $((3 * NODE_RANK))")
    assert sorted(done.stdout.splitlines()) == ["node0 0 2 3 10.77.0.1", "node1 1 2 3 10.77.0.1"]
    assert done.returncode == 3, done.stderr


def test_a_script_under_torchrun(tmp_path: Path) -> None:
    """What it prints is all that is printed."""
    (tmp_path / "rank.py").write_text(RANK)
    done = run("2x1", "--", str(tmp_path / "rank.py"), str(tmp_path), "-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"rank {i} sum 1.0 nodes ((0,), (1,)) node{i}" for i in range(2)
    ]


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    done = run("2x2", "--max-restarts", "3", "--", str(tmp_path / "rank.py"), str(tmp_path), "2")
    assert done.returncode == 0, done.stderr[-3000:]
    # ranks that were quick may have said so in the first start as well
    assert set(done.stdout.splitlines()) == {
        f"rank {i} sum 6.0 nodes ((0, 1), (2, 3)) node{i // 2}" for i in range(4)
    }


def test_bad_arguments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for argv, words in [(["2x1", "--", "no-such-program"], "no-such-program"),
                        (["2x1", "--max-restarts", "-1", "--", "x.py"], "--max-restarts -1"),
                        (["2x1"], "required: COMMAND"), (["two", "--", "x.py"], "two")]:
        try:
            status = main(["emulate", *argv])
        except SystemExit as stop:  # of the parser
            status = stop.code
        finally:
            signal.signal(signal.SIGTERM, before)
        assert status == 2 and words in capsys.readouterr().err, argv


def test_the_others_are_not_waited_for_without_end() -> None:
    with EmulatedCluster(2, 1, delay_s=0) as cluster:
        started = [
            cluster.command(0, ["sh", "-c", "exit 5"]),
            cluster.command(1, ["sleep", "86420"])
        ]
        assert wait(started, grace_s=0.5) == 5
    assert all(process.poll() is not None for process in started)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_stopped_command_leaves_nothing(number: signal.Signals) -> None:
    nap = ["sleep", f"8642.{os.getpid()}{number:02d}"]  # unique to this test
    command = subprocess.Popen(
        [*EMULATE, "2x1", "--plain", "--", "sh", "-c", f"echo up; exec {' '.join(nap)}"],
        stdout=subprocess.PIPE, text=True, preexec_fn=heeds_ctrl_c)
    try:
        assert [command.stdout.readline(), command.stdout.readline()
                ] == ["up\n", "up\n"] and soon_running(nap, 2)
        os.kill(command.pid, number)
        assert command.wait(20) in (128 + number, -number)
        assert soon_running(nap, 0)
    finally:
        command.kill()
        command.wait()


def soon_running(words: list[str], count: int) -> bool:
    deadline = time.monotonic() + 20
    while len(running(words)) != count and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(running(words)) == count


def running(words: list[str]) -> list[str]:
    """Processes that were started by just these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if entry.read_bytes() == "".join(f"{word}\0" for word in words).encode():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.fast
def test_start_torchrun_wants_a_program() -> None:
    with EmulatedCluster(1, 1) as cluster, pytest.raises(ValueError,
                                                         match="'train' is not installed"):
        start_torchrun(cluster, ["train"])
