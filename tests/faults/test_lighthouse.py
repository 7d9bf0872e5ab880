"""The lighthouse dies and is started again at its address: the replicas go on."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchft", reason="needs torchft: pip install 'moe-plugin[elastic]'")

from moe_plugin.training.resilience.elastic import ElasticReplica
from moe_plugin.training.resilience.step_votes import IN_A_QUORUM, LIVING, Quorums, retries
from tests.distributed import free_port
from tests.faults import replicas
from tests.faults.meeting import WAIT_S, meet, start_lighthouse, until
from tests.preloaded import Server

pytestmark = pytest.mark.distributed
server = Server("tests.faults.preload")
STEPS, DIES = 9, (3, 6)  # the lighthouse dies after these steps
SCRIPT = replicas.ROOT / "scripts" / "train_elastic.sh"
Made = tuple[int, float, float]  # step, weight before, mean of the gradients


class _Replica:
    """A weight, of which every step takes the mean of the replicas' gradients."""

    def __init__(self, lighthouse: str, number: int) -> None:
        self.number, self.weight, self.done = number, torch.zeros(3), 0
        self.replica = ElasticReplica(
            lighthouse, number, lambda: {"weight": self.weight, "done": self.done}, self._load,
            timeout_s=WAIT_S)

    def _load(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])
        self.done = state["done"]

    def step(self) -> Made | None:
        """None: it was lost."""
        gradient, who_N = torch.full((3,), 10.0 ** self.number), torch.zeros(2, dtype=torch.int64)
        who_N[self.number] = 1
        if not self.replica.average([gradient, who_N]):
            return None
        before, mean = self.weight[0].item(), float(who_N[0] + 10 * who_N[1]) / int(who_N.sum())
        assert gradient[0].item() == mean
        self.weight -= gradient
        self.done += 1
        return self.done, before, mean


def _train(lighthouse: str, folder: str) -> tuple[list[Made], float]:
    """What this replica made; the weight at the end."""
    number = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    run, made, asked = _Replica(lighthouse, number), [], 0
    meet(lighthouse, 2)
    while run.done < STEPS or run.replica.members < 2:  # the last step is made by both
        step = run.step()
        made += [] if step is None else [step]
        if number == 0 and asked < len(DIES) and run.done >= DIES[asked]:
            Path(folder, f"dies{asked}").touch()
            until(Path(folder, f"dead{asked}").exists)
            asked += 1  # its next step begins without a lighthouse
    run.replica.close()
    return made, run.weight[0].item()


def _kill_and_restart(port: int, folder: Path, first: subprocess.Popen) -> None:
    running = first
    for time_of in range(len(DIES) + 1):
        until((folder / f"dies{time_of}").exists)
        running.kill()
        running.wait()
        (folder / f"dead{time_of}").touch()
        if time_of < len(DIES):
            time.sleep(0.3)  # replicas ask meanwhile
            running = start_lighthouse(port)


def test_replicas_go_on_when_the_lighthouse_is_back(tmp_path: Path) -> None:
    port = free_port()
    thread = Thread(target=_kill_and_restart, args=(port, tmp_path, start_lighthouse(port)))
    thread.start()
    try:
        done = server.run(2, _train, f"http://127.0.0.1:{port}", str(tmp_path),
                          timeout_s=2 * WAIT_S)
    finally:
        for time_of in range(len(DIES) + 1):
            (tmp_path / f"dies{time_of}").touch()
        thread.join()
    assert done.code == 0, done.log[-4000:]
    (ours, end), (others, other_end) = done.results
    # one may make steps without the other before the new lighthouse hears both
    by_step: dict[int, set[Made]] = {}
    for made in (*ours, *others):
        by_step.setdefault(made[0], set()).add(made)
    weight = 0.0
    for step in range(1, max(by_step) + 1):
        [(_, before, mean)] = by_step[step]
        assert before == weight and mean in (1.0, 10.0, 5.5), (ours, others)
        weight -= mean
    assert end == other_end == weight and max(by_step) >= STEPS


class _Client:
    """Answers as torchft's client."""

    def __init__(self) -> None:
        self.answer = SimpleNamespace()

    def _quorum(self, **asked: Any) -> SimpleNamespace:
        return SimpleNamespace(**vars(self.answer))


