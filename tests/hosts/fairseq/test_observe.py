"""Statistics files: each training pass counts once, evaluation not at all, ranks are summed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_plugin.hosts.fairseq.observe import observer
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run
from tests.hosts.fairseq.small import language_model, tokens


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_training_pass_counts_once(tmp_path: Path, recomputed: bool) -> None:
    path = tmp_path / "stats.jsonl"
    model = language_model(checkpoint_activations=recomputed, moe_stats_jsonl=str(path),
                           moe_stats_interval="2")
    watcher = observer(model, None)
    for update in (1, 2):
        model.train()(tokens())[0].sum().backward()
        with torch.no_grad():
            model.eval()(tokens())
        watcher.after_step(update)
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (record["step"], record["layer"], record["calls"],
            record["tokens"]) == (2, "decoder.layers.1", 2, 2 * tokens().numel())


def test_without_a_file_nothing_is_collected() -> None:
    assert observer(language_model(), None) is None
    assert observer(language_model(moe_freq=0), None) is None


@pytest.mark.distributed
def test_training_on_two_ranks_writes_the_sum_over_ranks(corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    flags = (f"--moe-stats-jsonl {path} --moe-stats-interval 2 --moe-stats-timeline 3 --max-update "
             "4 --no-save --disable-validation")
    result = run("fairseq-train", f"{corpus.lm} {LANGUAGE_MODEL} {MOE} {DROPLESS} {flags}",
                 ranks=2).ok()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    records, (timeline,) = [r for r in rows if "layer" in r], [r for r in rows if "timeline" in r]
    assert timeline["step"] == 3 and {"layers", "exchange"
                                      } <= {track for track, *_ in timeline["timeline"]}
    assert [r["step"] for r in records] == [2, 4] and all(r["calls"] == 4 for r in records)
    assert sum(r["tokens"] for r in records) == sum(step["wpb"] for step in result.steps)
    assert all(
        sum(r["load"]) == 2 * r["tokens"] and r["dropped"] == 0 and r["bytes_sent"] > 0
        for r in records)
