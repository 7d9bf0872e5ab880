"""`--moe-expert-parallel-at` on Megatron's own loop: a run whose expert-parallel size changes makes
the losses of one that keeps its size.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from moe_plugin.config import run_from_dict
from moe_plugin.hosts.megatron import resizing
from tests.hosts.megatron.training import launched, own_loop

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
EP2 = ["--expert-model-parallel-size", "2", "--clip-grad", "0.1"]
CHANGES = ["--moe-expert-parallel-at", "3=1,5=4,6=2"]  # from 2 of 4 ranks
KINDS = {
    "adam": ["--optimizer", "adam", "--overlap-grad-reduce"],
    "sgd": ["--optimizer", "sgd", "--lr", "0.3", "--moe-router-load-balancing-type",
            "seq_aux_loss"],
    "bf16": ["--optimizer", "adam", "--bf16"],
}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def curve(path: Path) -> dict[int, tuple[float, float]]:
    """(loss, gradient norm) by step."""
    return {row["iteration"]: (row["lm_loss"], row["grad_norm"])
            for row in records(path) if "lm_loss" in row}


def same(found: dict[int, tuple[float, float]], wanted: dict[int, tuple[float, float]],
         rel: float) -> None:
    assert list(found) == list(wanted)
    for step, pair in wanted.items():
        assert found[step] == pytest.approx(pair, rel=rel), step


@own_loop
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_do_not_notice(data: str, tmp_path: Path, kind: str) -> None:
    words = ["--data-path", data, *EP2, *KINDS[kind], "--train-iters", "7"]
    launched([*words, "--log-file", "wanted"], 4, tmp_path)
    log = launched([*words, *CHANGES, "--log-file", "found"], 4, tmp_path)
    for said in ("2 -> 1 before step 3", "1 -> 4 before step 5", "4 -> 2 before step 6"):
        assert f"expert-parallel ranks {said}: " in log
    same(curve(tmp_path / "found"), curve(tmp_path / "wanted"), 5e-4 if kind == "bf16" else 2e-5)


@own_loop
def test_checkpoints_of_any_size_resume_at_the_size_of_their_step(data: str,
                                                                  tmp_path: Path) -> None:
    words = ["--data-path", data, *EP2, *KINDS["adam"]]
    launched([*words, "--train-iters", "7", "--log-file", "wanted"], 4, tmp_path)
    changing = [*words, "--moe-expert-parallel-at", "3=1,6=4", "--save", "run", "--load", "run",
                "--log-file", "found", "--moe-stats-jsonl", "stats.jsonl"]
    # after steps of one rank with all experts, and of four; each begins with two that share them
    logs = [launched([*changing, "--train-iters", str(last)], 4, tmp_path) for last in (4, 6, 7)]
    assert "expert-parallel ranks 2 -> 1 before step 5: " in logs[1]
    assert "expert-parallel ranks 2 -> 4 before step 7: " in logs[2]
    same(curve(tmp_path / "found"), curve(tmp_path / "wanted"), 2e-5)
    changes = [row for row in records(tmp_path / "stats.jsonl") if "expert_parallel" in row]
    assert [row["step"] for row in changes] == [3, 5, 6, 7]
    assert all(row["expert_parallel"]["bytes"] > 0 for row in changes)


def given(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"optimizer": "adam", "num_experts": 4, **changed})


@pytest.mark.parametrize(("changed", "said"), [
    *(({name: 2}, f"does not fit --{name.replace('_', '-')}: use 1, because experts move between "
       "whole data-parallel ranks") for name in resizing.MUST_BE_ONE),
    *(({name: True}, f"does not fit --{name.replace('_', '-')}: leave it out, because {why}")
      for name, why in resizing.MUST_BE_OFF.items()),
    ({"cuda_graph_impl": "local"}, "does not fit --cuda-graph-impl local: leave it out"),
    ({"optimizer": "muon"}, "does not fit --optimizer muon: use adam or sgd"),
    ({"num_experts": 6}, "does not fit --num-experts 6: .* must be divisible by 4")])
def test_what_cannot_follow_is_refused(changed: dict[str, Any], said: str) -> None:
    run = run_from_dict({"resize": {"expert_parallel_at": {3: 4}}})
    resizing.check(given(), run)
    with pytest.raises(ValueError, match="resize.expert_parallel_at={3: 4} " + said):
        resizing.check(given(**changed), run)
