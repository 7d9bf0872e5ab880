"""Command lines that do not fit end in one line, before anything is built."""

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
    run_stock,
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
    assert f"use dispatch.name='ragged' (dispatch.name: in {path})" in said
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
    logs = [run("fairseq-train",
                f"{corpus.lm} {LANGUAGE_MODEL} {model} --moe-config {tmp_path / file} {flags} "
                f"--max-update 1 --no-save --valid-subset test").ok().log
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
    result = run("fairseq-train",
                 f"{corpus.lm} {LANGUAGE_MODEL} {MOE} --moe-dispatch padded --moe-equal-tokens "
                 "--moe-capacity-factor 1.0 "
                 f"--sample-break-mode eos --batch-size 1 --max-update 2 --save-dir {tmp_path}",
                 ranks=2)
    assert result.code == 2 and not list(tmp_path.iterdir()), result.log[-3000:]
    assert "begin training epoch" in result.log or "Start iterating" in result.log
    assert "dispatch.equal_tokens=True requires the same number of tokens" in result.log
    assert "Traceback" not in result.log, result.log[-3000:]
