"""fairseq's layers that keep, recompute or swap their activations: the same log."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_plugin.observe.history import read_run
from moe_plugin.planner.offload.schedule import load_profile
from tests.hosts.fairseq.conftest import DROPLESS, LANGUAGE_MODEL, MOE, Corpus, run

# a second expert is drawn, as by default
KEEP = (f"{LANGUAGE_MODEL} {MOE} {DROPLESS} --moe-second-expert-policy sampling --dropout 0.1 "
        "--max-update 5 --no-save")


@pytest.mark.distributed
def test_the_log_is_that_of_keeping(corpus: Corpus, tmp_path: Path) -> None:
    def train(flags: str) -> list[dict]:
        done = run("fairseq-train", f"{corpus.lm} {KEEP} {flags} --save-dir {tmp_path}",
                   ranks=2).ok()
        assert ("Pre-gates choose the experts" in done.log) == ("--moe-pre-gate" in flags)
        return [{name: step[name] for name in ("loss", "inner_loss", "moe_gate_loss", "gnorm")}
                for step in done.steps]

    kept, profile = train(""), tmp_path / "profile.json"
    assert len(kept) == 5
    swap = f"--moe-activation-path {tmp_path} --moe-activation-smallest 0"
    stats = f"--moe-stats-jsonl {tmp_path}/stats/stats.jsonl --moe-stats-interval 1"
    assert train(f"--moe-activations recompute,swap {swap} --ddp-backend legacy_ddp {stats}"
                 ) == kept
    copied = read_run(tmp_path / "stats").copies["activations"]
    assert copied and all(record.bytes > 0 for record in copied)
    # its first step swaps, up to five recompute until times agree, the others do as planned
    pre_gates = "--moe-freq 1 --moe-pre-gate 1 --max-update 9"
    assert train(f"{pre_gates} --moe-activations auto --moe-activation-memory 1MiB {swap} "
                 f"--moe-activation-profile {profile}") == train(pre_gates)
    assert [block.name for block in load_profile(profile).blocks] == [
        "decoder.layers.0", "decoder.layers.1"]


def test_what_does_not_fit_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    done = run("fairseq-train", f"{corpus.lm} {KEEP} --moe-activations swap "
               f"--checkpoint-activations --save-dir {tmp_path}")
    assert "offload.activations='swap' does not fit --checkpoint-activations" in done.log
    done = run("fairseq-train", f"{corpus.lm} {KEEP} --moe-activations keep,keep,swap "
               f"--save-dir {tmp_path}")
    assert "has 3 policies, but the model has 2 layers: use one policy for all" in done.log
