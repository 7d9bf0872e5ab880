"""What does not fit on a command line of fairseq, or of its hydra, is named in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.hosts.fairseq.conftest import (
    DROPLESS,
    LANGUAGE_MODEL,
    MOE,
    Corpus,
    Result,
    run,
    run_alone,
    run_stock,
    train,
)

_WITHOUT = MOE.replace("--user-dir moe_plugin ", "")


def _said(corpus: Corpus, arguments: str, tool: str = "fairseq-train") -> str:
    result = run(tool, f"{corpus.lm} {arguments}")
    said = result.log.strip()
    assert result.code == 2 and "\n" not in said, result.log[-3000:]
    return said


@pytest.mark.parametrize(("flags", "parts"), [
    (f"{MOE} --moe-fref 2", ("unrecognized arguments: --moe-fref; did you mean --moe-freq?",)),
    (f"{MOE} --no-progress-br", ("did you mean --no-progress-bar?",)),
    (f"{MOE} --criterion moe_cross_entrpy", ("did you mean moe_cross_entropy",)),
    (MOE.replace("moe_plugin", "moe_plugn"), ("--user-dir 'moe_plugn' does not exist. Use",)),
    (f"{MOE} --moe-top-k 5", ("router.top_k=5 is out of bounds", "router.top_k: --moe-top-k '5'")),
    (f"{MOE} --moe-capacity-factor none --moe-dispatch padded",
     ("dispatch.capacity_factor: --moe-capacity-factor 'none'",)),
    (f"{MOE} {DROPLESS} --moe-expert-count 0", ("--moe-expert-count is 0",))])
def test_one_line_says_what_to_write_instead(corpus: Corpus, flags: str,
                                             parts: tuple[str, ...]) -> None:
    said = _said(corpus, f"{LANGUAGE_MODEL} {flags}")
    assert all(part in said for part in parts), said


@pytest.mark.parametrize(("flags", "parts", "missing"), [
    (_WITHOUT, ("invalid choice: 'moe_cross_entropy'",), True),
    ("--moe-freq 2 --moe-expert-coutn 4", ("did you mean --moe-expert-count",), True),
    ("--save-dri x", ("did you mean --save-dir?",), False)])
def test_without_the_user_dir_it_is_named(corpus: Corpus, flags: str, parts: tuple[str, ...],
                                          missing: bool) -> None:
    result = run_stock(f"{corpus.lm} {LANGUAGE_MODEL} {flags}")
    assert result.code == 2 and result.log.count("\n") == 1, result.log[-3000:]
    assert all(part in result.log for part in parts), result.log
    assert ("--user-dir moe_plugin is missing" in result.log) is missing, result.log


@pytest.mark.distributed
@pytest.mark.parametrize("tool", ["fairseq-interactive", "fairseq-generate --gen-subset test",
                                  "fairseq-validate", "fairseq-eval-lm"])
def test_a_checkpoint_of_ours_without_the_user_dir(corpus: Corpus, ep2: tuple[Path, Result],
                                                   tool: str) -> None:
    tool, *flags = tool.split()
    task = "" if tool == "fairseq-eval-lm" else "--task language_modeling"
    result = run_stock(f"{corpus.lm} {task} --cpu --batch-size 1 --path "
                       f"{ep2[0] / 'checkpoint_last.pt'} {' '.join(flags)}", tool)
    assert result.code == 2 and "Traceback" not in result.log, result.log[-3000:]
    assert re.search(rf"{tool}: error: model '\w+' has experts", result.log)
    assert "Add --user-dir moe_plugin" in result.log


def test_keys_of_the_file_are_named_with_the_file(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text("dispatch: {name: padded, eval_capacity_factor: 2.0}\n")
    said = _said(corpus, f"{LANGUAGE_MODEL} {MOE} --moe-config {path}")
    assert f"use dispatch.name='ragged' (dispatch.name: in '{path}')" in said
    path.write_text("dispatch: {nme: padded}\n")
    said = _said(corpus, f"{LANGUAGE_MODEL} {MOE} --moe-config {path}")
    assert f"config file '{path}': unknown key 'dispatch.nme'; did you mean" in said


def test_evaluation_says_it_as_shortly(corpus: Corpus) -> None:
    assert "did you mean --path?" in _said(corpus, "--pth x", "fairseq-eval-lm")


@pytest.mark.distributed
def test_several_ranks_say_it_once(corpus: Corpus) -> None:
    result = run("fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} --moe-fref 2", ranks=2)
    assert result.log.count("error: unrecognized arguments: --moe-fref; did you mean") == 1


def test_no_capacity_as_a_flag_is_enough(corpus: Corpus, tmp_path: Path) -> None:
    """In training and evaluation the numbers of a run whose file has no capacity."""
    shared = ("num_experts: 4\nrouter: {top_k: 1, normalize: none}\n")
    (tmp_path / "few.yaml").write_text(shared + "dispatch: {name: padded, capacity_factor: 0.3, "
                                       "eval_capacity_factor: 0.3}\n")
    (tmp_path / "all.yaml").write_text(shared)
    model = MOE.replace("--moe-expert-count 4 ", "")
    logs = [train(corpus, tmp_path, f"--moe-config {tmp_path / file} {flags} --max-update 1 "
                  "--valid-subset test", model=model).ok().log
            for file, flags in (("few.yaml", ""), ("few.yaml", "--moe-capacity-factor none"),
                                ("all.yaml", ""))]
    few, none, all_ = (_numbers(log) for log in logs)
    assert none == all_ != few and none["overflow_expert1"] == none["test_overflow_expert1"] == "0"
    assert float(few["test_overflow_expert1"]) > 50  # 0.3 of an even load is kept at most
    assert "because the flags make it ineffective: " in logs[1]


def _numbers(log: str) -> dict[str, str]:
    """Losses and dropped choices of the step, and of the evaluation after it."""
    names = ("loss", "test_loss", "overflow_expert1", "test_overflow_expert1")
    found = [json.loads(m) for m in re.findall(r"(?:train_inner|test) \| (\{.*\})", log)]
    return {name: entry[name] for entry in found for name in names if name in entry}


@pytest.mark.distributed
def test_settings_that_fail_in_a_step_leave_no_dump(corpus: Corpus, tmp_path: Path) -> None:
    """A promise of the settings that the data breaks: sentences have other lengths."""
    result = train(corpus, tmp_path, "--moe-dispatch padded --moe-equal-tokens --batch-size 1 "
                   "--moe-capacity-factor 1.0 --sample-break-mode eos --max-update 2", 2, model=MOE,
                   save=True)
    assert result.code == 2 and not list(tmp_path.iterdir()), result.log[-3000:]
    assert "begin training epoch" in result.log or "Start iterating" in result.log
    assert "dispatch.equal_tokens=True requires the same number of tokens" in result.log
    assert "Traceback" not in result.log, result.log[-3000:]


ROOT = Path(__file__).parents[3]
_TINY = "--config-dir configs/fairseq --config-name moe_lm_tiny common.cpu=true"


def _run(words: str, folder: Path, ranks: int = 1) -> Result:
    flags = [word for word in words.split() if "=" not in word]  # argparse takes them first
    values = [word for word in words.split() if "=" in word]
    return run("fairseq-hydra-train",
               " ".join([*flags, *values, f"hydra.run.dir={folder / 'hydra'}"]), ranks, cwd=folder)


def test_example_settings_are_found_from_any_folder(corpus: Corpus, tmp_path: Path) -> None:
    settings = f"task.data={corpus.lm} optimization.max_update=1 common.log_interval=1"
    done = _run(f"{_TINY} {settings} checkpoint.no_save=true task.tokens_per_sample=32", tmp_path)
    assert len(done.ok().steps) == 1
    own = tmp_path / "configs" / "fairseq"  # a folder of that name that is here is meant
    own.mkdir(parents=True)
    (own / "moe_lm_mine.yaml").write_text("# @package _global_\ndefaults: []\n")
    said = _run(f"{_TINY} {settings}", tmp_path).log
    assert "--config-name 'moe_lm_tiny' is not in configs/fairseq, " in said


@pytest.mark.parametrize(("words", "parts"), [
    ("moe.router.top_k=99", ("router.top_k=99 is out of bounds", "num_experts=8")),
    ("moe.num_experts=x", ("num_experts='x' is a str; must be int",)),
    ("moe.router.topk=1", ("Could not override 'moe.router.topk'",
                           "unknown key 'router.topk'; did you mean router.top_k?")),
    ("+moe.router.topk=1", ("unknown key 'router.topk'; did you mean router.top_k?",)),
    ("optimization.max_updat=3", ("'max_updat' not in 'OptimizationConfig'",)),
    ("task.data=???", ("task.data is missing. Add task.data=FOLDER",)),
    ("--config-name moe_lm_tinny", ("is not in", "did you mean moe_lm_tiny?"))])
def test_one_line_says_what_does_not_fit(corpus: Corpus, tmp_path: Path, words: str,
                                         parts: tuple[str, ...]) -> None:
    done = _run(f"{_TINY} task.data={corpus.lm} {words}", tmp_path)
    said = [line for line in done.log.splitlines() if line.startswith("fairseq-hydra-train: error")]
    assert done.code == 2 and len(said) == 1 and done.log.endswith(f"{said[0]}\n"), done.log[-3000:]
    assert all(part in said[0] for part in parts) and "Traceback" not in done.log
    assert "Error executing job" not in done.log and "HYDRA_FULL_ERROR" not in done.log


def test_what_a_file_says_does_not_steer_the_terminal(corpus: Corpus, tmp_path: Path) -> None:
    shipped = (ROOT / "configs/fairseq/moe_lm_tiny.yaml").read_text()
    text = shipped.replace("  - /moe: dropless\n", "")
    for value in (r'num_experts: "a\x1b[2J\nb"', r'"num_expertz\x1b[2J\n": 8'):
        (tmp_path / "evil.yaml").write_text(f"{text}moe: {{{value}}}\n")
        done = _run(f"--config-dir {tmp_path} --config-name evil common.cpu=true task.data=x",
                    tmp_path)
        assert done.code and "\x1b" not in done.log, done.log[-2000:]
        assert r"\x1b[2J" in done.log.splitlines()[-1], done.log[-2000:]


def test_nothing_else_is_written(corpus: Corpus, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own, which imports all; Hydra's traces change no status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    words = f"{_TINY} task.data={corpus.lm} moe.router.top_k=99"
    done = run_alone("fairseq-hydra-train", words)
    assert done.code == 2 and done.log.count("\n") == 1, done.log
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert _run(words, tmp_path).code == 2


def test_other_errors_are_hydras(tmp_path: Path) -> None:
    done = _run(f"{_TINY} task.data=/no/such/data", tmp_path)
    assert done.code == 1 and "FileNotFoundError" in done.log and "HYDRA_FULL_ERROR" in done.log
