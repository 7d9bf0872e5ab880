"""What the launcher adds to Megatron's own loop: parts that need no ranks; a rank that dies between
layers, or fails alone, is named by the others; a step whose numbers are not finite is skipped on
all ranks, training stops after ten, and checkpoints stay good.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from moe_plugin.hosts.megatron import launch, passes, script
from moe_plugin.hosts.megatron.compat import loaders
from moe_plugin.hosts.megatron.compat.names import get_rerun_state_machine
from moe_plugin.training.run import Run as FeaturesRun
from moe_plugin.utils.run_feature import LostStep, RunFeature, SkipStep
from tests.hosts.lost_rank import is_last
from tests.hosts.megatron.ranks import command, on_ranks
from tests.hosts.megatron.training import (
    EP2,
    MODEL,
    PP2,
    QUICK,
    TRAIN,
    Run,
    argv_for,
    ran,
    trained,
    when_built,
)


def test_a_loss_that_megatron_validates_can_be_asked_for_before_a_step() -> None:
    machine = get_rerun_state_machine()

    def loss(output: torch.Tensor) -> torch.Tensor:
        machine.validate_result(result=output, rejection_func=torch.isnan, message="", fatal=True)
        return output.sum()

    given = {"model": [torch.nn.Identity()],
             "forward_step_func": lambda batches, model: (model(next(batches)), loss)}
    assert passes.loss_of(given, torch.ones(3)) == 3
    assert "validate_result" not in vars(machine)  # Megatron's own again


@pytest.mark.parametrize("several", [False, True])
def test_steps_that_are_left_out_are_read_by_every_rank_that_reads(several: bool) -> None:
    from megatron.core.rerun_state_machine import RerunDataIterator

    each = [RerunDataIterator(iter(range(9))) for _ in range(2)]
    passes.read_over([each[0], None, each[1]] if several else each[0], 3)
    passes.read_over(None, 3)
    assert [next(iterator) for iterator in each] == [3, 3 if several else 0]


class _Replaced(RunFeature):
    replaced = True


def test_weights_of_another_replica_are_not_saved_in_silence(
        caplog: pytest.LogCaptureFixture) -> None:
    made, saves = script.Script(), list[int]()
    made.taken[3] = 5
    made.run = FeaturesRun([_Replaced()])
    made.around_save({"iteration": 4}, lambda: saves.append(4))
    assert not saves and "iteration 4 is written, because weights of iteration 6" in caplog.text


def test_a_lost_step_is_not_one_that_was_skipped() -> None:
    done = ({}, True)
    for why, facts in ((None, (True, True)), (SkipStep(), (True, True)),
                       (LostStep(), (False, False))):
        found = script.step_facts(1, done, why)
        assert (found.made, found.skipped) == facts


class _Data:

    def __init__(self, split: str) -> None:
        self.split = SimpleNamespace(name=split)

    def __len__(self) -> int:
        return 0


def test_only_an_empty_split_to_evaluate_has_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    build = script.Script().around_loader(lambda dataset: dataset)
    train, valid, iterator = _Data("train"), _Data("valid"), iter([])
    assert build(train) is train and build(valid) is None and build(None) is None
    monkeypatch.setattr(script, "script_arguments", lambda: {"dataloader_type": "external"})
    assert build(iterator) is iterator and build(valid) is valid


def test_options_that_were_removed_say_so() -> None:
    with pytest.raises(SystemExit, match="--moe-verbose was removed: what Megatron prints"):
        launch.main(["--moe-verbose", "pretrain_gpt_moe"])


def _raised(work: Any) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("work", [
    lambda: json.loads("{"), lambda: b"\xff".decode(), lambda: int("x")])
def test_errors_of_a_users_code_keep_their_traceback(work: Any) -> None:
    assert launch.of_a_script(_raised(work)) is None


def test_an_error_of_one_rank_is_said_without_a_group(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str],
                                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # what the end of a run turns off is on again afterwards
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(launch, "WAIT_S", 0.0)

    def work() -> None:
        raise launch.TierError("no room")

    assert launch.status_of("script", work, dict) == 1
    assert "script: error: no room (rank 3)" in capsys.readouterr().err


def test_loaders_of_another_megatron_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"0\.15 to 0\.19"), \
            loaders.of_all_ranks(_raised, object()):
        pass


@pytest.mark.parametrize(("later", "again_reads"), [(0, [0, 1]), (2, [4, 5])])
def test_a_lost_step_is_made_again_with_its_batches(later: int, again_reads: list[int]) -> None:
    """Of the step whose state was taken; iterations that are skipped read what lies between."""
    iterator = SimpleNamespace(iterable=iter(range(10)))
    with passes.step_again([iterator, None], Mock()) as again:
        assert [next(iterator.iterable) for _ in range(2)] == [0, 1]
        again(later)
        assert [next(iterator.iterable) for _ in range(2)] == again_reads
    assert [*iterator.iterable] == [*range(2, 10)]


WHO = "CommError: rank 0 of 2 in group 'ranks [0, 1]': "


# what the last rank does not live to do: module below the host, class or None, function; what the
# other one waits in
PLACES = {
    "loss": ("script_report", None, "of_last_stage", PP2, "all_gather of the loss"),
    "finite": ("compat.finite", "PreparedGradients", "gradients", EP2,
               "all_reduce(max) of torch.float32 ()"),
    "balance losses": ("script_report", None, "reduced", EP2,
                       "all_gather of the auxiliary losses' names"),
    "statistics": ("script_report", None, "layer_records", PP2,
                   "all_gather of the layers' records"),
    "checkpoint": ("checkpoint_files", None, "together", EP2,
                   "all_gather of the ranks' parts of a checkpoint"),
}


def _train_and_die(place: str, argv: list[str]) -> None:
    module, cls, name, *_ = PLACES[place]
    owner: Any = importlib.import_module(f"moe_plugin.hosts.megatron.{module}")
    if is_last():
        setattr(getattr(owner, cls) if cls else owner, name, lambda *_, **__: os._exit(7))
    trained(argv)


@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_dies_between_layers_is_named_too(data: str, tmp_path: Path,
                                                      place: str) -> None:
    *_, sizes, waited = PLACES[place]
    argv = argv_for(data, 1, *sizes, "--save", str(tmp_path))
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _train_and_die, place, argv)
    said = str(error.value)
    assert WHO in said and waited in said and " failed: " in said


# where the last rank fails, not the host: module, function
FAILS = {"data": ("megatron.core.datasets.blended_megatron_dataset_builder",
                  "BlendedMegatronDatasetBuilder"),
         "loading": ("megatron.core.dist_checkpointing", "load")}


def _main_and_fail(place: str, argv: list[str]) -> None:
    module, name = FAILS[place]
    owner = importlib.import_module(module)

    @functools.wraps(getattr(owner, name))
    def fail(*_: Any, **__: Any) -> None:
        raise ModuleNotFoundError("No module named 'nothing_of_this_name'")

    if is_last():
        setattr(owner, name, fail)
    command(TRAIN, ["--cpu", *QUICK, *argv])


@pytest.mark.parametrize("place", FAILS)
def test_an_error_of_one_rank_is_not_blamed_on_settings_or_data(data: str, tmp_path: Path,
                                                               place: str) -> None:
    """The other rank says the error of the rank that failed, in one line."""
    argv = argv_for(data, 1, *EP2, "--save", str(tmp_path), "--data-cache-path",
                    str(tmp_path / "cache"))
    if place == "loading":
        on_ranks(2, trained, argv)
        argv += ["--load", str(tmp_path)]
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _main_and_fail, place, argv)
    said = [line for line in str(error.value).splitlines()
            if line.startswith("pretrain_gpt_moe.py: error: ")]
    of_other = next(line for line in said if "error: rank 0 of 2 in group" in line)
    assert "; rank 1 of the job gave up: " in of_other and "no training samples" not in of_other
    assert all("No module named 'nothing_of_this_name'" in line for line in said), said
    # the rank that cannot read a checkpoint says that itself
    assert len(said) == (2 if place == "loading" else 1), said


def _groups_of_a_lost_rank(argv: list[str]) -> str:
    from moe_plugin.comm import CommError

    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")

    parallel = importlib.import_module("megatron.core.parallel_state")
    parallel.initialize_model_parallel = lost
    try:
        trained(argv)
    except CommError as error:
        return str(error)
    return ""


def test_a_lost_connection_is_not_blamed_on_parallel_sizes(data: str) -> None:
    [said] = on_ranks(1, _groups_of_a_lost_rank, argv_for(data, 1))
    assert "a collective of Megatron's making of process groups failed: " in said


def _of_another_dtype() -> None:
    dist.all_reduce(torch.ones(1, dtype=torch.int32 if dist.get_rank() else torch.float32))


def test_another_collective_of_a_launched_rank_is_found() -> None:
    """As of all ranks of this server."""
    with pytest.raises(AssertionError, match=r"rank 1: all_reduce of torch.int32 \[1\]"):
        on_ranks(2, _of_another_dtype)


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
    argv = argv_for(data, 5, "--log-file", str(tmp_path / "log.jsonl"), *sizes)
    for rank in on_ranks(2, _train_with_nan, argv, (3,)):
        assert rank == {"changed": [True, True, False, True, True], "error": ""}
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 1, 1]
    assert rows[2]["lm_loss"] is None
    for row in (rows[0], rows[1], rows[3], rows[4]):
        assert 0 < row["lm_loss"] < 10 and 0 < row["aux_losses"]["load_balancing_loss"][0] < 10


def test_ten_skipped_steps_in_a_row_stop_training(data: str, tmp_path: Path) -> None:
    argv = argv_for(data, 20, "--save", str(tmp_path), "--save-interval", "2", "--lr-decay-style",
                    "constant", *EP2)
    for rank in on_ranks(2, _train_with_nan, argv, tuple(range(4, 20))):
        # the last one ends within
        assert len(rank["changed"]) == 12 and "10 steps in a row" in rank["error"]
    newest = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    [resumed] = on_ranks(1, _train_with_nan, argv_for(
        data, newest + 1, "--lr-decay-style", "constant", "--load", str(tmp_path), "--log-file",
        str(tmp_path / "resumed.jsonl")), ())
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
    messages = on_ranks(2, _save_bad_weights, argv_for(data, 2, *EP2, "--save", str(tmp_path),
                                                       "--save-interval", "1"))
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
    argv = argv_for(data, 2, *EP2, *sharded)
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
    argv = argv_for(data, 2, "--fp16", "--hysteresis", "1", "--initial-loss-scale", "1024", *EP2)
    for done, scales, grad in on_ranks(2, _expert_overflow, argv):
        assert done == [True, False, False, True, True]
        assert scales == [[1024.0] * 2, [512.0] * 2, [256.0] * 2, [256.0] * 2, [256.0] * 2]
        assert grad == [0.5, 0.5]
