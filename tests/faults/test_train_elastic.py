"""scripts/train_elastic.sh with the real programs: the lighthouse is killed and started again, a
rank of a replica is killed and torchrun starts the replica again, and all replicas end well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from tests.distributed import free_port
from tests.faults import replicas
from tests.faults.meeting import until
from tests.faults.recorded import PLAN, RECORD, read, set_cap
from tests.hosts import kills

SCRIPT = replicas.ROOT / "scripts" / "train_elastic.sh"
HOOKED = Path(__file__).with_name("hooked")
STEPS = 60
ENVIRONMENT = {"VENV": str(Path(sys.executable).parents[1])}
pytestmark = pytest.mark.distributed


def _train(folder: Path, host: str, words: list[str], step: Callable[[int], int]) -> None:
    """Two replicas of two ranks. When both are beyond step 20 the lighthouse is killed; 10 steps
    later a rank of replica 1. They end when both are back.

    words: arguments of the host's program. step: the last one that a replica has logged.
    """
    records = folder / "records"
    for replica in range(2):
        (records / str(replica)).mkdir(parents=True)
        (records / str(replica) / PLAN).write_text(json.dumps({"meets": 2}))
    set_cap(records, 22)
    path = os.pathsep.join([str(HOOKED), str(replicas.ROOT), os.environ.get("PYTHONPATH", "")])
    with open(folder / "out", "w", encoding="utf-8") as out:
        job = subprocess.Popen(
            ["bash", str(SCRIPT), "--port", str(free_port()), "--timeout", "100", "--ranks", "2",
             host, str(folder / "runs"), *words], stdout=out, stderr=subprocess.STDOUT, env={
                **kills.environment(), **ENVIRONMENT, "PYTHONPATH": path, "RECORDS": str(records)})

    def wait(done: Callable[[], bool]) -> None:
        until(lambda: done() or job.poll() is not None, lambda: _logs(folder))
        assert job.poll() is None, "it ended before: " + _logs(folder)

    try:
        wait(lambda: min(step(0), step(1)) > 20)
        [lighthouse] = _processes(job, "torchft_lighthouse")
        lighthouse.kill()
        wait(lambda: bool(_processes(job, "torchft_lighthouse")))
        set_cap(records, 32)
        wait(lambda: min(step(0), step(1)) > 30)
        before = _ranks(job)
        before[-1].kill()
        set_cap(records, max(step(0), step(1)) + 10)
        wait(lambda: len(now := _ranks(job)) == len(before) and now[0].pid != before[0].pid)
        done = sum("step" in line for line in read(records / "1" / RECORD))
        wait(lambda: sum("step" in line for line in read(records / "1" / RECORD)) > done)
        set_cap(records, STEPS)
        until(lambda: job.poll() is not None, lambda: _logs(folder))
    finally:
        if job.poll() is None:
            for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                process.kill()
        job.wait()
    assert job.returncode == 0 and "all 2 replicas ended well" in (folder / "out").read_text(), (
        _logs(folder))
    assert "[INFO] [torchft" not in _logs(folder)  # seven lines a step and rank
    assert "the lighthouse ended" in (folder / "runs" / "lighthouse.log").read_text()


def _logs(folder: Path) -> str:
    return "\n".join(f"{log}:\n{log.read_text()[-2500:]}"
                     for log in [folder / "out", *sorted((folder / "runs").glob("*.log"))])


def _processes(job: subprocess.Popen, program: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith(program) for word in process.cmdline()[:2]):
                found.append(process)
    return found


def _ranks(job: subprocess.Popen) -> list[psutil.Process]:
    """Of replica 1, by rank."""
    found = {}
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            words, rank = process.cmdline(), process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None and any(word.endswith("replica-1") for word in words):
            found.setdefault(int(rank), process)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.slow
def test_replicas_of_two_ranks_survive_a_rank(tmp_path: Path) -> None:
    """plain PyTorch; the ranks of a replica share the experts."""
    options = ["--layers", "1", "--balance", "0", "--save-every", "100000"]

    def lines(replica: int) -> list[dict[str, Any]]:
        return read(tmp_path / "runs" / f"replica-{replica}" / "log.jsonl")

    def step(replica: int) -> int:  # it may have taken the other's state, and has fewer lines then
        found = lines(replica)
        return found[-1]["step"] if found else 0

    _train(tmp_path, "plain", ["--steps", str(STEPS), *options], step)
    for replica in range(2):
        shutil.copy(tmp_path / "runs" / f"replica-{replica}" / "log.jsonl",
                    tmp_path / "records" / str(replica))
    healed = [line["step"] for line in lines(1) if line["loss"] is None]
    assert healed[-1] > 30 and lines(1)[-1]["step"] == STEPS, healed
    assert replicas.difference(tmp_path / "records", 2, STEPS, options) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_a_host_s_replicas_survive_a_rank(host: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    if host == "fairseq":
        from tests.hosts.fairseq import conftest

        data = conftest.make_corpus(tmp_path).lm
        words = (f"{data} {conftest.LANGUAGE_MODEL} {conftest.MOE} {conftest.DROPLESS} "
                 f"--moe-expert-count 8 --max-update {STEPS} --no-save --disable-validation"
                 ).split()

        def step(replica: int) -> int:
            path = runs / f"replica-{replica}.log"
            found = re.findall(r'"num_updates": "(\d+)"', path.read_text() if path.exists() else "")
            return int(found[-1]) if found else 0
    else:
        from tests.hosts.megatron.test_megatron_script import FLAGS

        words = [*FLAGS, "--expert-model-parallel-size", "2", "--train-iters", str(STEPS),
                 "--save-interval", "100000"]

        def step(replica: int) -> int:
            found = read(runs / f"replica-{replica}" / "log.jsonl")
            return found[-1]["iteration"] if found else 0
    _train(tmp_path, host, words, step)
    assert step(0) == step(1) == STEPS


def test_what_the_script_refuses_is_named(tmp_path: Path) -> None:
    for words, message in ((["--ranks", "0", "plain", "x"], "--ranks 0: must be a whole number"),
                           (["nothing", "x"], "host nothing is unknown; known: plain, fairseq"),
                           (["--steps", "5"], "--steps is not an option of this script"),
                           (["plain"], "bash scripts/train_elastic.sh [OPTIONS] HOST OUT")):
        done = subprocess.run(["bash", str(SCRIPT), *words], cwd=tmp_path, capture_output=True,
                              text=True, check=False)
        assert done.returncode and message in done.stderr, words
    missing = subprocess.run(["bash", str(SCRIPT), "plain", "x"], cwd=tmp_path, text=True,
                             capture_output=True, check=False,
                             env={"PATH": "/usr/bin:/bin", "VENV": "/nowhere"})
    assert missing.returncode and "pip install 'moe-plugin[elastic]'" in missing.stderr
