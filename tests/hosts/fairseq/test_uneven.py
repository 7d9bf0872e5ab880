"""A rank without a last batch computes another one in its place, of which nothing may count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, Corpus, run

UNEVEN_TRAIN = str(Path(__file__).with_name("uneven_train.py"))
RATE = 0.1


@pytest.mark.distributed
@pytest.mark.parametrize("router,more", [("sigmoid_bias", ""),
                                         ("quantile", "--checkpoint-activations")])
def test_a_batch_in_place_of_a_missing_one_counts_for_nothing(corpus: Corpus, tmp_path: Path,
                                                              router: str, more: str) -> None:
    """20 sentences in batches of 8: the second rank has none in the second step of an epoch."""
    settings = {"router": {"name": router, "top_k": 2}, "losses": {"global_batch": 0.01}}
    if router == "sigmoid_bias":
        settings["router"]["bias_rate"] = RATE
    (tmp_path / "moe.yaml").write_text(yaml.safe_dump(settings))
    log = run(
        UNEVEN_TRAIN,
        f"{corpus.lm} {LANGUAGE_MODEL} {DROPLESS} --train-subset test --batch-size 8 "
        "--sample-break-mode eos --criterion moe_cross_entropy --moe-expert-count 4 --moe-freq 1 "
        f"--moe-gate-loss-wt 0.01 --use-moe-pad-mask --moe-config {tmp_path / 'moe.yaml'} {more} "
        f"--max-update 4 --no-save --disable-validation --save-dir {tmp_path}", ranks=2).ok().log
    told = [json.loads(found) for found in re.findall(r"ROUTER (\{.*?\})\n", log)]
    steps = {n: [each for each in told if each["step"] == n] for n in (1, 2, 3, 4)}
    assert [len(ranks) for ranks in steps.values()] == [2] * 4, log[-3000:]
    for number, ranks in steps.items():
        assert (min(each["tokens"] for each in ranks) == 0) == (number in (2, 4))
        tokens = sum(each["tokens"] for each in ranks)
        sums = [np.array(each["sums"][0]) for each in ranks]
        for each, own in zip(ranks, sums, strict=True):
            assert each["step_load"][-1] == tokens and sum(each["step_load"]) == 3 * tokens
            if router == "sigmoid_bias":
                assert own.sum() == 2 * each["tokens"]
                load = np.array(each["step_load"][:-1])
                assert np.array_equal(load, sum(sums))
                np.testing.assert_allclose(each["moved"], RATE * np.sign(load.mean() - load),
                                           atol=1e-6)
            else:
                assert own[-1] == (each["tokens"] > 0)
