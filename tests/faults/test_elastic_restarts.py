"""torchrun's elastic restarts: a node is lost, the others go on from the last checkpoint at a
smaller number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.distributed import free_port
from tests.faults.meeting import ROOT, started
from tests.faults.recorded import read
from tests.hosts import kills
from tests.scripts.emulate.host_faults import processes_of, wait_for

EVERY, NODES, STEPS, WAIT_S = 5, 4, 40, 600.0
MARK = "MOE_TEST_NODES"  # in the environment of all processes of the nodes
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SLOW = ["-m", "moe_plugin.cli.main", "fault", "slow", "--seconds", "0.5", "--"]
# 12 experts on 4, 3 or 2 ranks
PLAIN = ["--layers", "1", "--experts", "12", "--batch", "12", "--save-every", str(EVERY),
         "--timeout", "60"]
# nodes that start on a busy machine meet within 20 s; one that is silent for 10 s is lost
_RENDEZVOUS = "last_call_timeout=20,keep_alive_interval=2,keep_alive_max_attempt=5"


@dataclass
class Nodes:
    """torchrun on several nodes of one rank each, all on this machine; `lose` ends one of them."""

    program: Sequence[str]
    out: Path
    agents: list[subprocess.Popen] = field(default_factory=list)

    def __enter__(self) -> Nodes:  # noqa: PYI034 - Self needs Python 3.11
        port = free_port()
        for node in range(NODES):
            self.agents.append(self._start(
                f"1:{NODES}", "--rdzv_backend", "c10d", "--rdzv_id", "job", "--local_addr",
                "127.0.0.1", "--rdzv_endpoint", f"127.0.0.1:{port}", "--rdzv_conf",
                f"{_RENDEZVOUS},is_host={int(node == 0)}"))
        return self

    def _start(self, nodes: str, *options: str) -> subprocess.Popen:
        return started(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc_per_node",
             "1", "--max-restarts", "9", *options, *self.program], self.out, PYTHONUNBUFFERED="1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **{MARK: str(self.out)})

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            self._kill(agent)

    def _kill(self, agent: subprocess.Popen) -> None:
        for process in processes_of([agent]).values():
            process.kill()
        agent.kill()
        agent.wait()

    def lose(self) -> None:
        """The last node dies: the launcher and its rank. The first one holds the rendezvous."""
        self._kill(self.agents.pop())

    def left(self) -> list[list[str]]:
        """Command lines of living processes that were started by these nodes."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.out):
                    found.append(process.cmdline())
        return found

    def until(self, done: Callable[[], bool]) -> None:
        """Wait; `AssertionError` with the end of the log after `WAIT_S`, or if a node fails."""
        deadline = time.monotonic() + WAIT_S
        while not done():
            failed = [agent.returncode for agent in self.agents if agent.poll()]
            assert time.monotonic() < deadline and not failed, self.out.read_text()[-5000:]
            time.sleep(0.05)


def deliberately(program: Sequence[str], ranks: int, folder: Path) -> None:
    """The same program, started at this number of ranks."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
         str(ranks), *program], env=kills.environment(), cwd=ROOT, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WAIT_S)
    (folder / "out").open("a").write(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:]


class Plain:
    """scripts/train_plain.py."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def program(self, folder: Path, steps: int, slow: bool) -> list[str]:
        """What torchrun starts; slow: with time between steps."""
        script = [str(ROOT / "scripts" / "train_plain.py"), str(folder), "--steps", str(steps)]
        return [*(SLOW if slow else []), *script, *PLAIN]

    def losses(self, folder: Path) -> list[tuple[int, float]]:
        """(step, loss) in the order in which they were logged."""
        return [(line["step"], line["loss"]) for line in read(folder / "log.jsonl")]


class Fairseq(Plain):
    """`fairseq-train`."""

    def __init__(self, home: Path) -> None:
        from tests.hosts.fairseq import conftest

        super().__init__(home)
        self._tests, self._data = conftest, conftest.make_corpus(home).lm

    def program(self, folder: Path, steps: int, slow: bool) -> list[str]:
        tests = self._tests
        return [*(SLOW if slow else []), str(tests.BIN / "fairseq-train"), *(
            f"{self._data} {tests.LANGUAGE_MODEL} {tests.MOE} {tests.DROPLESS} --moe-expert-count "
            f"12 --max-update {steps} --save-interval-updates {EVERY} --keep-interval-updates 2 "
            f"--no-epoch-checkpoints --disable-validation --moe-timeout 60 --save-dir {folder}"
        ).split()]

    def losses(self, folder: Path) -> list[tuple[int, float]]:
        # lines of steps, which begin otherwise under `moe-plugin fault`
        found = re.findall(r'(\{"epoch": .*"num_updates": .*\})\n', (folder / "out").read_text())
        entries = [entry for entry in map(json.loads, found) if "loss" in entry]
        return [(int(entry["num_updates"]), float(entry["loss"])) for entry in entries]


