"""A dense model of fairseq becomes a Mixture of Experts that computes the same first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils

from moe_plugin.checkpoint import CheckpointError
from moe_plugin.checkpoint.formats.base import open_source
from moe_plugin.checkpoint.formats.fairseq.neutral import (
    PADDING_ROWS,
    POSITIONS,
    neutral_tensors,
)
from moe_plugin.checkpoint.source import MODEL
from moe_plugin.cli.main import main
from tests.checkpoint.test_source import InMemory
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


TRANSLATION = (
    "--task translation -s src -t tgt --arch transformer_tiny --dropout 0 --optimizer adam --lr "
    "0.005 --lr-scheduler fixed --batch-size 16 --max-update 40 --no-progress-bar --log-format "
    "json --log-interval 1 --cpu --num-workers 0 --seed 3 --disable-validation --label-smoothing "
    "0.1")


@pytest.fixture(scope="module")
def translates(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense_mt")
    run("fairseq-train", f"{corpus.mt} {TRANSLATION} --criterion label_smoothed_cross_entropy "
        f"--save-dir {folder}").ok()
    return folder


def _translation_loss(folder: Path, corpus: Corpus) -> tuple[Any, float]:
    """Of the validation sentences, per token, in double precision behind the model."""
    [model], cfg, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(folder / "checkpoint_last.pt")], arg_overrides={"data": str(corpus.mt)})
    task.load_dataset("valid")
    data = task.dataset("valid")
    batch = data.collater([data[index] for index in range(len(data))])
    with torch.no_grad():
        logits_BTV = model.eval()(**batch["net_input"])[0].double()
    target_BT = batch["target"]
    return cfg.model, float(torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), target_BT.flatten(), ignore_index=task.target_dictionary.pad()))


def _translations(folder: Path, corpus: Corpus) -> list[str]:
    log = run("fairseq-generate", f"{corpus.mt} --user-dir moe_plugin --cpu --beam 2 "
              f"--max-len-b 12 --batch-size 8 --path {folder / 'checkpoint_last.pt'}").ok().log
    return sorted(re.findall(r"^D-\d+\t\S+\t(.*)$", log, re.MULTILINE))


@pytest.mark.parametrize(("argv", "layers"), [
    (OPTIONS["copy"], {"encoder": [0, 1], "decoder": [0, 1]}),
    ([*OPTIONS["granular"], "--every", "2"], {"encoder": [1], "decoder": [1]}),
    ([*OPTIONS["copy"], "--shared", "0.5", "--encoder-every", "0"], {"decoder": [0, 1]}),
    ([*OPTIONS["copy"], "--encoder-every", "2", "--decoder-every", "0"], {"encoder": [1]}),
], ids=["copy", "granular, every second", "shared, decoder alone", "encoder alone"])
def test_an_upcycled_translation_model_translates_as_before(
        argv: list[str], layers: dict[str, list[int]], translates: Path, corpus: Corpus,
        tmp_path: Path) -> None:
    moe = tmp_path / "moe"
    assert main(["upcycle", str(translates), str(moe), *argv]) == 0
    with open_source(moe) as source:
        assert set(source.layers) == {f"{stack}.layers.{number}.moe_layer.moe."
                                      for stack, numbers in layers.items() for number in numbers}
    _, wanted = _translation_loss(translates, corpus)
    model, found = _translation_loss(moe, corpus)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert model.moe_expert_count == int(argv[1])
    assert _translations(moe, corpus) == _translations(translates, corpus) != []


def test_an_upcycled_translation_model_is_trained_by_the_command_line(
        translates: Path, corpus: Corpus, tmp_path: Path) -> None:
    """Its first loss is the dense model's with the same batch."""
    moe = tmp_path / "moe"
    assert main(["upcycle", str(translates), str(moe), *OPTIONS["copy"]]) == 0
    again = f"{corpus.mt} {TRANSLATION} --reset-optimizer --reset-dataloader --reset-meters"
    dense = run("fairseq-train", f"{again} --criterion label_smoothed_cross_entropy --max-update 1 "
                f"--restore-file {translates / 'checkpoint_last.pt'} --save-dir {tmp_path}").ok()
    found = run(
        "fairseq-train", f"{again} --max-update 2 --save-dir {tmp_path / 'run'} --restore-file "
        f"{moe / 'checkpoint_last.pt'} --criterion "
        "moe_label_smoothed_cross_entropy --moe-gate-loss-wt 0 --user-dir moe_plugin --moe-freq 1 "
        "--moe-expert-count 4 --moe-dispatch ragged --moe-capacity-factor none "
        "--moe-second-expert-policy all --moe-router-normalize before_drop").ok()
    assert len(found.losses) == 2
    assert found.losses[0] == pytest.approx(dense.losses[0], abs=1.1e-3)  # the log's last digit


def test_translation_models_that_cannot_be_upcycled_are_named(
        translates: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, more, error in (
            (translates, ["--every", "3"], "no layer of the encoder would become an MoE layer"),
            (translates, ["--encoder-every", "0", "--decoder-every", "0"], "use a smaller --every"),
            (translates, ["--encoder-every", "-1"], "encoder_every=-1: must be at least 0"),
            (translates, ["--to", "hf"], "cannot be converted to 'hf'"),
            (dense, ["--encoder-every", "1"], "the model has no encoder")):
        assert main(["upcycle", str(source), str(tmp_path / "moe"), *OPTIONS["copy"], *more]) != 0
        assert error in capsys.readouterr().err


@pytest.mark.fast
@pytest.mark.parametrize(("name", "message"), [
    ("decoder.project_in_dim.weight", "--decoder-input-dim equal to --decoder-embed-dim"),
    ("decoder.project_out_dim.weight", "--decoder-output-dim equal to --decoder-embed-dim"),
    ("decoder.adaptive_softmax.head.weight", "cannot be upcycled: only decoder language models")])
def test_parts_of_fairseq_alone_are_named(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}' .*{message}"):
        list(neutral_tensors(InMemory(**{name: torch.zeros(2, 3)}), tied=True))


@pytest.mark.fast
def test_rows_of_padding_are_cut_from_positions_alone() -> None:
    words, positions = torch.arange(12.0).view(6, 2), torch.arange(10.0).view(5, 2)
    found = {one.key[1]: one for one in neutral_tensors(InMemory(**{
        "decoder.embed_tokens.weight": words, POSITIONS: positions}), tied=True)}
    for name, want in (("embed.weight", words), ("position.weight", positions[PADDING_ROWS:])):
        assert found[name].entry.shape == want.shape
        assert torch.equal(found[name].read(tuple(slice(0, n) for n in want.shape)), want)
