"""fairseq-train on two ranks as a user starts it: no screen of warnings before the first step."""

from __future__ import annotations

import re

import pytest

from moe_plugin.planner.units import parse_time
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run_alone

ARGUMENTS = (f"{{}} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 3 --no-save "
             "--disable-validation --num-workers 1")
FIRST = r"first step: ([\d.]+ m?s), ([\d,]+) tokens/s; 2 steps left, .* if all take as long"


@pytest.mark.distributed
def test_known_warnings_are_hidden_on_all_ranks(corpus: Corpus,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    result = run_alone("fairseq-train", ARGUMENTS.format(corpus.lm), ranks=2).ok()
    assert "Warning" not in result.log and "already been imported" not in result.log
    assert len(result.steps) == 3  # of rank 0 alone
    (first,) = re.findall(FIRST, result.log)
    tokens = float(first[1].replace(",", "")) * parse_time(first[0])
    assert tokens == pytest.approx(result.steps[0]["wpb"], rel=0.02)
    before, _, after = result.log.partition("first step: ")
    assert "train_inner |" not in before and after.count("train_inner |") == 3


@pytest.mark.slow
def test_known_warnings_are_shown_where_they_are_asked_for(corpus: Corpus,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    shown = run_alone("fairseq-train", ARGUMENTS.format(corpus.lm)).ok()
    assert "Hydra14MigrationWarning" in shown.log and len(shown.steps) == 3
    assert len(shown.log.splitlines()) > 40
