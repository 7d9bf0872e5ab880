"""The live view: what it shows once, that it follows a growing file, plain text where no terminal
is, a clean end.
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

import pytest

from moe_plugin.cli.main import main
from moe_plugin.observe.history import LayerRecord, Run, StepRecord, read_run
from moe_plugin.observe.watch import BARS, Style, Watch, load_bars, screen, spark
from tests.distributed import heeds_ctrl_c

DATA = Path(__file__).parent / "data"


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
            rf"+{records[-1].entropy:.4g} +0  [{BARS}_.=+*#@-]{{4}}$",
            text, re.MULTILINE)
    assert run.decisions[-1].why in text


def test_bars() -> None:
    assert spark([1, 2, 3], 10) == "▁▅█" and spark([5, 5], 9) == "▁▁" and spark(
        [1, float("nan"), 3], 9) == "▁?█"
    assert spark(list(range(100)), 4, "0123") == "0123" and spark([float("nan")], 9) == "?"
    record = LayerRecord(step=1, layer="a", load=(0, 1, 2, 1, 1, 1))
    assert load_bars(record, 9, "012") == "012111" and load_bars(
        record, 3, "012") == "121" and load_bars(LayerRecord(step=1, layer="a"), 5) == ""


def test_the_screen_fits_and_keeps_the_worst_layers() -> None:
    layers = {
        f"layer{i}": [
            LayerRecord(step=1, layer=f"layer{i}", load=(1, 3),
                        max_over_mean=1 + (i * 37 % 50) / 10)
        ] for i in range(50)
    }
    run = Run(name="x" * 300, host="megatron", steps=[StepRecord(step=1, loss=2.0)], layers=layers)
    lines = screen(run, Style(columns=60, lines=20))
    assert len(lines) <= 20 and max(map(len, lines)) <= 60 and any("better balanced layers" in line
                                                                   for line in lines)
    worst = max(layers, key=lambda name: layers[name][0].max_over_mean)
    assert any(line.startswith(worst) for line in lines)
    assert len(screen(run, Style(columns=200, lines=200))) > 50


def test_names_from_a_log_do_not_steer_the_terminal() -> None:
    evil = "\x1b[2J\x07\x9bevil"
    run = Run(name=evil, host=evil,
              layers={evil: [LayerRecord(step=1, layer=evil, load=(1, 1),
                                         max_over_mean=1.0)]}, notes=[evil])
    assert all(line.isprintable() for line in screen(run))




def test_it_follows_a_growing_file_and_writes_only_when_something_changed(tmp_path: Path) -> None:
    stream, log, turns = io.StringIO(), tmp_path / "log.jsonl", iter(range(9))

    def sleep(_: float) -> None:
        turn = next(turns)
        if turn in (1, 3):
            with open(log, "a") as out:
                out.write(json.dumps({"iteration": turn, "lm_loss": 3.0}) + "\n")
        if turn == 8:
            raise KeyboardInterrupt

    Watch(tmp_path, interval=0.2, stream=stream, sleep=sleep).forever()
    text = stream.getvalue()
    assert "waiting for the first record" in text and text.count("step 1  ") == 1 and text.count(
        "step 3  ") == 1
    assert "\x1b" not in text and text.index("waiting") < text.index("step 1  ") < text.index(
        "step 3  ")


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(tmp_path / "none")
                 ]) == 2 and "no directory" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--once"]) == 2 and "looked for" in capsys.readouterr().err
    assert main(["watch", str(DATA / "fairseq"), "--interval", "0"
                 ]) == 2 and "--interval 0" in capsys.readouterr().err


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
             "PYTHONIOENCODING": "utf-8"}, preexec_fn=heeds_ctrl_c)
    os.close(slave)
    try:
        assert "\x1b[H" in read_until(master, "step 24")
        with open(tmp_path / "log.jsonl", "a") as log:
            log.write('{"iteration": 77, "lm_loss": 1.5}\n')
        read_until(master, "step 77")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_a_reader_that_goes_away_ends_it(tmp_path: Path) -> None:
    shutil.copytree(DATA / "fairseq", tmp_path / "run")
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
