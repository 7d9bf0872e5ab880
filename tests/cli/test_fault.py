"""`moe-plugin fault` says so where nothing went wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_plugin.cli.main import main
from tests.preloaded import Finished, Server

server = Server("tests.faults.preload")


def run(script: Path, options: list[str], **environment: str) -> Finished:
    """The command with a program, alone on this machine."""
    usual = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
             }
    return server.run(1, main, ["fault", "kill", *options, "--", str(script)],
                      environment={**usual, **environment})


TRAINS = """
import torch
from moe_plugin import MoELayer
from moe_plugin.config import from_dict

layer = MoELayer(from_dict({"model_dim": 8, "num_experts": 2}))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    layer(torch.ones(1, 4, 8)).output.sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.mark.parametrize(("options", "message"), [
    (["--step", "40"], "kill did not happen on rank 0: step 40, place forward, was not reached; "
                       "the program ran 0 steps"),
    (["--ranks", "1,3"], "kill happens on no rank: the given ranks are 1, 3, but the program's "
                         "ranks are 0 to 0")
])
def test_a_fault_that_does_not_happen_is_said(options: list[str], message: str,
                                              tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('trained'); sys.exit(3)")
    done = run(script, options)
    assert done.code == 3 and sorted(done.log.splitlines()) == [
        f"moe-plugin fault: {message}", "trained"]


def test_a_place_that_does_not_come_is_said_with_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    done = run(script, ["--step", "2", "--place", "exchange"])
    assert (done.code, done.results) == (0, [0]) and done.log.startswith("trained\n"), done.log
    assert "in steps 2 to 3; ranks exchange rows only if they share the experts" in done.log


def test_a_fault_can_happen_in_torchrun_s_first_start_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    for options, start, status in (([], "1", -9), (["--once"], "1", 0)):
        done = run(script, options, TORCHELASTIC_RESTART_COUNT=start)
        assert done.code == status and done.log == ("" if status else "trained\n"), done.log


def test_the_program_may_have_a_package_called_scripts(tmp_path: Path) -> None:
    """As the laboratory is called, which the command is part of."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text("print('its own')")
    script = tmp_path / "train.py"
    script.write_text("import scripts")
    assert "its own" in run(script, ["--step", "40"]).log
