"""Folders of runs: a second run in one ends at once, what a killed run left does not keep the next
one from it, and a full disk leaves nothing that is half written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from moe_plugin.utils.folder_lock import LOCK, hold_folder
from scripts.emulate.faults import Fault
from tests.distributed import run_gloo
from tests.faults.hosts import HOSTS, SAVE_EVERY, STEPS, Host

pytestmark = pytest.mark.distributed
ENDLESS = 5000  # steps


@pytest.fixture(scope="module", params=[
    "plain", pytest.param("fairseq", marks=pytest.mark.fairseq),
    pytest.param("megatron", marks=pytest.mark.megatron)])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A host with its data; skips where it is not installed."""
    if request.param == "fairseq":
        pytest.importorskip("fairseq")
    elif request.param == "megatron":
        pytest.importorskip("megatron.core")
    return HOSTS[request.param](tmp_path_factory.mktemp(request.param))


def until(true: Callable[[], bool]) -> None:
    ticks = threading.Event()
    while not true():
        ticks.wait(0.02)


def test_two_runs_in_one_folder(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(host.train, folder, steps=ENDLESS)
        until(lambda: host.saved(folder) > 0 or first.done())
        assert not first.done(), first.result().log[-4000:]
        process = json.loads((folder / LOCK).read_text())["process"]
        try:
            second = host.train(folder, steps=ENDLESS)
        finally:
            os.kill(process, signal.SIGKILL)
        killed = first.result()
    assert second.code != 0 and not second.late
    assert (f"in use by another run (process {process} on host {socket.gethostname()}, "
            "since ") in second.log, second.log[-4000:]
    assert "--take-over-folder" in second.log
    assert killed.code != 0
    reached = max(killed.losses)
    again = host.train(folder, steps=reached + 2)  # on the same host at once
    assert again.code == 0, again.log[-4000:]
    assert {reached + 1, reached + 2} <= set(again.losses)
    assert not (folder / LOCK).exists()


def test_a_run_of_another_host(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    lock = hold_folder(folder)
    text = json.dumps({**json.loads(lock.path.read_text()), "host": "elsewhere"})
    lock.release()
    lock.path.write_text(text)
    refused = host.train(folder, steps=1)
    assert refused.code != 0 and not refused.late
    assert "on host elsewhere, since" in refused.log, refused.log[-4000:]
    assert lock.path.read_text() == text and not refused.losses
    overruled = host.train(folder, steps=1, more=["--take-over-folder"])
    assert overruled.code == 0 and list(overruled.losses) == [1], overruled.log[-4000:]
    assert not lock.path.exists()


def _start(folder: str) -> bool:
    dist.barrier()
    try:
        lock = hold_folder(folder)
    except ValueError as error:
        assert "is in use by another run" in str(error), error
        lock = None
    dist.barrier()  # all have tried
    if lock is not None:
        lock.release()
    return lock is not None


def test_many_starts_at_once_where_a_killed_run_was(tmp_path: Path) -> None:
    """Of all runs that find the lock of one that is gone, one takes it."""
    lock = hold_folder(tmp_path)
    text = json.dumps({**json.loads(lock.path.read_text()), "begun": "1"})
    lock.release()
    lock.path.write_text(text)
    assert run_gloo(8, _start, str(tmp_path)).count(True) == 1
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_half_written(host: Host, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    # more than the log of a run, and less than a checkpoint
    fault = Fault("disk-full", (0,), SAVE_EVERY + 2, "update", bytes=1 << 18)
    ran = host.train(folder, fault)
    assert ran.code != 0 and not ran.late
    told = [line for line in ran.log.splitlines() if ": error: " in line and "ERROR" not in line]
    assert told and all(re.search("cannot be written|not write|not written", line)
                        for line in told), ran.log[-4000:]
    assert any("File too large" in line and str(folder) in line for line in told), told
    assert any(re.search(rf"(newest|last).* {SAVE_EVERY}\b", line) for line in told), told
    assert "Traceback" not in ran.log
    left = [path for path in folder.rglob("*") if path.suffix in (".new", ".part", ".tmp", ".lock",
            ".writing") or (path.is_dir() and not any(path.iterdir()))]
    assert not left and host.saved(folder) == SAVE_EVERY
    again = host.train(folder)
    assert again.code == 0 and STEPS in again.losses, again.log[-4000:]
