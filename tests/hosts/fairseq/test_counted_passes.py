"""What routers count over `--update-freq`: neither validation between the steps nor updates that
the loss scaler skips.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, Corpus, Result, run

UNEVEN_TRAIN = str(Path(__file__).with_name("uneven_train.py"))


def trained(corpus: Corpus, folder: Path, router: str, more: str) -> tuple[Result, list[Any]]:
    """A run, and what its router counted in each step."""
    folder.mkdir()
    settings = {"router": {"name": router, "top_k": 2}, "losses": {"global_batch": 0.01}}
    if router == "sigmoid_bias":
        settings["router"]["bias_rate"] = 0.1
    (folder / "moe.yaml").write_text(yaml.safe_dump(settings))
    words = LANGUAGE_MODEL.replace("--dropout 0 ", "--dropout 0.2 ")
    result = run(
        UNEVEN_TRAIN,
        f"{corpus.lm} {words} {DROPLESS} --user-dir moe_plugin --criterion moe_cross_entropy "
        f"--moe-expert-count 4 --moe-freq 1 --moe-gate-loss-wt 0.01 --update-freq 4 --no-save "
        f"--moe-config {folder / 'moe.yaml'} --save-dir {folder} {more}").ok()
    return result, [json.loads(found) for found in re.findall(r"ROUTER (\{.*?\})\n", result.log)]


@pytest.mark.parametrize("router", ["sigmoid_bias", "quantile"])
def test_validation_between_steps_changes_nothing(corpus: Corpus, tmp_path: Path,
                                                  router: str) -> None:
    plain, counted = trained(corpus, tmp_path / "plain", router,
                             "--max-update 4 --disable-validation")
    validated, counted_too = trained(corpus, tmp_path / "validated", router,
                                     "--max-update 4 --validate-interval-updates 1")
    assert "valid_loss" in validated.log and "valid_loss" not in plain.log
    assert plain.losses == validated.losses and len(plain.losses) == 4
    assert counted == counted_too and len(counted) == 4
    assert any(np.any(each["moved"]) for each in counted)


def test_skipped_updates_move_no_bias(corpus: Corpus, tmp_path: Path) -> None:
    result, counted = trained(
        corpus, tmp_path / "run", "sigmoid_bias",
        "--fp16 --fp16-init-scale 67108864 --max-update 3 --disable-validation")
    skipped = result.log.count("gradient overflow detected, ignoring gradient")
    assert skipped and len(counted) == 3 + skipped, result.log[-3000:]
    assert [np.any(each["moved"]) for each in counted] == [False] * skipped + [True] * 3
    for each in counted:  # of this step alone
        load = np.array(each["sums"][0])
        assert load.sum() == 2 * each["tokens"] and each["step_load"][-1] == each["tokens"]
        if np.any(each["moved"]):
            np.testing.assert_allclose(each["moved"], 0.1 * np.sign(load.mean() - load), atol=1e-6)
