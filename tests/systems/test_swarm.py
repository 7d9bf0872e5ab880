"""SWARM: peers that come and go, and two trainers, train a Megatron model with experts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.cli.main import main
from scripts.bench.swarm_rebalance import Experiment, simulate
from tests.distributed import free_port
from tests.hosts.megatron.conftest import make_data
from tests.hosts.megatron.ranks import on_ranks, run_main
from tests.hosts.megatron.training import MODEL, QUICK, TRAIN, own_loop, records_of, refusal

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, own_loop]
RUN = [*MODEL, "--untie-embeddings-and-output-weights", "--num-layers", "4", "--moe-layer-freq",
       "2", "--eval-interval", "3", "--eval-iters", "2", "--split", "80,20,0", "--lr-decay-iters",
       "20"]
# the order of sums of gradients over peers is another one than that of one process
CLOSE = 2e-6
WAIT_S = 600.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_data(tmp_path_factory.mktemp("data"))


class Commands:
    """Processes of one swarm, each of the command that a user would type."""

    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.folder, self.argv = folder, argv
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *more: str) -> None:
        with (self.folder / f"{name}.txt").open("wb") as out:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", TRAIN, "--cpu", *QUICK, *self.argv, *more], cwd=self.folder,
                stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.txt").read_text()

    def until(self, what: Callable[[], Any], *needed: str) -> None:
        """Wait; these processes must not end before."""
        end = time.monotonic() + WAIT_S
        while not what():
            for name in needed:
                assert self.processes[name].poll() is None, self.said(name)[-6000:]
            assert time.monotonic() < end, {name: self.said(name)[-2000:] for name in needed}
            time.sleep(0.05)

    def ends(self, *names: str) -> None:
        for name in names:
            assert self.processes[name].wait(WAIT_S) == 0, self.said(name)[-6000:]


@contextmanager
def commands(folder: Path, argv: list[str]) -> Iterator[Commands]:
    made = Commands(folder, argv)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


def records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def numbers(found: list[dict[str, Any]]) -> list[float]:
    """Losses of training and validation, and norms of gradients."""
    return [row[name] for row in found for name in ("lm_loss", "valid_loss", "grad_norm")
            if name in row]


def test_peers_and_trainers_come_and_go(data: str, tmp_path: Path) -> None:
    """The losses, validations and norms are those of Megatron in one process, while a peer is
    killed, two others come, and a second trainer joins; then from the checkpoint once more.
    """
    argv = [*RUN, "--data-path", data, "--train-iters", "12"]
    whole = records_of(1, argv, tmp_path / "whole.jsonl")
    log, saved = tmp_path / "lead.jsonl", tmp_path / "saved"
    swarm = ["--swarm-address", f"127.0.0.1:{free_port()}", "--swarm-timeout", "120"]
    lead = ["--swarm", "lead", "--swarm-wire", "none", "--swarm-peers", "4", "--log-file", str(log)]
    with commands(tmp_path, [*argv, *swarm]) as run:
        run.start("lead", *lead, "--save", str(saved), "--save-interval", "8")
        run.start("join", "--swarm", "join", "--log-file", str(tmp_path / "join.jsonl"))
        for name in ("a", "b", "c", "d"):  # two for each stage
            run.start(name, "--swarm", "peer")
        run.until(lambda: len(records(log)) >= 2, "lead")
        run.processes["a"].send_signal(signal.SIGKILL)
        run.processes["lead"].send_signal(signal.SIGSTOP)  # else it may end before the newcomer
        run.start("e", "--swarm", "peer")
        run.until(lambda: "is looking for a trainer" in run.said("e"), "e")
        run.processes["lead"].send_signal(signal.SIGCONT)
        run.ends("lead", "join", "b", "c", "d", "e")
    assert len(numbers(whole)) == 12 * 2 + 5
    assert numbers(records(log)) == pytest.approx(numbers(whole), rel=CLOSE)
    joined = numbers(records(tmp_path / "join.jsonl"))
    assert joined == pytest.approx(numbers(whole)[-len(joined):], rel=CLOSE)
    assert len(re.findall("peer .* has connected", run.said("lead"))) == 5
    assert int(re.findall(r"this trainer drove (\d+) micro", run.said("join"))[0]) > 0
    (saved / "latest_checkpointed_iteration.txt").write_text("8")
    rest, swarm[1] = tmp_path / "rest.jsonl", f"127.0.0.1:{free_port()}"
    with commands(tmp_path, [*argv, *swarm]) as run:
        run.start("lead", "--swarm", "lead", "--swarm-wire", "none", "--log-file", str(rest),
                  "--load", str(saved))
        for name in ("a", "b"):
            run.start(name, "--swarm", "peer")
        run.ends("lead", "a", "b")
    later = [row for row in whole if row["iteration"] > 8]
    assert numbers(records(rest)) == pytest.approx(numbers(later), rel=CLOSE)


def test_a_file_of_settings(data: str, tmp_path: Path) -> None:
    """The same by YAML, with a secret, and boundaries in 8 bits."""
    (tmp_path / "secret").write_text("long and random")
    settings = {"address": f"127.0.0.1:{free_port()}", "secret": str(tmp_path / "secret")}
    for role in ("lead", "peer"):
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump({
            "swarm": {**settings, "role": role}}))
    argv = [*RUN, "--data-path", data, "--train-iters", "2"]
    whole = records_of(1, argv, tmp_path / "whole.jsonl")
    log = tmp_path / "lead.jsonl"
    with ThreadPoolExecutor(3) as pool:
        roles = [["lead.yaml", "--log-file", str(log)], ["peer.yaml"], ["peer.yaml"]]
        for ended in [pool.submit(run_main, TRAIN, ["--cpu", *QUICK, *argv, "--moe-config", *words],
                                  1, tmp_path) for words in roles]:
            ended.result()
    assert records(log)[0]["lm_loss"] != whole[0]["lm_loss"]
    assert numbers(records(log)) == pytest.approx(numbers(whole), rel=2**-4)


@pytest.mark.parametrize(("more", "said"), [
    (["--bf16"], "--swarm does not fit --bf16 or --fp16 in Megatron: train in float32"),
    (["--swarm-stages", "5"], "--num-layers 4 below --swarm-stages 5"),
    (["--swarm-address", "here"], "swarm.address='here' is out of bounds: must be host:port"),
    (["--swarm-host", "127.0.0.1", "--swarm-host", "10.0.0.1"],
     "swarm.host='10.0.0.1' .* where swarm.role=lead"),
])
def test_what_does_not_fit_is_refused(more: list[str], said: str, data: str) -> None:
    [found] = on_ranks(1, refusal, [*RUN, "--data-path", data, "--train-iters", "1", "--swarm",
                                    "lead", *more])
    assert re.search(said, found), found


def placements(stages: int, peers: int, present: float, draws: int) -> float:
    """Mean of the smallest stage over mean of the best placement's, of peers that are each present
    with this probability, at a stage at random: what a long experiment without moves must give.
    """
    dice = np.random.default_rng(0)
    there = dice.random((draws, peers)) < present
    stage_of = dice.integers(stages, size=(draws, peers))
    counts = np.stack([(there & (stage_of == stage)).sum(1) for stage in range(stages)])
    return counts.min(0).sum() / (there.sum(1) // stages).sum()


def test_rebalancing_gains_more_the_more_often(capsys: pytest.CaptureFixture[str]) -> None:
    """Without moves and with newcomers at random, the share is what chance gives."""
    assert main(["bench", "swarm", "--parts", "rebalancing", "--json"]) == 0
    about, rows = json.loads(capsys.readouterr().out)["rebalancing"]
    share = {(row["places"], row["life"]): row["share"] for row in rows}
    chance = placements(about["stages"], about["peers"], 0.8, 20_000)
    for life in (900.0, 3600.0, 14400.0):
        none, each_300, each_60 = (share[f"at random, {moves}", life] for moves in (
            "none moves", "moves every 300 s", "moves every 60 s"))
        assert none < each_300 < each_60 < share["to the slowest stage, moves every 60 s", life]
        assert none == pytest.approx(chance, abs=0.04)


@pytest.mark.parametrize("rebalance_s", [None, 60.0])
def test_one_stage_has_nothing_to_rebalance(rebalance_s: float | None) -> None:
    found = simulate(Experiment(stages=1, peers=5, load_s=0.0), rebalance_s)
    assert (found.share, found.moves) == (1.0, 0)
