"""What commands have in common: JSON, bars; and `moe-plugin configs`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from moe_plugin.cli.main import COMMANDS, main
from moe_plugin.cli.runs import summary
from moe_plugin.planner.forest import Schedule
from moe_plugin.utils.messages import tracked
from moe_plugin.utils.yaml_file import read_yaml

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "observe" / "data" / "megatron"
# they print a few lines, not a table; what they run prints
NO_TABLE = {"corpus", "report", "calibrate", "profile-device", "reshard", "upcycle", "check-hf",
            "emulate", "fault"}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - NO_TABLE))
def test_every_table_can_be_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    part = {"bench": ["layer"], "simulate": ["all-to-all"]}.get(name, [])
    with pytest.raises(SystemExit):
        main([name, *part, "--help"])
    assert "--json" in capsys.readouterr().out


def test_a_schedule_is_printed_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("schedule", "--topology", "ring:3", "--chunks", "2")
    text = printed(capsys, *words, "--json")
    assert Schedule.from_json(text).to_json() == text.strip()
    printed(capsys, *words, "--json", str(tmp_path / "made.json"))
    assert (tmp_path / "made.json").read_text().strip() == text.strip()


def test_a_run_s_state_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    state = json.loads(printed(capsys, "watch", str(RUN), "--json"))
    assert (state["step"], state["steps"], state["finished"]) == (24, 24, True)
    assert state["training"]["loss"] > 0 and state["layers"]["layer1"]["load"]


def test_installed_files_are_listed_and_printed(capsys: pytest.CaptureFixture[str],
                                                tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    about = json.loads(printed(capsys, "configs", "--json"))
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "configs").rglob("*.*")}
    assert set(about) == set(files) and all(about.values())
    assert [line.split()[0] for line in printed(capsys, "configs").splitlines()] == sorted(files)
    for name, path in files.items():
        assert printed(capsys, "configs", name).rstrip("\n") == path.read_text().rstrip("\n")
    assert set(json.loads(printed(capsys, "configs", "moe", "--json"))) == {
        name for name in files if name.startswith("configs/moe/")}


def test_a_printed_file_is_one_of_settings(capsys: pytest.CaptureFixture[str],
                                           tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(printed(capsys, "configs", "moe/switch.yaml"))
    assert read_yaml(tmp_path / "mine.yaml") == read_yaml(ROOT / "configs/moe/switch.yaml")


def test_a_near_name_is_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "switch.yaml"]) == 2
    assert "did you mean configs/moe/switch.yaml?" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "first"), [
    ("# As in A (B et al. 2021). More.\nx: 1\n", "As in A (B et al. 2021)"),
    ("# @package _global_\n# A model, for\n# a run:\n# command\n", "A model, for a run"),
    ("x: 1  # one\n", ""), ('{"name": "a profile"}', "a profile")])
def test_the_first_sentence_says_what_a_file_is(text: str, first: str) -> None:
    assert summary(text) == first


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_shows_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert list(tracked([3, 4], "measure", "round")) == [3, 4]
    shown = sys.stderr.getvalue()
    assert "measure" in shown and "0/2" in shown and "round" in shown


def test_other_ranks_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("RANK", "1")
    assert list(tracked([3], "measure", "round")) == [3] and sys.stderr.getvalue() == ""
