"""A dense language model of fairseq becomes a Mixture of Experts that computes the same first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils

from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.cli.main import main
from tests.hosts.fairseq.conftest import LANGUAGE_MODEL, Corpus, run

OPTIONS = {
    "copy": ["--experts", "4", "--top-k", "2"],
    "granular": ["--experts", "8", "--top-k", "4", "--granularity", "2"],
    "every other layer, shared": ["--experts", "4", "--top-k", "2", "--every", "2", "--shared",
                                  "0.5"],
}


@pytest.fixture(scope="module")
def dense(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run of two steps by `fairseq-train`: ReLU, sinusoidal positions, scaled embedding."""
    folder = tmp_path_factory.mktemp("dense")
    run("fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} --decoder-normalize-before "
        f"--max-update 2 --save-dir {folder} --disable-validation").ok()
    return folder


def _logits(folder: Path, corpus: Corpus, tokens_BT: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """By fairseq's own loader, as `fairseq-eval-lm` has it."""
    [model], cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint_last.pt")], arg_overrides={"data": str(corpus.lm)})
    with torch.no_grad():
        return cfg.model, model.eval()(tokens_BT)[0]


@pytest.mark.parametrize("case", OPTIONS)
def test_first_logits_are_the_dense_models(case: str, dense: Path, corpus: Corpus, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    argv = OPTIONS[case]
    assert main(["upcycle", str(dense), str(tmp_path / "moe"), *argv]) == 0
    layers = 1 if "every" in case else 2
    assert f"{layers} MoE layers of {argv[1]} experts" in capsys.readouterr().out
    tokens_BT = torch.randint(4, 20, (2, 12), generator=torch.Generator().manual_seed(0))
    _, want = _logits(dense, corpus, tokens_BT)
    model, found = _logits(tmp_path / "moe", corpus, tokens_BT)
    assert model.moe_freq == 2 // layers and model.moe_expert_count == int(argv[1])
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_an_upcycled_model_is_trained_by_the_command_line(dense: Path, corpus: Corpus,
                                                          tmp_path: Path) -> None:
    moe = tmp_path / "moe"
    assert main(["upcycle", str(dense), str(moe), *OPTIONS["copy"]]) == 0
    result = run(
        "fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} --decoder-normalize-before --user-dir "
        "moe_plugin --moe-freq 1 --moe-expert-count 4 --criterion moe_cross_entropy --moe-dispatch "
        "ragged --moe-capacity-factor none --moe-second-expert-policy all --moe-router-normalize "
        f"before_drop --moe-gate-loss-wt 0.01 --restore-file {moe / 'checkpoint_last.pt'} "
        f"--reset-optimizer --reset-dataloader --reset-meters --max-update 3 --save-dir "
        f"{tmp_path / 'run'} --disable-validation").ok()
    assert len(result.losses) == 3
    with open_source(tmp_path / "run") as source:
        assert dict(source.layers).keys() == {f"decoder.layers.{layer}.moe_layer.moe."
                                              for layer in range(2)}
        assert source.values["step"] == 3 and (MODEL, "decoder.version") in source.entries
