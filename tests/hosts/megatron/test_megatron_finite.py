"""Losses and gradients that are not finite: the step is skipped on all ranks, training stops after
ten, checkpoints stay good.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, Run, ran, when_built

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]


def _train_with_nan(argv: list[str], bad: tuple[int, ...]) -> dict[str, Any]:
    """Train with a NaN in the last rank's loss in the steps `bad` (1-based): whether each step
    changed parameters, and the error that ended training.
    """
    changed: list[bool] = []
    before: list[torch.Tensor] = []
    run, error = Run(), ""

    def kept(run: Run) -> None:
        before[:] = [p.detach().clone() for p in run.model.parameters()]

    def built(run: Run) -> None:
        kept(run)
        if dist.get_rank() == dist.get_world_size() - 1:
            run.model.register_forward_hook(lambda module, inputs, output: output * (
                float("nan") if len(changed) + 1 in bad else 1.0))

    def stepped(run: Run) -> None:
        changed.append(any(not torch.equal(a, b) for a, b in zip(
            before, run.model.parameters(), strict=True)))
        kept(run)

    try:
        ran(argv, built, stepped, run)
    except FloatingPointError as stopped:
        error = str(stopped)
    return {"changed": changed, "error": error}


@pytest.mark.parametrize("sizes", [EP2, [*EP2, "--use-distributed-optimizer"], PP2],
                         ids=["EP2", "EP2 sharded", "PP2"])
def test_a_step_with_nan_is_skipped_on_all_ranks(sizes: list[str], data: str,
                                                 tmp_path: Path) -> None:
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "5", "--log-file",
        str(tmp_path / "log.jsonl"), *sizes
    ]
    for rank in on_ranks(2, _train_with_nan, argv, (3,)):
        assert rank == {"changed": [True, True, False, True, True], "error": ""}
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert rows[2]["lm_loss"] is None
    for row in (rows[0], rows[1], rows[3], rows[4]):
        assert 0 < row["lm_loss"] < 10 and 0 < row["aux_losses"]["load_balancing_loss"][0] < 10


def test_ten_skipped_steps_in_a_row_stop_training(data: str, tmp_path: Path) -> None:
    argv = [
        *MODEL, "--data-path", data, "--train-iters", "20", "--save",
        str(tmp_path), "--save-interval", "2", "--lr-decay-style", "constant", *EP2
    ]
    for rank in on_ranks(2, _train_with_nan, argv, tuple(range(4, 20))):
        # the last one ends within
        assert len(rank["changed"]) == 12 and "10 steps in a row" in rank["error"]
    newest = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    [resumed] = on_ranks(1, _train_with_nan, [
        *MODEL, "--data-path", data, "--lr-decay-style", "constant", "--train-iters",
        str(newest + 1), "--load",
        str(tmp_path), "--log-file",
        str(tmp_path / "resumed.jsonl")
    ], ())
    assert resumed == {"changed": [True], "error": ""}
    assert 0 < json.loads((tmp_path / "resumed.jsonl").read_text())["lm_loss"] < 10


def _save_bad_weights(argv: list[str]) -> str:
    def stepped(run: Run) -> None:
        if dist.get_rank() == 1 and run.steps == 2:
            with torch.no_grad():
                next(run.moe_layers()[0].experts.parameters())[0].fill_(float("inf"))

    with pytest.raises(FloatingPointError, match="no checkpoint is written") as stopped:
        ran(argv, stepped=stepped)
    return str(stopped.value)


def test_bad_weights_replace_no_checkpoint(data: str, tmp_path: Path) -> None:
    on_ranks(2, _save_bad_weights, [*MODEL, "--data-path", data, "--train-iters", "2", *EP2,
                                    "--save", str(tmp_path), "--save-interval", "1"])
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [path.name for path in tmp_path.glob("iter*")] == ["iter_0000001"]


def _steps_of_a_script(argv: list[str]) -> tuple[list[bool], bool]:
    """(step done), for a NaN in an expert gradient of rank 1 in the second step; whether all
    weights are finite.
    """
    from moe_plugin.hosts.megatron.compat.finite import all_finite

    def steps(run: Run) -> tuple[list[bool], bool]:
        done = []
        for step in (1, 2, 3):
            for parameter in run.model.parameters():
                parameter.main_grad.fill_(0.1)
            if step == 2 and dist.get_rank() == 1:
                next(run.moe_layers()[0].experts.parameters()).main_grad.fill_(float("nan"))
            done.append(bool(run.optimizer.step()[0]))
        return done, all_finite(run.model.parameters())

    return when_built(argv, steps)


@pytest.mark.parametrize("sharded", [[], ["--use-distributed-optimizer"]], ids=["whole", "sharded"])
def test_optimizers_of_a_launched_script_skip(sharded: list[str], data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", *EP2, *sharded]
    assert on_ranks(2, _steps_of_a_script, argv) == [([True, False, True], True)] * 2


def _expert_overflow(argv: list[str]) -> tuple[list[bool], list[list[float]], list[float]]:
    """Steps done, loss scales of all optimizers after each, and the expert gradient that the last
    step used, where expert gradients of rank 1 alone are infinite in the second and third step.
    """
    from moe_plugin.hosts.megatron.compat.optimizer import parts

    def steps(run: Run) -> tuple[list[bool], list[list[float]], list[float]]:
        done, scales = [], []
        experts = next(iter(run.moe_layers()[0].experts.parameters()))
        for step in range(5):
            scale = float(run.optimizer.get_loss_scale())
            for parameter in run.model.parameters():
                parameter.main_grad.fill_(0.5 * scale)
            if step in (1, 2) and dist.get_rank() == 1:
                experts.main_grad.fill_(float("inf"))
            done.append(bool(run.optimizer.step()[0]))
            scales.append([float(part.grad_scaler.scale) for part in parts(run.optimizer)])
        return done, scales, (experts.main_grad / scale).flatten()[:2].tolist()

    return when_built(argv, steps)


def test_an_overflow_of_experts_alone_lowers_one_scale_for_all(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "2", "--fp16", "--hysteresis", "1",
            "--initial-loss-scale", "1024", *EP2]
    for done, scales, grad in on_ranks(2, _expert_overflow, argv):
        assert done == [True, False, False, True, True]
        assert scales == [[1024.0] * 2, [512.0] * 2, [256.0] * 2, [256.0] * 2, [256.0] * 2]
        assert grad == [0.5, 0.5]
