"""What routers count: neither validation between the steps, nor updates that the loss scaler skips,
nor what a rank without a last batch computes in its place.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.hosts.fairseq.attacks import tell_counts
from tests.hosts.fairseq.conftest import DROPLESS, MOE, Corpus, Result, train

RATE, DROPOUT = 0.1, "--dropout 0.2 --update-freq 4"


def trained(corpus: Corpus, folder: Path, router: str, flags: str,
            ranks: int = 1) -> tuple[Result, list[Any]]:
    """A run, and what its router counted in each step, on each rank."""
    folder.mkdir(exist_ok=True)
    settings = {"router": {"name": router, "top_k": 2}, "losses": {"global_batch": 0.01}}
    if router == "sigmoid_bias":
        settings["router"]["bias_rate"] = RATE
    (folder / "moe.yaml").write_text(yaml.safe_dump(settings))
    model = MOE.replace("--moe-freq 2", f"--moe-freq 1 --moe-config {folder / 'moe.yaml'}")
    result = train(corpus, folder, flags, ranks, model=f"{model} {DROPLESS}",
                   attack=tell_counts).ok()
    return result, [json.loads(found) for found in re.findall(r"ROUTER (\{.*?\})\n", result.log)]


@pytest.mark.parametrize("router", ["sigmoid_bias", "quantile"])
def test_validation_between_steps_changes_nothing(corpus: Corpus, tmp_path: Path,
                                                  router: str) -> None:
    plain, counted = trained(corpus, tmp_path / "plain", router,
                             f"{DROPOUT} --max-update 4 --disable-validation")
    validated, counted_too = trained(corpus, tmp_path / "validated", router,
                                     f"{DROPOUT} --max-update 4 --validate-interval-updates 1")
    assert "valid_loss" in validated.log and "valid_loss" not in plain.log
    assert plain.losses == validated.losses and len(plain.losses) == 4
    assert counted == counted_too and len(counted) == 4
    assert any(np.any(each["moved"]) for each in counted)


def test_skipped_updates_move_no_bias(corpus: Corpus, tmp_path: Path) -> None:
    result, counted = trained(
        corpus, tmp_path / "run", "sigmoid_bias",
        f"{DROPOUT} --fp16 --fp16-init-scale 67108864 --max-update 3 --disable-validation")
    skipped = result.log.count("gradient overflow detected, ignoring gradient")
    assert skipped and len(counted) == 3 + skipped, result.log[-3000:]
    assert [np.any(each["moved"]) for each in counted] == [False] * skipped + [True] * 3
    for each in counted:  # of this step alone
        load = np.array(each["sums"][0])
        assert load.sum() == 2 * each["tokens"] and each["step_load"][-1] == each["tokens"]
        if np.any(each["moved"]):
            np.testing.assert_allclose(each["moved"], RATE * np.sign(load.mean() - load), atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("router,more", [("sigmoid_bias", ""),
                                         ("quantile", "--checkpoint-activations")])
def test_a_batch_in_place_of_a_missing_one_counts_for_nothing(corpus: Corpus, tmp_path: Path,
                                                              router: str, more: str) -> None:
    """20 sentences in batches of 8: the second rank has none in the second step of an epoch."""
    result, told = trained(
        corpus, tmp_path, router, "--train-subset test --batch-size 8 --sample-break-mode eos "
        f"--use-moe-pad-mask {more} --max-update 4 --disable-validation", 2)
    steps = {n: [each for each in told if each["step"] == n] for n in (1, 2, 3, 4)}
    assert [len(ranks) for ranks in steps.values()] == [2] * 4, result.log[-3000:]
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
