"""A rank dies or stalls in a layer: fairseq's other rank ends in time, by a named error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_other_rank_says_what_it_waited_for(corpus: Corpus, tmp_path: Path, how: str) -> None:
    tool = str(Path(__file__).with_name("lost_train.py"))
    run(tool, f"{how} send_receive 9 {corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} --max-update 12 "
        f"--moe-timeout 2 --save-dir {tmp_path}", ranks=2).failed_with(
        "CommError: rank 0 of 2 in group 'ranks [0, 1]': ", "from rank 1 failed",
        "send_receive of torch.")
