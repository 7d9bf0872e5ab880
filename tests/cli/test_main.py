"""The console script: help, unknown commands, only the wanted command's module is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_plugin.cli.main import COMMANDS, GROUPS, Command, main


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    shown = [line.split()[0] for line in text.partition("own --help.")[2].splitlines()
             if line.startswith("  ") and line[2] != " "]
    assert shown == [name for names in GROUPS.values() for name in names]
    assert sorted(shown) == sorted(COMMANDS)


def test_no_command_is_an_error_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["docter"])
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(("local", "said"), [(None, True), ("0", True), ("1", False)])
def test_errors_are_said_once_on_each_node(local: str | None, said: bool,
                                           monkeypatch: pytest.MonkeyPatch,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the environment has the rank of a job, as that of a node's pod has."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    with pytest.raises(SystemExit) as stop:
        main(["reshard", "--oops"])
    assert stop.value.code == 2 and bool(capsys.readouterr().err) is said


@pytest.mark.parametrize(("argv", "module"), [([], None), (["--help"], None),
                                              (["corpus", "--help"], "runs"),
                                              (["simulate", "--help"], None),
                                              (["simulate", "all-to-all", "--help"],
                                               "clusters")])
def test_only_the_wanted_command_is_imported(argv: list[str], module: str | None) -> None:
    code = """
import sys
from moe_plugin.cli.main import main
try:
    main(sys.argv[2:])
except SystemExit:
    pass
found = {name for name in sys.modules if name.startswith("moe_plugin.cli.")}
wanted = {"moe_plugin.cli.main"} | {f"moe_plugin.cli.{n}" for n in sys.argv[1].split(",") if n}
assert found == wanted, found
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, module or "", *argv], check=False,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [
    "plan --model configs/plans/small.yaml --cluster configs/clusters/a100_ib.yaml --device "
    "configs/devices/h100.yaml --nodes 1 --ranks-per-node 2",
    "simulate all-to-all --cluster configs/clusters/a100_ib.yaml --ranks 16",
    "schedule --topology ring:4"])
def test_planning_runs_without_torch(words: str) -> None:
    code = """
import sys
from moe_plugin.cli.main import main
assert main(sys.argv[1:]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, *words.split()], check=False,
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def _commands(commands: Mapping[str, Command]) -> list[str]:
    return [found for name, c in commands.items() for found in (
        [f"{c.module or c.laboratory} {name}"] if c.parts is None else _commands(c.parts()))]


def test_every_command_has_a_module_with_options_and_a_description(
        capsys: pytest.CaptureFixture[str]) -> None:
    commands = _commands(COMMANDS)
    assert len(commands) == len(set(commands)) >= 12
    for argv in (["doctor"], ["report"], ["bench", "layer"], ["emulate"], ["plan"], ["watch"]):
        with pytest.raises(SystemExit) as stop:
            main([*argv, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and "--" in text and len(text.split("\n\n")[1]) > 40, argv


def test_a_group_without_a_part_lists_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "all-to-all" in capsys.readouterr().out


def test_verbose_shows_the_trace() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        main(["--verbose", "corpus", "--out", "/nonexistent", "--size", "0"])


def test_what_a_process_of_its_own_imported_is_not_collected() -> None:
    """It takes long at the end; in a process of somebody else nothing changes."""
    code = """
import gc, sys
from moe_plugin.cli.main import main
sys.argv = ["moe-plugin", "corpus", "--help"]
for argv, wanted in ((sys.argv[1:], False), (None, True)):
    try:
        main(argv)
    except SystemExit:
        pass
    assert gc.isenabled() and (gc.get_freeze_count() > 0) == wanted
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


COMPLETED = [("moe-plugin resh", ["reshard"]), ("moe-plugin simulate a", ["all-to-all"]),
             ("moe-plugin bench kernels --top", ["--top-k"])]


@pytest.mark.skipif(not find_spec("argcomplete"), reason="needs argcomplete")
def test_a_shell_completes_commands_and_options(tmp_path: Path) -> None:
    for number, (line, wanted) in enumerate(COMPLETED):
        answer = tmp_path / str(number)
        variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": " ", "COMP_LINE": line,
                     "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
        done = subprocess.run([sys.executable, "-m", "moe_plugin.cli.main"], check=False,
                              capture_output=True, text=True, env={**os.environ, **variables})
        assert done.returncode == 0, done.stderr
        assert answer.read_text().split() == wanted, line


@pytest.mark.parametrize("words", [
    ["bench", "layer"], ["audit"], pytest.param(["emulate"], marks=pytest.mark.slow)])
def test_the_laboratory_is_found_beside_another_folder_of_its_name(words: list[str],
                                                                   tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "__init__.py").write_text("raise SystemExit('foreign')")
    done = subprocess.run([sys.executable, "-m", "moe_plugin.cli.main", *words, "--help"],
                          check=False, capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and done.stdout.startswith("usage: moe-plugin"), done.stderr
