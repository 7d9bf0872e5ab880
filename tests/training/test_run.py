"""A run's features are called in order, repeat and skip steps; in a loop of one's own, too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_plugin import MoELayer
from moe_plugin.comm import LocalComm
from moe_plugin.config import GuardConfig, ObserveConfig, RunConfig, from_dict
from moe_plugin.hosts.plain.run import TrainingSteps
from moe_plugin.training.resilience.skipped_steps import MAX_SKIPPED_STEPS
from moe_plugin.training.resilience.twins import WrongResultError
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import (
    LostStep,
    RunFeature,
    SkipStep,
    StepFacts,
    StepGradients,
    StepInput,
    StepRepeat,
)
from tests.distributed import run_gloo


class Said(RunFeature):
    """Writes down what it is called for; repeats the first passes, skips by `reason`."""

    def __init__(self, name: str, said: list[str], reason: SkipStep | None = None) -> None:
        self.name, self.said, self.reason, self.repeats = name, said, reason, 1

    def begin(self) -> None:
        self.said.append(f"{self.name} begins")

    def around_step(self, step: StepInput) -> AbstractContextManager[Any]:
        self.said.append(f"{self.name} step {step.number}")
        return nullcontext()

    def before_passes(self) -> Callable[[], None]:
        return lambda: self.said.append(f"{self.name} back")

    def after_passes(self) -> None:
        if self.repeats:
            self.repeats -= 1
            raise StepRepeat

    def after_backward(self, gradients: StepGradients) -> None:
        if self.reason is not None:
            raise self.reason

    def numbers(self) -> dict[str, float]:
        return {self.name: 1.0}


def test_features_are_called_in_order_and_begin_once() -> None:
    said: list[str] = []
    run, passes = Run([Said("a", said), None, Said("b", said)]), []
    for number in (1, 2):
        with run.around_step(StepInput(number)):
            run.compute(lambda: passes.append(run.after_passes()), lambda: said.append("undo"))
    repeated = ["undo", "a back", "b back"]
    assert said == ["a begins", "b begins", "a step 1", "b step 1", *repeated, *repeated,
                    "a step 2", "b step 2"]
    assert len(passes) == 2 and run.number == 2 and run.numbers() == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("reason", [SkipStep("not finite"), LostStep("a replica was lost")])
def test_a_step_that_is_left_out_is_known_until_the_next(reason: SkipStep) -> None:
    feature = Said("a", [], reason)
    run = Run([feature])
    with run.around_step(StepInput(1)), pytest.raises(SkipStep):
        run.after_backward(StepGradients(1, list, lambda: True))
    assert run.left_out is reason and run.left_out.lost == isinstance(reason, LostStep)
    feature.reason = None
    with run.around_step(StepInput(2)):
        run.after_backward(StepGradients(2, list, lambda: True))
    assert run.left_out is None


def small_model() -> nn.Module:
    torch.manual_seed(1)
    settings = from_dict({"model_dim": 8, "num_experts": 4})
    return nn.Sequential(nn.Linear(8, 8), MoELayer(settings, LocalComm()))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).output - x).square().mean()


def batches(steps: int) -> list[Tensor]:
    return [torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            for step in range(steps)]


def test_steps_of_a_loop_of_ones_own_are_plain_steps(tmp_path: Path,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    mine, plain = (small_model() for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (mine, plain)]
    steps = TrainingSteps(mine, optimizers[0], loss_of, clip=0.05, total=6,
                          settings=RunConfig(observe=ObserveConfig(
                              interval=2, jsonl=str(tmp_path / "stats.jsonl"))), tokens_of=len)
    for x in batches(4):
        optimizers[1].zero_grad()
        loss = loss_of(plain, x)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizers[1].step()
        assert torch.equal(steps(x), loss)
    bad = batches(1)[0] * float("nan")
    before = [p.detach().clone() for p in mine.parameters()]
    assert steps(bad) is None and not steps.norm.isfinite() and steps.done == 5
    assert all(map(torch.equal, before, mine.parameters()))
    assert "step 5 skipped on all ranks (1 in a row" in caplog.text
    assert caplog.text.count("first step: ") == 1 and "5 steps left" in caplog.text
    steps.close()
    rows = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    assert [(r["step"], r["calls"]) for r in rows if "layer" in r] == [(2, 2), (4, 2)]
    assert [r["step"] for r in rows if "training" in r] == [2, 4]
    assert all(r["training"]["loss"] > 0 for r in rows if "training" in r)


def test_steps_that_stay_not_finite_end_the_run() -> None:
    model = small_model()
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of)
    bad = torch.full((4, 8), float("inf"))
    for _ in range(MAX_SKIPPED_STEPS - 1):
        assert steps(bad) is None
    with pytest.raises(FloatingPointError, match="10 steps in a row"):
        steps(bad)


class Ended(RunFeature):
    """Keeps the facts of all steps."""

    def __init__(self) -> None:
        self.facts: list[StepFacts] = []

    def after_step(self, facts: StepFacts) -> None:
        self.facts.append(facts)


class Loses(Ended):
    """Its second step is lost."""

    def after_backward(self, gradients: StepGradients) -> None:
        if len(self.facts) == 1:
            raise LostStep("a replica was lost: this step is made again")


def test_a_lost_step_is_made_again_under_its_number() -> None:
    model, loses = small_model(), Loses()
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of,
                          features=[loses])
    made = [steps(x) is not None for x in batches(3)]
    assert made == [True, False, True] and steps.done == 2
    assert [(f.number, f.made) for f in loses.facts] == [(1, True), (2, False), (2, True)]


def _flipped(rank: int, wrong: bool) -> tuple[int, tuple[int, ...]] | None:
    model = small_model()
    steps = TrainingSteps(model, torch.optim.SGD(model.parameters(), 0.1), loss_of,
                          RunConfig(guard=GuardConfig(twins=2)))
    if wrong and torch.distributed.get_rank() == rank:
        model[1].experts.register_forward_hook(lambda _, __, y: y * 1.0001)
    try:
        for x in batches(2):
            steps(x)
    except WrongResultError as error:
        return error.step, error.ranks
    return None


@pytest.mark.distributed
@pytest.mark.parametrize("wrong", [False, True])
def test_twins_are_compared_in_a_loop_of_ones_own(wrong: bool) -> None:
    found = run_gloo(3, _flipped, 1, wrong)
    assert found == [(2, (1,)) if wrong else None] * 3


def test_a_stopped_rank_says_its_line_before_its_launcher_ends_it() -> None:
    """One that has ended makes the launcher end the others (SIGTERM), however far they are."""
    code = """
import os, signal, time
from moe_plugin.training.resilience.stopping import RUN, stops_in_one_line
with stops_in_one_line():
    RUN.resume(lambda: 3, None, None, "")
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        130, "stopped at step 3; no checkpoints were requested\n")
