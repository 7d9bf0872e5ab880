"""The console script: help, unknown commands, only the wanted command's module is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_plugin.cli.main import main


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "doctor" in text and "corpus" in text


def test_no_command_is_an_error_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_unknown_command_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["docter"])
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_only_the_wanted_command_is_imported() -> None:
    code = (
        "import sys; from moe_plugin.cli.main import _parser; _parser(('corpus',)); "
        "assert 'moe_plugin.cli.corpus' in sys.modules and 'moe_plugin.cli.doctor' not in "
        "sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_verbose_shows_the_trace() -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        main(["--verbose", "corpus", "--out", "/nonexistent", "--size", "0"])
