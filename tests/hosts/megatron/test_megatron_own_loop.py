"""Parts of what the launcher adds to Megatron's own loop that need no ranks."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from moe_plugin.hosts.megatron import endings, launch, passes, script
from moe_plugin.hosts.megatron.compat import loaders
from moe_plugin.hosts.megatron.compat.names import get_rerun_state_machine
from moe_plugin.training.run import Run
from moe_plugin.utils.run_feature import LostStep, RunFeature, SkipStep

pytestmark = pytest.mark.megatron


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
    assert endings.of_a_script(_raised(work)) is None


def test_an_error_of_one_rank_is_said_without_a_group(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str],
                                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # what the end of a run turns off is on again afterwards
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(endings, "WAIT_S", 0.0)

    def work() -> None:
        raise endings.TierError("no room")

    assert endings.status_of("script", work, dict) == 1
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
