"""Weights & Biases gets the names and numbers that TensorBoard gets; their package, offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_plugin.config import ObserveConfig, run_from_dict
from moe_plugin.observe import StatsRecorder
from tests.observe.wandb_files import alerts, rows

# in a process of its own: their package starts a service and replaces standard output
RECORDS = """
import torch
from moe_plugin import MoEConfig, MoELayer
from moe_plugin.config import ObserveConfig
from moe_plugin.observe import StatsRecorder
recorder = StatsRecorder(ObserveConfig(interval=1, wandb="team/moe"))
layer = MoELayer(MoEConfig(model_dim=8, num_experts=4))
for step in (7, 3):
    recorder.add("layer0", layer(torch.randn(6, 8)).stats)
    recorder.step(step)
    recorder.training(step, loss=2.5)
recorder.training(8, loss=float("nan"))
recorder.close()
"""


def records(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `RECORDS` with these variables of Weights & Biases and no others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    return subprocess.run([sys.executable, "-c", RECORDS], cwd=folder, text=True, timeout=300,
                          stdin=subprocess.DEVNULL, capture_output=True, check=False,
                          env={**kept, "WANDB_DIR": str(folder), "WANDB_CONFIG_DIR": str(folder),
                               "NETRC": str(folder / "netrc"), **variables})


def test_it_gets_the_numbers_of_each_record_by_step(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = records(tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    of_layers, of_training = rows(tmp_path)[:4:2], rows(tmp_path)[1:4:2]
    assert [row["moe/step"] for row in of_layers + of_training] == [7, 3, 7, 3]  # it may go back
    assert [row["moe/training/loss"] for row in of_training] == [2.5, 2.5]
    for row in of_layers:
        assert row["moe/layer0/tokens"] == 6 and row["moe/layer0/loss/gshard"] > 0
        assert sum(row[f"moe/layer0/share/expert00{i}"] for i in range(4)) == pytest.approx(1)


    (alert,) = alerts(tmp_path)  # what the log warns of
    assert alert[0] == "not_finite at step 8"
    assert alert[1].startswith("a loss or gradient is not finite at step 8. All ranks skip")


def test_a_start_that_fails_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = records(tmp_path)  # no key
    assert done.returncode == 1
    assert "ValueError: observe.wandb='team/moe': Weights & Biases cannot start" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"observe.wandb='moe' needs .*moe-plugin\[wandb\]"):
        StatsRecorder(ObserveConfig(wandb="moe"))


@pytest.mark.parametrize("name", ["", "a/b/c", "two words", "/moe", "x" * 200])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="observe.wandb=.*PROJECT or ENTITY/PROJECT"):
        run_from_dict({"observe": {"wandb": name}})
    assert run_from_dict({"observe": {"wandb": "team-1/moe.2"}}).observe.writes