def test_quorums_of_a_new_lighthouse_have_other_numbers() -> None:
    client = _Client()
    quorums = Quorums(client)

    def ask(number: int, members: str, most: int, heal: bool = False) -> tuple[int, int]:
        client.answer = SimpleNamespace(quorum_id=number, replica_ids=list(members), max_step=most,
                                        heal=heal)
        return quorums._quorum(step=0).quorum_id, quorums.least_count

    first = ask(1, "ab", 5)
    assert first[1] == LIVING + IN_A_QUORUM and ask(1, "ba", LIVING + IN_A_QUORUM + 4) == first
    second = ask(2, "a", LIVING + IN_A_QUORUM + 5)
    assert second[1] == LIVING + 2 * IN_A_QUORUM
    # a new lighthouse: the same number, other members, then the same members as long before
    third, fourth = ask(1, "a", second[1] + 3), ask(1, "ab", second[1] + 9)
    assert third[1] == fourth[1] == LIVING + 3 * IN_A_QUORUM
    assert len({first[0], second[0], third[0], fourth[0]}) == 4
    again = Quorums(client)
    assert again._quorum(step=0).quorum_id == fourth[0]  # of another member
    # the same members under the same number, but one has made steps with a newer lighthouse alone
    fifth = ask(1, "ab", fourth[1] + 3, heal=True)
    assert fifth[0] != fourth[0] and fifth[1] == LIVING + 4 * IN_A_QUORUM


def test_a_lighthouse_is_asked_ten_times_a_second() -> None:
    assert [retries(seconds) for seconds in (0.01, 1, 600)] == [0, 9, 5999]


_FAKE_LIGHTHOUSE = """#!/bin/sh
echo "$@" >>"$STARTS"
while [ ! -e "$DIE" ] || [ $(wc -l <"$STARTS") -gt 2 ]; do sleep 0.05; done
exit 3
"""
_FAKE_PYTHON = """#!/bin/sh
[ "$1" = -c ] && echo 0 && exit
touch "$DIE"
while [ $(wc -l <"$STARTS") -lt 3 ]; do sleep 0.05; done
"""


def test_the_script_starts_the_lighthouse_again(tmp_path: Path) -> None:
    """It dies when the first replica is there, and again; the job ends well and leaves none."""
    starts, out = tmp_path / "starts", tmp_path / "out"
    (tmp_path / "bin").mkdir()
    for name, text in (("torchft_lighthouse", _FAKE_LIGHTHOUSE), ("python", _FAKE_PYTHON)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    starts.touch()
    done = subprocess.run(
        ["bash", str(SCRIPT), "--port", "29999", "--timeout", "7", "plain", str(out)], text=True,
        capture_output=True, check=False, timeout=WAIT_S, env={
            "PATH": os.environ["PATH"], "VENV": str(tmp_path), "STARTS": str(starts),
            "DIE": str(tmp_path / "die")})
    assert done.returncode == 0 and "all 2 replicas ended well" in done.stdout, done
    [*lines] = starts.read_text().splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1 and "--bind 127.0.0.1:29999" in lines[0]
    assert "--join_timeout_ms 7000" in lines[0]
    log = (out / "lighthouse.log").read_text()
    assert log.count("the lighthouse ended with status 3") == 2
    found = subprocess.run(["pgrep", "-f", str(tmp_path / "bin")], capture_output=True, text=True,
                           check=False)
    assert not found.stdout, found.stdout


def test_the_script_gives_a_lighthouse_up_that_never_starts(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, text in (
            ("torchft_lighthouse", '#!/bin/sh\necho x >>"$STARTS"\nexit 4\n'),
            ("python", '#!/bin/sh\n[ "$1" = -c ] && echo 0 && exit\n'
                       'while ! grep -q "start 2 of at most 2" "$LOG"; do sleep 0.05; done\n'
                       'exit 5\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", str(SCRIPT), "--restarts", "1", "plain", str(tmp_path / "out")], text=True,
        capture_output=True, check=False, timeout=WAIT_S, env={
            "PATH": os.environ["PATH"], "VENV": str(tmp_path),
            "STARTS": str(tmp_path / "starts"), "LOG": str(tmp_path / "out" / "lighthouse.log")})
    assert done.returncode == 5 and "replica 0 ended with status 5" in done.stderr, done
    assert (tmp_path / "starts").read_text() == "x\n" * 2
