"""Parts of what the launcher adds to Megatron's own loop that need no ranks.

Also:

* A rank dies or stalls in a layer or in a step of training: Megatron's other rank ends in time, by
  an error that names rank, group and collective.
* The training script on two ranks as a user starts it: our lines come once.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")

from moe_plugin.hosts.megatron import launch, passes, script
from moe_plugin.hosts.megatron.compat import loaders
from moe_plugin.hosts.megatron.compat.names import get_rerun_state_machine
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import LostStep, RunFeature, SkipStep
from tests.hosts.lost_rank import is_last, lose
from tests.hosts.megatron.ranks import command, on_ranks
from tests.hosts.megatron.training import EP2, MODEL, PP2, QUICK, TRAIN, trained
from tests.hosts.stopped import own_lines, stopped

pytestmark = [pytest.mark.megatron, pytest.mark.distributed]
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
    made.run = Run([_Replaced()])
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


def _train_and_lose(how: str, argv: list[str]) -> None:
    if is_last():
        lose(how, "send_receive", 9)
    trained(argv)


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_the_other_rank_says_what_it_waited_for(data: str, how: str) -> None:
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "6", "--moe-timeout", "2"]
    with pytest.raises(AssertionError) as error:
        on_ranks(2, _train_and_lose, how, argv)
    said = str(error.value)
    assert WHO in said
    assert "from rank 1 failed" in said and "send_receive of torch." in said


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
    argv = [*MODEL, *sizes, "--data-path", data, "--train-iters", "1", "--save", str(tmp_path)]
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
    argv = [*MODEL, *EP2, "--data-path", data, "--train-iters", "1", "--save", str(tmp_path),
            "--data-cache-path", str(tmp_path / "cache")]
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
    [said] = on_ranks(1, _groups_of_a_lost_rank, [*MODEL, "--data-path", data, "--train-iters",
                                                  "1"])
    assert "a collective of Megatron's making of process groups failed: " in said


SCRIPT = TRAIN
PROGRAM = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
           "-m", SCRIPT]


def environment() -> dict[str, str]:
    """Of a user who knows nothing of warnings."""
    kept = {k: v for k, v in os.environ.items()
            if k not in ("PYTHONWARNINGS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    return {**kept, "OMP_NUM_THREADS": "1"}


@pytest.mark.distributed
def test_a_run_that_goes_on_and_is_stopped_says_its_lines_once(data: str, tmp_path: Path) -> None:
    """Without warnings of packages that are missing; a finished run says so and writes nothing."""
    save = tmp_path / "run"
    arguments = [*MODEL, *EP2, *QUICK, "--data-path", data, "--cpu", "--save", str(save), "--load",
                 str(save), "--save-interval", "5", "--data-cache-path", str(tmp_path),
                 "--train-iters"]
    first = _said([*arguments, "3"], tmp_path)
    assert _steps(first) == [1, 2, 3]
    assert first.count(f"all 3 iterations are done; losses and balance: {save}/log.jsonl") == 1
    log = stopped([*PROGRAM, *arguments, "100000"], "iteration       12/", tmp_path / "log",
                  environment())
    _check_beginning(log.partition("death signal")[0].splitlines(), save)
    [(step, saved)] = re.findall(rf"^stopped at step (\d+), last checkpoint (\d+) in {save}; "
                                 "the same command resumes the run$", log, re.M)
    assert int(step) - 5 <= int(saved) <= int(step) and 10 <= int(saved)
    assert not [line for line in own_lines(log) if "Traceback" in line], log[-3000:]
    before = {path: path.stat().st_mtime_ns for path in save.rglob("*.distcp")}
    lines = _said([*arguments, "7"], tmp_path)
    assert f"the run in {save} is finished: {saved} of --train-iters 7 iterations are done. Use " \
        "a larger --train-iters to continue." in lines
    assert {path: path.stat().st_mtime_ns for path in save.rglob("*.distcp")} == before


def _said(arguments: list[str], cwd: Path) -> list[str]:
    """Lines of a run by command: a rank of the server has Megatron's handler of logs already."""
    return subprocess.run([*PROGRAM, *arguments], check=True, cwd=cwd, env=environment(), text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout.splitlines()


def _steps(lines: list[str]) -> list[int]:
    """Iterations that Megatron's log has."""
    found = (re.search(r"iteration +(\d+)/ *\d+ \|", line) for line in lines)
    return [int(one[1]) for one in found if one]


def _check_beginning(lines: list[str], save: Path) -> None:
    """Of a run from iteration 3 on."""
    assert not [line for line in lines if "Apex" in line or "transformer-engine" in line]
    assert lines.count(f"continuing from iteration 3 of {save}") == 1
    (first,) = (line for line in lines if line.startswith("first step: "))
    assert re.search(r"tokens/s; 99,?996 steps left, .* at this speed$", first), first
    steps = _steps(lines)
    assert steps == list(range(4, 4 + len(steps)))


def test_known_warnings_are_shown_where_they_are_asked_for(data: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", SCRIPT, *MODEL, "--data-path", data, "--cpu", "--data-cache-path",
         str(tmp_path), "--train-iters", "1"], text=True, stdout=subprocess.PIPE, timeout=300,
        stderr=subprocess.STDOUT, env={**environment(), "PYTHONWARNINGS": "default"}, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert sum("Apex" in line for line in done.stdout.splitlines()) >= 2
