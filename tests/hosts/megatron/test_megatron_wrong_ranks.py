"""Ranks that send or compute wrong numbers in Megatron's training: outvoted, or found and named.

Also:

* Losses and gradients that are not finite: the step is skipped on all ranks, training stops after
  ten, checkpoints stay good.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.attacks.votes import attack_votes
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, Run, ran, refusal, when_built

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
VOTES = ["--moe-votes", "3"]


def _of_another_dtype() -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32 if dist.get_rank() else torch.float32))


def test_another_collective_of_a_launched_rank_is_found() -> None:
    """As of all ranks of this server."""
    with pytest.raises(AssertionError, match=r"rank 1: all_reduce of torch.int32 \[1\]"):
        on_ranks(2, _of_another_dtype)


def _train(argv: list[str], attacker: int | None = None,
           flips: tuple[int, int] | None = None) -> dict[str, Any]:
    """Losses and gradient norms of all steps, parameters, what was said of votes, and the error
    that ended training.

    flips: a rank, and the step from which on one bit of its experts' results is wrong.
    """
    from moe_plugin.hosts.megatron.compat import finite
    from moe_plugin.training.resilience.twins import WrongResultError

    seen: list[tuple[float, float | None]] = []

    def flipped(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert flips is not None
        if len(seen) + 1 < flips[1]:
            return output
        wrong = output.clone()
        wrong.detach().view(torch.int32).view(-1)[0] ^= 1
        return wrong

    def built(run: Run) -> None:
        if flips is not None and dist.get_rank() == flips[0]:
            run.moe_layers()[0].experts.register_forward_hook(flipped)

    if attacker == dist.get_rank():
        attack_votes()
        finite.all_finite = lambda tensors: False
    error: Any = None
    said = list[str]()
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("moe_plugin.training.resilience.step_votes").addHandler(listener)
    run = Run()
    try:
        ran(argv, built, lambda run: seen.append((0.0, None)), run)
    except WrongResultError as found:
        error = (found.step, found.ranks, found.where)
    return {"seen": [(row["lm_loss"], row["grad_norm"]) for row in run.steps_logged],
            "parameters": [p.detach().clone() for p in run.model.parameters()],
            "said": said, "error": error}


def test_wrong_ranks(data: str) -> None:
    """Four ranks. Attacks and checks change no loss; a flipped bit is found within two steps."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "4", "--hidden-dropout", "0.1"]
    every = zip(*(on_ranks(4, _train, [*argv, *more], *given) for more, *given in (
        ([],), (VOTES, 1), ([*VOTES, "--moe-vote-aggregate", "median"], 3),
        (["--moe-check-twins", "2"], None, (2, 3)))), strict=True)
    for clean, attacked, median, flipped in every:
        assert len(clean["seen"]) == 4 and attacked["error"] is None
        for (loss, norm), (wanted, wanted_norm) in zip(attacked["seen"], clean["seen"],
                                                       strict=True):
            assert loss == pytest.approx(wanted, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
        losses = [loss for loss, _ in median["seen"]]
        assert losses[0] == pytest.approx(clean["seen"][0][0], rel=1e-6)
        assert losses[-1] < 0.97 * losses[0]
        step, ranks, where = flipped["error"]
        assert (step, ranks) == (4, (2,)) and "output" in where
        assert flipped["seen"][:2] == clean["seen"][:2] and len(flipped["seen"]) == 3


@pytest.mark.parametrize(("blocks", "outvoted"), [
    (EP2, [4, 5]), (PP2, [2, 5]), ([*EP2, *PP2], [4, 5, 10, 11]),
    (["--pipeline-model-parallel-size", "3", "--num-layers", "3"], [2, 5, 8])],
    ids=["EP2", "PP2", "EP2 PP2", "PP3"])
def test_workers_of_several_ranks(blocks: list[str], outvoted: list[int], data: str) -> None:
    """Three expert-parallel groups or pipelines, of which one has a wrong rank: losses and
    parameters are those without it.
    """
    argv = [*MODEL, *blocks, "--untie-embeddings-and-output-weights", "--data-path", data,
            "--train-iters", "3", "--hidden-dropout", "0.1", "--optimizer", "sgd", "--lr", "0.1",
            "--global-batch-size", "12"]
    ranks = 3 * len(outvoted)
    clean = on_ranks(ranks, _train, argv)
    voted = on_ranks(ranks, _train, [*argv, *VOTES], ranks - 1)
    for mine, wanted in zip(voted, clean, strict=True):
        assert len(mine["seen"]) == len(wanted["seen"])
        for (loss, norm), (wanted_loss, wanted_norm) in zip(mine["seen"], wanted["seen"],
                                                            strict=True):
            assert loss == pytest.approx(wanted_loss, rel=1e-5)
            assert norm == pytest.approx(wanted_norm, rel=1e-4)
        torch.testing.assert_close(mine["parameters"], wanted["parameters"], rtol=1e-4, atol=1e-6)
    assert voted[0]["said"] == [
        f"step {step}: outvoted ranks: {outvoted}; files without a majority: []"
        for step in (1, 2, 3)]
    assert max(len(each["seen"]) for each in voted) == 3


UNGUARDED = [
    (["--moe-votes", "4"], "odd and >= 3"), (VOTES, "larger than the number of workers, 2"),
    ([*VOTES, *EP2], "larger than the number of workers, 1"),
    ([*VOTES, *PP2], "use --untie-embeddings-and-output-weights"),
    ([*VOTES, "--context-parallel-size", "2"], "--context-parallel-size"),
    ([*VOTES, "--use-distributed-optimizer"],
     "ranks cannot vote on parameters that only one rank"),
    ([*VOTES, "--moe-router", "sigmoid_bias"], "without a vote"),
    ([*VOTES, "--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"],
     "follow the loads that every rank reports"),
    ([*VOTES, "--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size"),
    (["--moe-check-twins", "2", *EP2], "no two of 2 ranks store the same experts"),
    (["--moe-check-twins", "2", "--pipeline-model-parallel-size", "2"],
     "--pipeline-model-parallel-size"),
]


@pytest.mark.parametrize(("more", "said"), UNGUARDED)
def test_what_cannot_be_guarded_is_refused(more: list[str], said: str, data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1", *more]
    for found in on_ranks(2, refusal, argv):
        assert said in found


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
    messages = on_ranks(2, _save_bad_weights, [
        *MODEL, "--data-path", data, "--train-iters", "2", *EP2, "--save", str(tmp_path),
        "--save-interval", "1"])
    for message in messages:  # of every rank
        assert message.startswith("rank 1: 'decoder.layers.0.mlp.experts."), messages
        assert f"Resume from the newest checkpoint in {tmp_path}" in message, messages
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [path.name for path in tmp_path.glob("iter*")] == ["iter_0000001"]


def _save_bad_streamed(argv: list[str]) -> str:
    def stepped(run: Run) -> None:
        if dist.get_rank() == 1 and run.steps == 2:
            block = run.chunks[0].trainer.blocks[1]
            block.write([torch.full_like(x, float("nan")) for x in block.read()])

    with pytest.raises(FloatingPointError) as stopped:
        ran(argv, stepped=stepped)
    return str(stopped.value)


def test_bad_streamed_weights_of_one_rank_end_all_ranks(data: str, tmp_path: Path) -> None:
    """At once, with the same error, and no half of a checkpoint is left."""
    messages = on_ranks(2, _save_bad_streamed, [
        *MODEL, "--data-path", data, "--train-iters", "2", "--weights-on", "host",
        "--moe-activation-path", str(tmp_path), "--untie-embeddings-and-output-weights",
        "--save", str(tmp_path), "--save-interval", "1"], timeout_s=60)
    for message in messages:
        assert message.startswith("rank 1: ") and "of block 1 is not finite" in message, messages
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
