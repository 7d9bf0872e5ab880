"""fairseq warns if replicas of experts or routers no longer have equal weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run

pytestmark = pytest.mark.distributed
TOOL = str(Path(__file__).with_name("drift_train.py"))


@pytest.mark.parametrize(("part", "words"), [
    ("experts", "ranks 1 and 3 store the same experts, which were equal and have become different"),
    ("router", "were equal on ranks 0 and 3 and have become different"), ("nothing", None)])
def test_replicas_that_drift_apart_are_warned_of(corpus: Corpus, tmp_path: Path, part: str,
                                                 words: str | None) -> None:
    log = run(TOOL, f"{part} {corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 6 "
              f"--moe-expert-parallel-size 2 --no-save --save-dir {tmp_path}", ranks=4).ok().log
    assert ("have become different" in log) == (words is not None)
    assert words is None or log.count(words) == 1
