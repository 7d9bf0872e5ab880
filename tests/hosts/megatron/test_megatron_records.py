"""What runs leave behind: one report over two stages, the records of a script that the launcher
starts.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.observe.findings import findings
from moe_plugin.observe.history import read_run
from moe_plugin.observe.layer_rules import RECENT
from tests.hosts import ill
from tests.hosts.megatron.ranks import on_ranks, run_main
from tests.hosts.megatron.training import EP2, MODEL, PP2, QUICK, TRAIN, launched, trained
from tests.observe import wandb_files

pytestmark = pytest.mark.megatron


def test_a_run_over_two_stages_has_one_report(data: str, tmp_path: Path) -> None:
    from moe_plugin.observe.report.page import render

    files = [
        "--log-file",
        str(tmp_path / "log.jsonl"), "--moe-stats-jsonl",
        str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "1", "--moe-stats-timeline", "2"
    ]
    on_ranks(2, trained, [*MODEL, "--data-path", data, "--train-iters", "3", *files, *PP2])
    run = read_run(tmp_path)
    assert [r.step for r in run.steps
            ] == [1, 2, 3] and run.host == "megatron" and run.total_steps == 3 and run.notes == []
    assert run.changed is not None and run.settings["train-iters"] == "3"
    assert run.changed["moe-z-loss-coeff"][1] == "–" and "seed" not in run.changed
    # as the command has them: none that Megatron derives
    assert run.changed["train-iters"] == ("3", "–")
    assert not {"kv-channels", "padded-vocab-size", "world-size"} & set(run.changed)
    assert {name: [r.step for r in records]
            for name, records in run.layers.items()} == {"layer1": [1, 2, 3], "layer2": [1, 2, 3]}
    shown = {
        rank: {s.name for s in spans if s.track == "layers"}
        for (_, rank), spans in run.timelines.items()
    }
    assert shown == {
        0: {"layer1 forward", "layer1 backward"}, 1: {"layer2 forward", "layer2 backward"}
    }
    assert 'id="timeline-1"' in render(run)


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [EP2, PP2], ids=["EP2", "PP2"])
def test_a_launched_script_writes_records_and_hands_over_token_ids(sizes: list[str], data: str,
                                                                    tmp_path: Path) -> None:
    files = ["--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "2",
             "--moe-stats-timeline", "3"]
    launched(["--moe-aux-loss-coeff", "0", "--moe-router", "hash", "--moe-hash-vocabulary", "384",
              "--moe-z-loss-coeff", "0", "--data-path", data, "--train-iters", "4", *files, *sizes],
             2, tmp_path)
    rows = [json.loads(line) for path in sorted(tmp_path.glob("stats.jsonl*"))
            for line in path.read_text().splitlines()]
    balance = sorted((row["step"], row["layer"]) for row in rows if "layer" in row)
    assert balance == [(2, "layer1"), (2, "layer2"), (4, "layer1"), (4, "layer2")]
    calls = {row["calls"] for row in rows if "layer" in row}
    # two steps of all micro-batches and ranks of a stage
    assert calls == {8} and all(row["step"] == 3 for row in rows if "timeline" in row)
    assert len([row for row in rows if "timeline" in row]) == (2 if sizes == PP2 else 1)
    steps = [r for r in read_run(tmp_path).steps if r.loss is not None]
    assert [r.step for r in steps] == [2, 4]
    assert all(0 < r.loss < 10 and r.tokens_per_s > 0 and not r.not_finite for r in steps)


def _trained_ill(argv: list[str], log: str) -> None:
    from moe_plugin.hosts.megatron import script

    with pytest.MonkeyPatch.context() as patch:
        rank = torch.distributed.get_rank()
        made, step = ill.Ill(rank, patch), script.Script.around_step

        def taken(self: script.Script, given: Any, work: Any) -> Any:
            made.begin(given["model"][0])
            return step(self, given, work)

        patch.setattr(script.Script, "around_step", taken)
        if rank == 0:
            logging.basicConfig(filename=log, format="%(message)s", force=True)
        trained([*argv, "--iterations-to-skip", *map(str, range(3, ill.JUMP_TO + 2))])


@pytest.mark.distributed
def test_each_finding_is_in_the_log_once_in_watch_and_in_the_report(
        data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*MODEL, "--num-layers", "3", "--num-experts", "16", *EP2, "--data-path", data,
            "--train-iters", str(ill.LAST), "--log-file", str(tmp_path / "log.jsonl"),
            "--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), *ill.FLAGS.split()]
    on_ranks(2, _trained_ill, argv, str(tmp_path / "train.log"))
    ill.check(tmp_path, (tmp_path / "train.log").read_text(), capsys)


def _trained_well(argv: list[str], log: str) -> None:
    from moe_plugin.hosts.megatron import script

    with pytest.MonkeyPatch.context() as patch:
        made, step = ill.Well(patch), script.Script.around_step

        def taken(self: script.Script, given: Any, work: Any) -> Any:
            made.begin()
            return step(self, given, work)

        patch.setattr(script.Script, "around_step", taken)
        logging.basicConfig(filename=log, format="%(message)s", force=True)
        trained(argv)


def test_a_run_that_is_well_has_no_findings(data: str, tmp_path: Path) -> None:
    argv = [*MODEL, "--num-experts", "8", "--moe-router", "sinkhorn", "--moe-aux-loss-coeff", "0",
            "--moe-z-loss-coeff", "0", "--data-path", data,
            "--train-iters", str(ill.WELL_STEPS), "--log-file", str(tmp_path / "log.jsonl"),
            "--moe-stats-jsonl", str(tmp_path / "stats.jsonl"), *ill.WELL_FLAGS.split()]
    on_ranks(1, _trained_well, argv, str(tmp_path / "train.log"))
    ill.check_well(tmp_path, (tmp_path / "train.log").read_text())


def test_drops_and_losses_of_megatrons_own_router_are_found_in_the_record(
        data: str, tmp_path: Path) -> None:
    on_ranks(1, trained, [*MODEL, "--num-experts", "8", "--moe-expert-capacity-factor", "1.0",
                          "--data-path", data, "--train-iters", str(RECENT), "--moe-stats-jsonl",
                          str(tmp_path / "stats.jsonl"), "--moe-stats-interval", "1"])
    run = read_run(tmp_path)
    for records in run.layers.values():
        assert all(r.losses.keys() == {"load_balancing_loss", "z_loss"} for r in records)
        assert all(r.losses["load_balancing_loss"] >= 1 for r in records)
    found = {one.rule: one for one in findings(run)}
    assert found["drops"].layers and "no_balance" not in found
    share = max(sum(r.drop_fraction for r in records) / RECENT for records in run.layers.values())
    assert found["drops"].title.startswith(f"{100 * share:.0f} % of the choices are dropped in")


@pytest.mark.distributed
def test_weights_and_biases_gets_layers_and_the_training_log(
        data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "4", "--log-interval", "2",
            "--cpu", *QUICK, "--moe-stats-wandb", "moe", "--moe-stats-interval", "2"]
    run_main(TRAIN, argv, 2, tmp_path)
    found = wandb_files.rows(tmp_path)
    assert {row["moe/step"] for row in found} == {2, 4}
    for number in (1, 2):
        mine = [row[f"moe/layer{number}/tokens"] for row in found
                if f"moe/layer{number}/tokens" in row]
        assert mine == [2 * 8 * 32] * 2
    assert [0 < row["moe/training/loss"] < 10 for row in found if "moe/training/loss" in row] == [
        True, True]
