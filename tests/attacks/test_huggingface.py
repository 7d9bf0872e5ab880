"""Models of strangers in Hugging Face's format: their own code does not run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch

from moe_plugin.cli.main import main


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of a model whose configuration names code in it, which leaves a mark."""
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("transformers")
    safetensors.save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'code has run')!r})")
    _configure(tmp_path, auto_map={"AutoConfig": "code.Config",
                                   "AutoModelForCausalLM": "code.Model"})
    return tmp_path


def _configure(folder: Path, **more: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "strange", **more}))


def test_check_hf_does_not_ask_whether_to_run_a_models_code(
        model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert main(["check-hf", str(model)]) == 2
    said = capsys.readouterr().out
    assert "auto_map in config.json) is not run" in said and "[y/N]" not in said
    assert not (model / "code has run").exists()


def test_check_hf_gets_no_code_from_the_network(
        model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _configure(model, attn_implementation="stranger/attention")
    assert main(["check-hf", str(model)]) == 2
    assert "'stranger/attention'" in capsys.readouterr().err
