"""`moe-plugin plan --choices`: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.planner.order_files import dump_choices, load_orders
from tests.planner.test_expert_order import counted, planted

pytestmark = pytest.mark.fast

RANKS = ("--nodes", "2", "--ranks-per-node", "2")


@pytest.fixture
def choices(tmp_path: Path) -> str:
    path = tmp_path / "choices.json"
    dump_choices(path, {"layer1": counted(planted(4, 4, 1)[1], 16),
                        "layer2": counted(planted(2, 8, 2)[1], 16)})
    return str(path)


def test_what_would_be_saved_before_it_is_done(choices: str, tmp_path: Path,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "order.json"
    assert main(["plan", "--choices", choices, *RANKS, "--order", str(order)]) == 0
    text = capsys.readouterr().out
    assert "-> 1.00 (" in text and f"reshard IN OUT --order {order}" in text
    assert "% of rows between nodes with dispatch.send=nodes" in text
    assert sorted(load_orders(order)["layer1"]) == list(range(16))
    assert main(["plan", "--choices", choices, *RANKS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"]["layer1"]["order"] == list(load_orders(order)["layer1"])
    before, after = found["layers"]["layer2"]["rows"]["nodes"]
    assert after == 1.0 < before and 0 < found["saved"]["nodes"] < 1


def test_files_of_pipeline_stages(choices: str, tmp_path: Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    stage = tmp_path / "choices.json.stage1"
    dump_choices(stage, {"layer3": counted(planted(4, 4, 1)[1], 16)})
    order = tmp_path / "order.json"
    assert main(["plan", "--choices", choices, str(stage), *RANKS, "--order", str(order)]) == 0
    assert list(load_orders(order)) == ["layer1", "layer2", "layer3"]
    assert main(["plan", "--choices", choices, choices, *RANKS]) == 2
    assert "which another file has, too" in capsys.readouterr().err


@pytest.mark.parametrize("words,said", [
    (["--order", "x"], "go with --choices"), (["--slack", "0.1"], "go with --choices"),
    (["--choices", "FILE"], "give --nodes and --ranks-per-node"),
    (["--choices", "FILE", *RANKS, "--model", "x"], "--model is of another use"),
    (["--choices", "FILE", "--nodes", "3", "--ranks-per-node", "1"], "16 experts do not fit 3"),
    (["--choices", "FILE", *RANKS, "--slack", "nan"], "slack=nan must be")])
def test_what_is_refused(choices: str, words: list[str], said: str,
                         capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *(choices if word == "FILE" else word for word in words)]) == 2
    assert said in capsys.readouterr().err