class Megatron(Plain):
    """Megatron's training script; the experts are spread over as many ranks as there are."""

    def __init__(self, home: Path) -> None:
        from tests.hosts.megatron.conftest import make_data

        super().__init__(home)
        self._data = make_data(home)

    def program(self, folder: Path, steps: int, slow: bool) -> list[str]:
        from tests.hosts.megatron.training import MODEL

        words = [sys.executable, *(SLOW if slow else []), "-m", "moe_plugin.hosts.megatron.train",
                 *MODEL, "--num-experts", "12", "--global-batch-size", "12", "--micro-batch-size",
                 "1", "--cpu", "--num-workers", "0", "--data-path", self._data,
                 "--train-iters", str(steps), "--lr-decay-iters", str(STEPS + 1),  # no rate is 0
                 "--save",
                 str(folder), "--load", str(folder), "--save-interval", str(EVERY), "--moe-timeout",
                 "60"]
        return ["--no-python", "bash", "-c",
                f"exec {shlex.join(words)} --expert-model-parallel-size $WORLD_SIZE"]

    def losses(self, folder: Path) -> list[tuple[int, float]]:
        return [(line["iteration"], line["lm_loss"]) for line in read(folder / "log.jsonl")]


HOSTS = {"plain": (Plain, "torch"), "fairseq": (Fairseq, "fairseq"),
         "megatron": (Megatron, "megatron.core")}


def restarts(losses: Sequence[tuple[int, float]]) -> list[int]:
    """Places of the first steps of each start."""
    return [place for place, (step, _) in enumerate(losses)
            if place == 0 or step <= losses[place - 1][0]]


def _between_checkpoints(made: Sequence[tuple[int, float]], starts: int) -> bool:
    """Of this start, one is complete, and steps after it will be made again."""
    begins = restarts(made)
    return (len(begins) == starts and made[-1][0] > made[begins[-1]][0] + EVERY
            and made[-1][0] % EVERY in (1, 2, 3))


@pytest.mark.parametrize("name", HOSTS)
def test_nodes_are_lost_and_the_others_go_on(name: str, tmp_path: Path) -> None:
    make, needed = HOSTS[name]
    pytest.importorskip(needed)
    host = make(tmp_path)
    folder, wanted = tmp_path / "elastic", tmp_path / "wanted"
    folder.mkdir()
    wanted.mkdir()
    with Nodes(host.program(folder, STEPS, slow=True), folder / "out") as nodes:
        for count in (1, 2):
            nodes.until(lambda: _between_checkpoints(host.losses(folder), count))  # noqa: B023
            nodes.lose()
        nodes.until(lambda: all(agent.poll() == 0 for agent in nodes.agents))
    # torchrun ends what its ranks have started, but not where it is killed itself
    wait_for(lambda: not nodes.left(), 20, lambda: str(nodes.left()))
    found = host.losses(folder)
    starts = restarts(found)
    assert len(starts) == 3, found
    resumed = [found[start][0] - 1 for start in starts]
    assert resumed[0] == 0 and EVERY <= resumed[1] < resumed[2] < STEPS
    assert name == "fairseq" or all(step % EVERY == 0 for step in resumed)  # it saves epochs, too
    # the same by hand: to each of these steps at 4, 3 and 2 ranks
    for ranks, until in zip((4, 3, 2), (*resumed[1:], STEPS), strict=True):
        deliberately(host.program(wanted, until, slow=False), ranks, wanted)
    losses = dict(host.losses(wanted))
    parts = zip(starts, [*starts[1:], len(found)], (*resumed[1:], STEPS), strict=True)
    for begin, end, until in parts:
        made = [(step, loss) for step, loss in found[begin:end] if step <= until]
        # sums are added in another order, and fairseq logs three digits
        assert made and [loss for _, loss in made] == pytest.approx(
            [losses[step] for step, _ in made], abs=1.1e-3 if name == "fairseq" else 1e-5)
