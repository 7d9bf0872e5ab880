"""Ranks that send or compute wrong numbers in Megatron's training: outvoted, or found and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from tests.attacks import attack_votes
from tests.hosts.megatron.ranks import on_ranks
from tests.hosts.megatron.training import EP2, MODEL, refusal

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
VOTES = ["--moe-votes", "3"]


def _of_another_dtype() -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32 if dist.get_rank() else torch.float32))


def test_another_collective_of_a_launched_rank_is_found() -> None:
    """By those runs of the host's tests that compare them."""
    with pytest.raises(AssertionError, match=r"rank 1: all_reduce of torch.int32 \[1\]"):
        on_ranks(2, _of_another_dtype, compare=True)


def _train(argv: list[str], attacker: int | None = None,
           flips: tuple[int, int] | None = None) -> dict[str, Any]:
    """Losses and gradient norms of all steps, and the error that ended training.

    flips: a rank, and the step from which on one bit of its experts' results is wrong.
    """
    from moe_plugin.hosts.megatron.trainer import arguments, model, train
    from moe_plugin.resilience.twins import WrongResultError
    from moe_plugin.resilience.vote import Ballots

    args = arguments.parser().parse_args(argv)
    seen: list[tuple[list[float], float | None]] = []
    build, step, winners = model.build, train.Loop.step, Ballots.winners

    def flipped(module: torch.nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if len(seen) + 1 < flips[1]:
            return output
        wrong = output.clone()
        wrong.detach().view(torch.int32).view(-1)[0] ^= 1
        return wrong

    def broken(*given: Any) -> Any:
        training = build(*given)
        if flips is not None and dist.get_rank() == flips[0]:
            training.moe_layers()[0].experts.register_forward_hook(flipped)
        return training

    def watched(loop: Any, *given: Any) -> Any:
        loss_2, norm = step(loop, *given)
        seen.append((loss_2.tolist(), norm))
        return loss_2, norm

    model.build, train.Loop.step = broken, watched
    if attacker == dist.get_rank():
        attack_votes(2)
    error: Any = None
    try:
        train.start(args)
        train.run(args)
    except WrongResultError as found:
        error = (found.step, found.ranks, found.where)
    finally:
        model.build, train.Loop.step, Ballots.winners = build, step, winners
    return {"seen": seen, "error": error}


def _trained(argv: list[str]) -> dict[str, dict[str, Any]]:
    """All runs of four ranks."""
    from megatron.core import parallel_state

    runs: dict[str, dict[str, Any]] = {}
    for name, more, given in (
            ("clean", [], {}), ("attacked", VOTES, {"attacker": 1}),
            ("median", [*VOTES, "--moe-vote-aggregate", "median"], {"attacker": 3}),
            ("flipped", ["--moe-check-twins", "2"], {"flips": (2, 3)})):
        runs[name] = _train([*argv, *more], **given)
        parallel_state.destroy_model_parallel()
    return runs


def test_wrong_ranks(data: str, tmp_path: Path) -> None:
    """Four ranks. Attacks and checks change no loss; a flipped bit is found within two steps."""
    argv = [*MODEL, "--data-path", data, "--train-iters", "4", "--hidden-dropout", "0.1",
            "--log-file", str(tmp_path / "log.jsonl")]
    for runs in on_ranks(4, _trained, argv):
        clean = runs["clean"]["seen"]
        assert len(clean) == 4 and runs["attacked"]["error"] is None
        for (mine_2, mine), (theirs_2, theirs) in zip(runs["attacked"]["seen"], clean, strict=True):
            assert mine_2 == pytest.approx(theirs_2, rel=1e-5)
            assert mine == pytest.approx(theirs, rel=1e-4)
        median = runs["median"]["seen"]
        assert median[0][0] == pytest.approx(clean[0][0], rel=1e-6)
        assert median[-1][0][0] < 0.97 * median[0][0][0]
        step, ranks, where = runs["flipped"]["error"]
        assert (step, ranks) == (4, (2,)) and "output" in where
        assert runs["flipped"]["seen"][:2] == clean[:2] and len(runs["flipped"]["seen"]) == 3


def _refusals(argv: list[str]) -> list[str]:
    from megatron.core import parallel_state

    found = []
    for more in (["--moe-votes", "4"], VOTES, [*VOTES, *EP2],
                 [*VOTES, "--use-distributed-optimizer"],
                 [*VOTES, "--moe-router", "sigmoid_bias"],
                 [*VOTES, "--moe-router-enable-expert-bias", "--moe-router-score-function",
                  "sigmoid"],
                 [*VOTES, "--tensor-model-parallel-size", "2"],
                 ["--moe-check-twins", "2", *EP2],
                 ["--moe-check-twins", "2", "--pipeline-model-parallel-size", "2"]):
        found.append(refusal([*argv, *more]))
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    return found


def test_what_cannot_be_guarded_is_refused(data: str) -> None:
    argv = [*MODEL, "--data-path", data, "--train-iters", "1"]
    wanted = ["odd and >= 3", "copies=3 must be <= 2 workers", "use 1, so that every rank has all",
              "what one rank updates for all cannot be voted on", "these are not voted on",
              "follow loads that every rank reports", "--tensor-model-parallel-size",
              "no two of 2 ranks store the same experts", "--pipeline-model-parallel-size"]
    for found in on_ranks(2, _refusals, argv):
        for text, part in zip(found, wanted, strict=True):
            assert part in text, (part, text)
