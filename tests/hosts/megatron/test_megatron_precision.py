"""The training script's fp16, and its overlapped communication of gradients and parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, refusal, trained

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
SHARDED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--ddp-bucket-size", "3000"]
GATHER = [*SHARDED, *OVERLAP, "--overlap-param-gather"]


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _losses(path: Path) -> list[float]:
    return [row["lm_loss"] for row in _rows(path) if "lm_loss" in row]


def _weights(*folders: str) -> list[dict[str, torch.Tensor]]:
    """The model's tensors in each checkpoint, by name."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    parallel_state.initialize_model_parallel()
    return [{name: tensor for name, tensor in load_plain_tensors(folder).items()
             if isinstance(tensor, torch.Tensor) and "optimizer" not in name}
            for folder in folders]


CASES = {
    "EP2": (2, EP2, [], OVERLAP), "two replicas": (2, [], SHARDED, GATHER),
    "EP2, sharded": (2, EP2, SHARDED, GATHER),
    "EP2 in two replicas": (4, EP2, SHARDED, GATHER),
    "gathered experts": (2, [*EP2, "--moe-parallel-r", "0"], SHARDED, GATHER),
}


@pytest.mark.parametrize("name", CASES)
def test_overlapped_communication_changes_no_loss(name: str, data: str, tmp_path: Path) -> None:
    """Also over an evaluation and a checkpoint, which read parameters between two steps."""
    world, sizes, plain, overlapped = CASES[name]
    argv = [*MODEL, "--data-path", data, "--train-iters", "4", "--eval-interval", "2",
            "--eval-iters", "1", "--split", "90,10,0", "--save-interval", "3", *sizes]
    runs = [[*argv, "--save", str(tmp_path / run), *flags]
            for run, flags in (("plain", plain), ("overlapped", overlapped))]
    resumed = [*runs[1], "--load", str(tmp_path / "overlapped"), "--log-file",
               str(tmp_path / "resumed.jsonl")]
    for run in runs:
        on_ranks(world, trained, run)
    want, got = (_rows(tmp_path / run / "log.jsonl") for run in ("plain", "overlapped"))
    keys = ("lm_loss", "valid_loss", "grad_norm")
    assert len(want) == 7
    for one, other in zip(got, want, strict=True):
        assert {key: one[key] for key in keys if key in one} == pytest.approx(
            {key: other[key] for key in keys if key in other}, rel=1e-6)
    [(one, other)] = on_ranks(1, _weights, *(str(tmp_path / run / "iter_0000003")
                                             for run in ("plain", "overlapped")))
    assert any("experts" in weight for weight in one) and one.keys() == other.keys()
    for weight in one:
        torch.testing.assert_close(other[weight], one[weight], rtol=1e-5, atol=1e-6)
    (tmp_path / "overlapped" / "latest_checkpointed_iteration.txt").write_text("3")
    on_ranks(world, trained, resumed)
    assert _losses(tmp_path / "resumed.jsonl") == pytest.approx(
        _losses(tmp_path / "plain" / "log.jsonl")[3:], rel=1e-6)


@pytest.mark.parametrize(("extra", "message"), [
    (["--overlap-param-gather", "--overlap-grad-reduce"], "distributed optimizer"),
    (["--bf16", "--fp16"], "not args.")])
def test_flags_that_do_not_fit_are_named(extra: list[str], message: str, data: str) -> None:
    [found] = on_ranks(1, refusal, [*MODEL, "--data-path", data, "--train-iters", "2", *extra])
    assert message in found


@pytest.mark.parametrize(("world", "sizes"), [(2, EP2), (2, [*EP2, *SHARDED]), (2, PP2)],
                         ids=["EP2", "EP2, sharded", "PP2"])
def test_fp16_trains_as_bf16_and_counts_overflows(world: int, sizes: list[str], data: str,
                                                  tmp_path: Path) -> None:
    argv = [*MODEL, "--data-path", data, "--lr-decay-style", "constant", *sizes]
    fp16 = [*argv, "--fp16", "--initial-loss-scale", str(2**30), "--hysteresis", "1",
            "--train-iters", "24", "--save", str(tmp_path / "fp16"), "--save-interval", "19"]
    short = [[*argv, *precision, "--train-iters", "5", "--log-file", str(tmp_path / name)]
             for name, precision in (("bf16", ["--bf16"]),
                                     ("low", ["--fp16", "--initial-loss-scale", "1024"]))]
    for run in (fp16, *short):
        on_ranks(world, trained, run)
    rows, want = _rows(tmp_path / "fp16" / "log.jsonl"), _losses(tmp_path / "bf16")
    assert _losses(tmp_path / "low") == pytest.approx(want, abs=2e-2)
    skipped = [row["skipped_steps"] for row in rows]
    # more than the ten in a row that stop other runs
    assert skipped[:11] == list(range(1, 12)) and skipped[-1] < 19
    # each of them halves the scale, and none is part of a mean
    assert [row["loss_scale"] for row in rows] == [2.0**30 / 2**count for count in skipped]
    assert [row["lm_loss"] is None for row in rows] == [
        now > before for before, now in zip([0, *skipped], skipped, strict=False)]
    first = next(row["lm_loss"] for row in rows if row["lm_loss"])
    assert first == pytest.approx(want[0], rel=5e-2)  # on later samples
    assert rows[-1]["lm_loss"] < want[0] - 0.1
    (tmp_path / "fp16" / "latest_checkpointed_iteration.txt").write_text("19")
    on_ranks(world, trained, [*fp16, "--load", str(tmp_path / "fp16"), "--log-file",
                             str(tmp_path / "resumed.jsonl")])
    again = _rows(tmp_path / "resumed.jsonl")
    assert [row["loss_scale"] for row in again] == [rows[-1]["loss_scale"]] * 5
    assert [row["lm_loss"] for row in again] == pytest.approx(
        [row["lm_loss"] for row in rows[19:]], abs=5e-3)
