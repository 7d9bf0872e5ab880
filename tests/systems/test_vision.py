"""Images, as a user trains on them: the command, then numbers that are computed once more here."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe_plugin.checkpoint import load
from moe_plugin.cli.main import main as moe_plugin_main
from moe_plugin.hosts.timm.backbone import optional
from moe_plugin.hosts.timm.data import MEAN, STD
from moe_plugin.hosts.timm.model import PRESETS, build
from moe_plugin.hosts.timm.published import write_published
from moe_plugin.hosts.timm.train import main
from tests.hosts.timm.folders import cifar_cache, cifar_package

with contextlib.suppress(ValueError):  # not installed: these tests are skipped
    optional("torchvision")
pytest.importorskip("timm")


def last(file: Path) -> dict:
    return json.loads(file.read_text().splitlines()[-1])


def loss_and_accuracy(model: torch.nn.Module, pixels: np.ndarray) -> tuple[float, float]:
    """Of the made-up test images, whose label is their number modulo 3."""
    x = (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
         - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    y = torch.arange(len(x)) % 3
    with torch.no_grad():
        logits = model.eval()(x)
    return float(F.cross_entropy(logits, y)), float((logits.argmax(-1) == y).double().mean())


def test_photographs_train_and_are_classified(tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    batches = cifar_package(cifar_cache(tmp_path, monkeypatch), monkeypatch, each=24)
    common = ["--data", str(tmp_path / "images"), "--preset", "cifar", "--batch-size", "12",
              "--moe-capacity-factor", "none"]
    assert main([*common, "--example", "cifar10", "--out", str(tmp_path / "run"), "--epochs", "4",
                 "--flips"]) == 0
    found = last(tmp_path / "run" / "log.jsonl")
    model = build(PRESETS["cifar"], 3, settings={"dispatch.capacity_factor": None})
    load(tmp_path / "run" / "checkpoint", model)
    loss, accuracy = loss_and_accuracy(model, batches["test_batch"])
    assert found["valid_loss"] == pytest.approx(loss, rel=1e-4)
    assert found["accuracy"] == pytest.approx(accuracy) and accuracy > 0.9
    # under the released files' names, and read from them by the command
    write_published(model, tmp_path / "model.pth")
    assert main([*common, "--out", str(tmp_path / "again"), "--evaluate", "--init",
                 str(tmp_path / "model.pth")]) == 0
    again = last(tmp_path / "again" / "evaluations.jsonl")
    assert again["valid_loss"] == pytest.approx(loss, rel=1e-4)


def test_ensembles_are_compared_on_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    cifar_package(cifar_cache(tmp_path, monkeypatch), monkeypatch, each=6)
    command = ["bench", "ensembles", "--data", "cifar10", "--quick", "--rows", "0", "5", "--jobs",
               "1", "--runs", str(tmp_path / "runs"), "--json"]
    assert moe_plugin_main(command) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert list(results) == ["independent (k = 5)", "MCL (k = 4)"]
    for (row, [found]), file in zip(results.items(), sorted(tmp_path.glob("runs/*/*/log.jsonl")),
                                    strict=True):
        logged = last(file)
        assert {name: logged[name] for name in found} == found, row
        assert 0 <= found["oracle_error"] <= found["member_error"] <= 1
        assert sum(found["confidence"]["ensemble"]) == 6
        # k of five members are responsible for each image
        assert sum(found["confidence"]["responsible"]) == 6 * (5 if "independent" in row else 4)
