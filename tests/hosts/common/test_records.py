"""What runs leave behind: findings in the log, in `watch` and in the report; Weights & Biases."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.hosts import ill
from tests.hosts.common.adapters import HOSTS
from tests.hosts.common.host import Host
from tests.observe import wandb_files

ILL = {
    "fairseq": "--moe-freq 1 --decoder-layers 3 --moe-expert-count 16",
    "megatron": "--num-layers 3 --num-experts 16 --iterations-to-skip "
                + " ".join(map(str, range(3, ill.JUMP_TO + 2))),
}
WELL = {
    "fairseq": "--moe-freq 1 --moe-gate-loss-wt 1 --moe-expert-count 8 --batch-size 16",
    "megatron": "--num-experts 8 --moe-router sinkhorn --moe-aux-loss-coeff 0 --moe-z-loss-coeff 0",
}


def make_ill(name: str) -> None:
    """In every rank of this host."""
    made = ill.Ill(int(os.environ["RANK"]), pytest.MonkeyPatch())
    HOSTS[name].around_steps(made.begin, ill.JUMP_TO)


def make_well(name: str) -> None:
    """The same for a run without findings."""
    made = ill.Well(pytest.MonkeyPatch())

    def begin(_: torch.nn.Module) -> None:
        made.begin()

    HOSTS[name].around_steps(begin)


def test_each_finding_is_in_the_log_once_in_watch_and_in_the_report(
        host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = f"{ILL[host.name]} {ill.FLAGS} --moe-stats-jsonl {tmp_path / 'stats.jsonl'}"
    log = host.train(tmp_path, ill.LAST, more, attack=partial(make_ill, host.name)).ok().log
    (tmp_path / "train.log").write_text(log)
    ill.check(tmp_path, log, capsys)


def test_a_run_that_is_well_has_no_findings(host: Host, tmp_path: Path) -> None:
    more = f"{WELL[host.name]} {ill.WELL_FLAGS} --moe-stats-jsonl {tmp_path / 'stats.jsonl'}"
    log = host.train(tmp_path, ill.WELL_STEPS, more, ranks=1,
                     attack=partial(make_well, host.name)).ok().log
    (tmp_path / "train.log").write_text(log)
    ill.check_well(tmp_path, log)


def test_weights_and_biases_gets_layers_and_the_training_log(
        host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = host.train(tmp_path, 4, "--moe-stats-wandb moe --moe-stats-interval 2").ok()
    found = wandb_files.rows(tmp_path)  # of one run: rank 0's
    for layer in host.layers:
        rows = [row for row in found if f"moe/{layer}/tokens" in row]
        assert [row["moe/step"] for row in rows] == [2, 4]
        assert sum(row[f"moe/{layer}/tokens"] for row in rows) == sum(map(host.tokens, run.rows))
    training = [row for row in found if "moe/training/loss" in row]
    assert [row["moe/step"] for row in training] == [1, 2, 3, 4]
    assert all(0 < row["moe/training/loss"] < 10 for row in training)
