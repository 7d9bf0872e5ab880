"""`fairseq-hydra-train`: example settings from any folder; settings that do not fit end with status
2 and the message alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.fairseq.conftest import Corpus, Result, run, run_alone

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
    ("+moe.router.top_k=99", ("router.top_k=99 is out of bounds", "num_experts=8")),
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
    text = (ROOT / "configs/fairseq/moe_lm_tiny.yaml").read_text()
    for value in (r'num_experts: "a\x1b[2J\nb"', r'"num_expertz\x1b[2J\n": 8'):
        (tmp_path / "evil.yaml").write_text(text.replace("num_experts: 8", value))
        done = _run(f"--config-dir {tmp_path} --config-name evil common.cpu=true task.data=x",
                    tmp_path)
        assert done.code and "\x1b" not in done.log, done.log[-2000:]
        assert r"\x1b[2J" in done.log.splitlines()[-1], done.log[-2000:]


def test_nothing_else_is_written(corpus: Corpus, tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process of its own, which imports all; Hydra's traces change no status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    words = f"{_TINY} task.data={corpus.lm} +moe.router.top_k=99"
    done = run_alone("fairseq-hydra-train", words)
    assert done.code == 2 and done.log.count("\n") == 1, done.log
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert _run(words, tmp_path).code == 2


def test_other_errors_are_hydras(tmp_path: Path) -> None:
    done = _run(f"{_TINY} task.data=/no/such/data", tmp_path)
    assert done.code == 1 and "FileNotFoundError" in done.log and "HYDRA_FULL_ERROR" in done.log
