"""The live view: what it shows, that it follows a growing file and ends with the run, plain text
without a terminal.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_plugin.cli.main import main
from moe_plugin.observe.findings import findings
from moe_plugin.observe.history import LayerRecord, RunRecord, StepRecord, read_run
from moe_plugin.observe.watch import BARS, Watch, load_bars, spark, view
from tests.distributed import heeds_ctrl_c

DATA = Path(__file__).parent / "data"


def shown(run: RunRecord, width: int = 120, height: int = 200, age_s: float | None = None,
          **options: Any) -> list[str]:
    """The lines of a view."""
    console = Console(file=io.StringIO(), width=width, height=height, **options)
    console.print(view(run, console, age_s))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("host", ["fairseq", "megatron"])
def test_once_shows_loss_speed_balance_and_decisions(host: str,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(DATA / host), "--once"]) == 0
    text, run = capsys.readouterr().out, read_run(DATA / host)
    assert "\x1b" not in text and f"step {run.last_step} of 24 (100 %)" in text
    assert re.search(rf"^loss +{run.steps[-1].loss:.4g} ", text, re.MULTILINE) and re.search(
        r"^tokens/s +[\d,]+ ", text, re.MULTILINE)
    for name, records in run.layers.items():
        assert re.search(
            rf"^{re.escape(name)} +{records[-1].max_over_mean:.4g} +[\d.]+ % "
            rf"+{records[-1].entropy:.4g} +0  [{BARS}]{{4}}$",
            text, re.MULTILINE)
    assert run.decisions[-1].why in text
    title, progress = text.splitlines()[:2]
    assert title.startswith(run.name) and title.endswith("finished") and "━" * 30 in progress


@pytest.mark.parametrize("width", [48, 200])
def test_what_a_finding_says_to_change_is_whole_on_a_narrow_terminal(width: int) -> None:
    run = read_run(DATA / "fairseq")
    lines = shown(run, width=width, height=60)
    text = " ".join(" ".join(lines).split())
    found = findings(run)
    assert found and all(len(line) <= width for line in lines)
    assert all(f.title in text and f.remedy in text for f in found)
    assert any(line.startswith("layer ") for line in lines)


def test_bars() -> None:
    assert spark([1, 2, 3], 10) == "▁▅█" and spark([5, 5], 9) == "▁▁" and spark(
        [1, float("nan"), 3], 9) == "▁?█"
    assert spark(list(range(100)), 4, "0123") == "0123" and spark([float("nan")], 9) == "?"
    record = LayerRecord(step=1, layer="a", load=(0, 1, 2, 1, 1, 1))
    assert load_bars(record, 9, "012").plain == "012111"
    assert load_bars(record, 3, "012").plain == "121"
    assert load_bars(LayerRecord(step=1, layer="a"), 5).plain == ""


def test_a_bar_is_coloured_by_its_load() -> None:
    record = LayerRecord(step=1, layer="a", load=(0, 10, 16, 30, 4))
    assert [str(span.style) for span in load_bars(record, 9).spans] == [
        "blue", "green", "green", "red", "blue"]


def test_the_screen_fits_and_keeps_the_worst_layers() -> None:
    layers = {
        f"layer{i}": [
            LayerRecord(step=1, layer=f"layer{i}", load=(1, 3),
                        max_over_mean=1 + (i * 37 % 50) / 10)
        ] for i in range(50)
    }
    run = RunRecord(name="x" * 300, host="megatron", steps=[StepRecord(step=1, loss=2.0)],
                    layers=layers,
                    notes=["y" * 300], settings={"train-iters": "9"})
    lines = shown(run, 60, 20)
    assert len(lines) <= 20 and max(map(len, lines)) <= 60
    assert sum(line.startswith("layer") for line in lines) > 9
    assert any("better balanced layers" in line for line in lines)
    worst = max(layers, key=lambda name: layers[name][0].max_over_mean)
    assert any(line.startswith(f"{worst} ") for line in lines)
    assert len(shown(run, 200, 200)) > 50


def test_progress_and_remaining_time_where_they_are_known() -> None:
    steps = [StepRecord(step=s, loss=2.0, seconds=30.0) for s in (10, 20, 30)]
    run = RunRecord(name="a", host="megatron", steps=steps, settings={"train-iters": "120"})
    line = shown(run)[1]
    assert line.startswith("step 30 of 120 (25 %)  1.5 min  ETA 4.5 min") and "━" in line
    run.settings = {}
    assert shown(run)[1] == "step 30  1.5 min"
    assert shown(run, age_s=7.2)[0] == "a  Megatron-core  (last record 7 s ago)"


def test_a_terminal_gets_colours_by_how_bad_a_value_is() -> None:
    def text(drop: float) -> str:
        record = LayerRecord(step=1, layer="a", load=(1, 1), max_over_mean=1.0, drop_fraction=drop)
        run = RunRecord(name="a", host="x", layers={"a": [record]})
        return "\n".join(shown(run, force_terminal=True, color_system="standard"))

    green, yellow, red = (f"\x1b[{code}m" for code in (32, 33, 31))
    assert green in text(0.0) and yellow not in text(0.0) and red not in text(0.0)
    assert yellow in text(0.01) and red not in text(0.01) and red in text(0.5)


def test_without_unicode_the_bars_are_ascii(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Watch(DATA / "fairseq", stream=stream).once()
    text = raw.getvalue().decode("ascii")
    assert re.search(r"^loss +[\d.]+  [_.=+*#@-]{12}$", text, re.MULTILINE)


def test_names_from_a_log_do_not_steer_the_terminal() -> None:
    evil = "\x1b[2J\n\x9b[bold]evil"
    run = RunRecord(name=evil, host=evil,
                    layers={evil: [LayerRecord(step=1, layer=evil, load=(1, 1),
                                               max_over_mean=1.0)]}, notes=[evil])
    lines = shown(run)
    assert all(line.isprintable() for line in lines)
    said = r"\x1b[2J\n\x9b[bold]evil"  # nor is it markup
    assert sum(said in line for line in lines) == 3, lines


def test_it_follows_a_growing_file_and_writes_only_when_something_changed(tmp_path: Path) -> None:
    stream, log, turns = io.StringIO(), tmp_path / "log.jsonl", iter(range(9))

    def sleep(_: float) -> None:
        turn = next(turns)
        if turn in (1, 3):
            with open(log, "a") as out:
                out.write(json.dumps({"iteration": turn, "lm_loss": 3.0}) + "\n")
        if turn == 8:
            raise KeyboardInterrupt

    Watch(tmp_path, interval=0.2, stream=stream, sleep=sleep).follow()
    text = stream.getvalue()
    assert "waiting for the first record" in text and "finished" not in text
    assert text.count("step 1\n") == text.count("step 3\n") == 1 and "\x1b" not in text
    assert text.index("waiting") < text.index("step 1\n") < text.index("step 3\n")


def test_it_ends_when_the_run_has_finished(tmp_path: Path) -> None:
    (tmp_path / "command.sh").write_text("python train.py --train-iters 3\n")
    stream, log, turns = io.StringIO(), tmp_path / "log.jsonl", iter(range(1, 9))

    def sleep(_: float) -> None:
        turn = next(turns)
        row = {"valid_loss": 2.5} if turn == 4 else {"lm_loss": 3.0}
        if turn <= 4:
            with open(log, "a") as out:
                out.write(json.dumps({"iteration": min(turn, 3), **row}) + "\n")

    Watch(tmp_path, interval=0.1, stream=stream, sleep=sleep).follow()
    text = stream.getvalue()
    assert text.endswith(f"{tmp_path.name} finished\n") and next(turns) == 6
    assert re.search(r"^valid loss +2.5 ", text, re.MULTILINE)  # logged after the last step


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (([str(tmp_path / "none")], "not a directory"),
                          ([str(tmp_path), "--once"], "Searched for"),
                          ([str(DATA / "fairseq"), "--interval", "0"], "--interval 0")):
        assert main(["watch", *argv]) == 2 and message in capsys.readouterr().err


def test_without_rich_it_names_the_extra(monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "moe_plugin.observe.watch")
    assert main(["watch", str(DATA / "fairseq")]) == 2
    assert "pip install 'moe-plugin[observe]'" in capsys.readouterr().err


def read_until(master: int, wanted: str, limit_s: float = 60) -> str:
    text, end = "", time.monotonic() + limit_s
    while wanted not in text and time.monotonic() < end:
        if select.select([master], [], [], 0.2)[0]:
            text += os.read(master, 65536).decode("utf-8", "replace")
    assert wanted in text, text
    return text


def test_in_a_terminal_it_draws_in_place_grows_with_the_file_and_ends_on_ctrl_c(
        tmp_path: Path) -> None:
    shutil.copy(DATA / "megatron" / "log.jsonl", tmp_path)
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    process = subprocess.Popen(
        [sys.executable, "-m", "moe_plugin.cli.main", "watch",
         str(tmp_path), "--interval", "0.2"], stdin=slave, stdout=slave, stderr=slave,
        env={**os.environ, "COLUMNS": "90", "LINES": "30",
             "PYTHONIOENCODING": "utf-8", "TERM": "xterm-256color"}, preexec_fn=heeds_ctrl_c)
    os.close(slave)
    try:
        text = read_until(master, "step 24")
        assert "\x1b[?1049h\x1b[H" in text  # the alternate screen
        with open(tmp_path / "log.jsonl", "a") as log:
            log.write('{"iteration": 77, "lm_loss": 1.5}\n')
        read_until(master, "step 77")
        process.send_signal(signal.SIGINT)
        left = "\x1b[?1049l"
        text = read_until(master, left).partition(left)[2]
        # the last view stays on the ordinary screen; it may have come in the same piece
        assert "step 77" in text or read_until(master, "step 77")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_reader_that_goes_away_ends_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(DATA / "fairseq" / "stats.jsonl", tmp_path / "run")
    process = subprocess.Popen([
        sys.executable, "-m", "moe_plugin.cli.main", "watch",
        str(tmp_path / "run"), "--interval", "0.1"
    ], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline()
        process.stdout.close()
        with open(tmp_path / "run" / "stats.jsonl", "a") as stream:
            stream.write(json.dumps({"step": 99, "layer": "x", "load": [1]}) + "\n")
        assert process.wait(timeout=60) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
