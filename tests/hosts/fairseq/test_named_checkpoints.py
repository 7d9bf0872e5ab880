"""Every flag that names a checkpoint takes that of several ranks by its name, and by one rank's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from moe_plugin.checkpoint.formats.fairseq import files
from moe_plugin.hosts.fairseq.average import main
from tests.hosts.fairseq.conftest import (
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    Result,
    run,
)

pytestmark = pytest.mark.distributed
_RESETS = "--reset-optimizer --reset-lr-scheduler --reset-meters --reset-dataloader"
NAMES = ("checkpoint_last.pt", "checkpoint_last-rank-0.pt", "checkpoint_last-rank-1.pt")


def _train(corpus: Corpus, flags: str, ranks: int) -> Result:
    return run("fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} "
               f"--disable-validation --no-epoch-checkpoints {flags}", ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_from_any_name(corpus: Corpus, ep2: tuple[Path, Result], tmp_path: Path,
                                ranks: int) -> None:
    """`--finetune-from-model` begins as `--restore-file` with all resets does."""
    home = ep2[0]
    wanted, *others = [_train(corpus, f"--max-update 2 --no-save --save-dir {tmp_path} {flags}",
                              ranks).ok().losses
                       for flags in (f"--restore-file {home / NAMES[0]} {_RESETS}",
                                     *(f"--finetune-from-model {home / name}" for name in NAMES),
                                     f"--restore-file {home / NAMES[2]} {_RESETS}")]
    assert len(wanted) == 2 and others == [wanted] * 4
    steps = _train(corpus, f"--max-update 13 --no-save --save-dir {tmp_path} --restore-file "
                   f"{home / NAMES[ranks]} --load-checkpoint-on-all-dp-ranks", ranks).ok().steps
    assert [step["num_updates"] for step in steps] == [13]


def test_tuning_goes_on_at_another_number_of_ranks(corpus: Corpus, ep2: tuple[Path, Result],
                                                   tmp_path: Path) -> None:
    """Not again from the model that it began from, on none of the ranks."""
    flags = f"--finetune-from-model {ep2[0] / NAMES[0]} --save-dir {tmp_path} --max-update"
    for number, ranks in ((1, 2), (2, 1), (3, 4)):
        steps = _train(corpus, f"{flags} {number}", ranks).ok().steps
        assert [step["num_updates"] for step in steps] == [number], ranks


@pytest.mark.parametrize("flag", ["--finetune-from-model", "--continue-once"])
def test_a_name_that_is_not_there_is_refused(corpus: Corpus, tmp_path: Path, flag: str) -> None:
    result = _train(corpus, f"--no-save {flag} {tmp_path}/x.pt --save-dir {tmp_path}", ranks=2)
    said = f"error: rank 1: {flag} '{tmp_path}/x.pt' does not exist, nor does {tmp_path}/x-rank-0"
    assert result.code != 0 and said in result.log and "Traceback" not in result.log


def test_a_file_to_restore_that_is_not_there_is_warned_of(corpus: Corpus, tmp_path: Path) -> None:
    """fairseq begins at step 0, as launch scripts expect of a first start."""
    flags = f"--no-save --save-dir {tmp_path} --max-update 1"
    log = _train(corpus, f"{flags} --restore-file {tmp_path}/x.pt", ranks=2).ok().log
    assert log.count("x.pt does not exist: training begins at step 0") == 1
    assert "training begins at step 0" not in _train(corpus, flags, ranks=1).ok().log


def _scores(log: str) -> list[str]:
    return sorted(re.findall(r"^H-\d+\t.*$", log, re.M))


def test_generation_from_any_name(corpus: Corpus, mt2: tuple[Path, Result],
                                  tmp_path: Path) -> None:
    home, flags = mt2[0], (f"{corpus.mt} --user-dir moe_plugin --cpu --beam 2 --max-len-b 8 "
                           "--batch-size 1")
    wanted, *others = [_scores(run("fairseq-generate", f"{flags} --path {home / name}", 1).ok().log)
                       for name in NAMES]
    assert len(wanted) == 20 and others == [wanted] * 2
    # an ensemble of a model and itself is that model
    both = f"{home / NAMES[0]}:{home / NAMES[2]}"
    double = _scores(run("fairseq-generate", f"{flags} --path {both}", 1).ok().log)
    assert [line.split("\t")[2] for line in double] == [line.split("\t")[2] for line in wanted]
    (tmp_path / "in").write_text((corpus.mt.parent / "test.src").read_text())
    shown = run("fairseq-interactive",
                f"{flags} --path {both} --input {tmp_path / 'in'}").ok().log
    assert [line.split("\t")[2] for line in _scores(shown)] == [
        line.split("\t")[2] for line in double]


@pytest.mark.parametrize("tool", ["fairseq-validate", "fairseq-eval-lm"])
def test_evaluation_of_a_name_that_is_not_there(corpus: Corpus, tmp_path: Path, tool: str) -> None:
    result = run(tool, f"{corpus.lm} --task language_modeling --path {tmp_path}/x.pt --cpu "
                 "--user-dir moe_plugin --batch-size 4")
    assert result.code == 2 and "Traceback" not in result.log, result.log[-2000:]
    assert f"error: --path '{tmp_path}/x.pt' does not exist, nor does {tmp_path}/x-ra" in result.log


def test_averages_of_several_ranks(corpus: Corpus, ep2: tuple[Path, Result],
                                   tmp_path: Path) -> None:
    """Means in float64; they evaluate and train on as any checkpoint does."""
    home, inputs = ep2[0], ("checkpoint_1_4", "checkpoint_1_8", "checkpoint_last")
    argv = [*(str(home / f"{name}.pt") for name in inputs[:2]),
            str(home / f"{inputs[2]}-rank-1.pt"), "--output", str(tmp_path / "run" / "average.pt")]
    assert main(["--inputs", *argv]) == 0
    for rank in (0, 1):
        found, *given = (files.read(str(path)) for path in (
            tmp_path / "run" / f"average-rank-{rank}.pt",
            *(home / f"{name}-rank-{rank}.pt" for name in inputs)))
        weights = [name for name, value in found["model"].items()
                   if isinstance(value, torch.Tensor)]
        assert any("experts" in name for name in weights) and "last_optimizer_state" not in found
        for name in weights:
            mean = sum(one["model"][name].double() for one in given) / 3
            assert torch.equal(found["model"][name], mean.to(found["model"][name].dtype)), name
    evaluate = f"{corpus.lm} --tokens-per-sample 32 --cpu --user-dir moe_plugin --batch-size 4"
    losses = {re.search(r"Loss \(base 2\): ([\d.]+)", run(
        "fairseq-eval-lm", f"{evaluate} --path {tmp_path}/run/average.pt", ranks).ok().log)[1]
        for ranks in (1, 2)}
    assert len(losses) == 1
    assert len(_train(corpus, f"--finetune-from-model {tmp_path}/run/average.pt --no-save "
                      f"--save-dir {tmp_path} --max-update 1", 2).ok().losses) == 1


def test_counts_of_averaged_checkpoints_are_the_last_ones(tmp_path: Path) -> None:
    for number in (1, 2, 4):
        model = {"w": torch.tensor([float(number)]), "steps": torch.tensor(2**60 + number),
                 "kept": torch.tensor([number > 1]), "_extra_state": {"written": number}}
        files.write({"model": model, "args": None}, str(tmp_path / f"{number}.pt"))
    out = tmp_path / "mean.pt"
    assert main(["--inputs", *(str(tmp_path / f"{number}.pt") for number in (1, 2, 4)), "--output",
                 str(out)]) == 0
    found = files.read(str(out))["model"]
    assert found.pop("_extra_state") == {"written": 1}
    assert {name: (value.dtype, value.tolist()) for name, value in found.items()} == {
        "w": (torch.float32, [torch.tensor(7 / 3).item()]), "steps": (torch.int64, 2**60 + 4),
        "kept": (torch.bool, [True])}


def test_what_cannot_be_averaged_is_refused(ep2: tuple[Path, Result], mt2: tuple[Path, Result],
                                            tmp_path: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    home, out = ep2[0], tmp_path / "average.pt"
    one = tmp_path / "one-rank-0.pt"
    one.write_bytes((home / "checkpoint_last-rank-0.pt").read_bytes())
    for other, said in ((tmp_path / "x.pt", "x.pt' does not exist"),
                        (tmp_path / "one.pt", "1 files"),
                        (mt2[0] / "checkpoint_last.pt", "Use checkpoints of the same run")):
        with pytest.raises(SystemExit) as ended:
            main(["--inputs", str(home / "checkpoint_last.pt"), str(other), "--output", str(out)])
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not list(tmp_path.glob("average*"))
