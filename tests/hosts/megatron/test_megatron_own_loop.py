"""Parts of what the launcher adds to Megatron's own loop that need no ranks."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core",
                    reason="needs megatron-core: pip install 'moe-plugin[megatron]'")
from moe_plugin.hosts.megatron import endings, passes, report, script_output
from moe_plugin.hosts.megatron.compat import loaders
from moe_plugin.hosts.megatron.compat.names import get_rerun_state_machine

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


def test_a_line_of_a_rank_without_a_learning_rate() -> None:
    record: dict[str, Any] = {
        "iteration": 1, "lm_loss": None, "tokens_per_s": 1.0, "lr": None, "skipped_steps": 0,
        "aux_losses": {}, "balance": {}}
    assert "| lr -" in report.line(record, 2, 0.0)


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


def test_a_full_disk_ends_the_log_of_megatrons_lines_alone(capfd: pytest.CaptureFixture[str],
                                                           ) -> None:
    output = script_output.RunOutput.__new__(script_output.RunOutput)
    output._last = deque[str](maxlen=20)
    output._writes, output._file = True, open("/dev/full", "w")  # noqa: SIM115
    assert [output.write("text\n"), output.write("more\n")] == [5, 5]
    assert capfd.readouterr().err.count("no longer written") == 1
    output._file = open(os.devnull, "w")  # noqa: SIM115


def test_what_megatron_said_last_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    output = script_output.RunOutput.__new__(script_output.RunOutput)
    output._last, output._writes = deque[str](maxlen=20), False
    output.write("ERROR: no such file\n")
    output.show_last()
    assert "  ERROR: no such file\n" in capfd.readouterr().err


def test_an_error_of_one_rank_is_said_without_a_group(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str],
                                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)  # what the end of a run turns off is on again afterwards
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(endings, "_WAIT_S", 0.0)

    def work() -> None:
        raise endings.TierError("no room")

    assert endings.status_of("script", work, dict, endings.of_a_script) == 1
    assert "script: error: no room (rank 3)" in capsys.readouterr().err


def test_loaders_of_another_megatron_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"0\.15 to 0\.19"), \
            loaders.of_all_ranks(_raised, object()):
        pass
