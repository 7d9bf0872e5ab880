"""`moe-plugin plan --pipeline`: what it shows and writes, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from moe_plugin.planner.pipeline.choice import StageProfile, choose, predict

pytestmark = pytest.mark.fast

EXAMPLE = Path(__file__).resolve().parents[2] / "configs" / "pipelines" / "four_stages.yaml"


def plan(*words: str) -> int:
    return main(["plan", "--pipeline", *words])


def test_it_compares_schedules_and_draws_the_best(tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert plan(str(EXAMPLE), "--trace", str(trace)) == 0
    text = capsys.readouterr().out
    assert "best: eager-1f1b" in text and "7 5 3 1" in text and "4 3 2 1" in text
    lanes = [line for line in text.splitlines() if line.startswith("stage ")]
    assert len(lanes) == 4 and all("p" in lane for lane in lanes)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"forward 0 0", "send backward 3 15", "thread_name"} <= names


def test_less_memory_takes_less_eager_schedules(tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLE.read_text().replace("memory_bytes: 4000000000", "memory_bytes: 2000000000")
    (tmp_path / "less.yaml").write_text(text)
    assert plan(str(tmp_path / "less.yaml"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == "1f1b"
    assert [one["fits"] for one in found["schedules"]] == [False, True]


LONG = """micro_batches: 2
forward_s: [1.0, 1.0, 1.0, 1.0]
backward_s: [2.0, 2.0, 2.0, 2.0]
transfer_s: 0.01
activation_bytes: [1000, 1000, 1000, 1000]
memory_bytes: 4000
sequence: 64
slice_samples: [[8, 0, 0.1], [16, 0, 0.19], [32, 0, 0.4], [64, 0, 1.0], [8, 56, 0.15],
                [16, 48, 0.29], [32, 32, 0.6]]
"""


def test_long_sequences_and_few_micro_batches_are_cut(tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.yaml").write_text(LONG)
    assert plan(str(tmp_path / "long.yaml"), "--trace", str(tmp_path / "trace.json")) == 0
    assert "best: terapipe, slices " in capsys.readouterr().out
    assert plan(str(tmp_path / "long.yaml"), "--json") == 0
    best, *others = json.loads(capsys.readouterr().out)["schedules"]
    assert best["schedule"] == "terapipe" and sum(best["slices"]) == 64
    assert sorted(best["slices"], reverse=True) == best["slices"]
    assert best["seconds"] < 0.75 * others[0]["seconds"]
    assert max(best["micro_batches_kept"]) <= 2


def test_batch_and_slices_are_cut_together(tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """As the best of plans for each size of a micro-batch."""
    sizes = [(8, 0), (16, 0), (32, 0), (64, 0), (8, 56), (16, 48), (32, 32)]
    samples = {b: [[n, c, 0.2 + 0.01 * max(b * n, 256) + 1e-4 * b * n * c] for n, c in sizes]
               for b in (1, 2, 4, 8)}
    common = {"activation_bytes": [1000] * 4, "sequence": 64}
    together = StageProfile(
        **common, micro_batches=4, batch=8, forward_s=[2.8] * 4, backward_s=[5.6] * 4,
        transfer_s=0.01, memory_bytes=8000,
        slice_samples=[[b, *one] for b, rows in samples.items() for one in rows])
    (tmp_path / "batch.json").write_text(json.dumps(asdict(together)))
    assert plan(str(tmp_path / "batch.json"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    apart = {b: next(one for one in predict(StageProfile(
        **common, micro_batches=8 // b, forward_s=[b * 1.4] * 4, backward_s=[b * 2.8] * 4,
        transfer_s=0.005 * b, slice_samples=rows)) if one.slices) for b, rows in samples.items()}
    size = min(apart, key=lambda b: apart[b].seconds)
    best = found["schedules"][0]
    assert best["sequences"] == size > 1 and best["slices"] == list(apart[size].slices)
    assert best["seconds"] == pytest.approx(apart[size].seconds)
    assert best["micro_batches_kept"] == pytest.approx([n * size / 2 for n in apart[size].alive])
    assert sum(count for count, _ in found["groups"]) == 8
    assert all(sum(slices) == 64 for _, slices in found["groups"])
    assert plan(str(tmp_path / "batch.json")) == 0
    text = capsys.readouterr().out
    assert f"best: terapipe, micro-batches of {size} sequences, slices " in text
    assert "TeraPipe's own cut): " in text
    # where activations of so many do not fit, smaller ones are taken
    less = replace(together, memory_bytes=3000)
    assert choose(less).fits and choose(less).sequences < size


def test_equal_schedules_are_megatrons() -> None:
    profile = StageProfile(micro_batches=4, forward_s=[1.0, 1.0], backward_s=[2.0, 2.0])
    assert [one.seconds for one in predict(profile)] == [15, 15]
    assert choose(profile).schedule == "1f1b"


@pytest.mark.parametrize("text, words", [
    ("forward_s: [1.0]\nbackward_s: []", "Set one number per stage"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nmemory_bytes: 5", "activation_bytes"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nmemory_bytes: 5\nactivation_bytes: [9]",
     "memory_bytes=5 is too small"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\ntransport: pigeon", "Choose from nccl, gloo"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nsequence: 64", "Each sample needs three numbers"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nsequence: 9\nslice_samples: [[1, 0, 1.0]]",
     "granularity=8 must be"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nbatch: 2", "batch=2 must be a multiple of"),
    ("forward_s: [1.0]\nbackward_s: [1.0]\nbatch: 2\nsequence: 8\nslice_samples: [[8, 0, 1.0]]",
     "Each sample needs four numbers"),
    ("forward_s: [-1.0]\nbackward_s: [1.0]", "must be seconds"), ("slow: 1", "unknown key 'slow'"),
])
def test_bad_files_are_named(text: str, words: str, tmp_path: Path,
                             capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    assert plan(str(tmp_path / "bad.yaml")) == 2
    assert words in capsys.readouterr().err
