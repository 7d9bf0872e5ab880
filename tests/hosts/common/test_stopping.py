"""Runs as a user starts them, stops them, and starts them again when they are finished."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from moe_plugin.planner.units import parse_time
from tests.hosts.common.host import Host
from tests.hosts.stopped import own_lines, stopped

FIRST = r"^.*first step: ([\d.]+ m?s), ([\d,]+) tokens/s; [\d,]+ steps left, .* at this speed$"


def test_a_run_that_goes_on_and_is_stopped_says_its_lines_once(
        host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No warnings of packages come before the first step; torchrun shows no lines but its own; a
    finished run says so and writes nothing.
    """
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    home = tmp_path / "run"
    begun = host.train(home, 3, save=5).ok()
    assert begun.numbers == [1, 2, 3]
    words = host.words(home, 100_000, "--num-workers 1", 2, 5, None, 0)
    log = stopped(host.torchrun(words), host.shows(12), tmp_path / "log", host.environment())
    before = log.partition("death signal")[0]
    assert not [word for word in ("Warning", "already been imported", "Apex", "transformer-engine")
                if word in before], before[-5000:]
    steps = host.shown(before)
    assert steps == [*range(4, 4 + len(steps))] and len(steps) >= 9
    [(seconds, speed)] = re.findall(FIRST, before, re.M)
    silent, _, rest = before.partition("first step: ")
    assert host.shown(silent) == [] and host.shown(rest) == steps
    row = next(row for row in host.rows(home, log) if row["step"] == 4)
    assert float(speed.replace(",", "")) * parse_time(seconds) == pytest.approx(
        host.tokens(row), rel=0.02)
    [(step, saved)] = re.findall(rf"^stopped at step (\d+), last checkpoint (\d+) in {home}; "
                                 "the same command resumes the run$", log, re.M)
    assert int(step) - 5 <= int(saved) <= int(step) and 10 <= int(saved)
    assert log.count("stopped at step") == 1
    assert not [word for word in ("KeyboardInterrupt", "CommError", "Traceback")
                if word in "\n".join(own_lines(log))], log[-3000:]
    files = {path: path.stat().st_mtime_ns for path in host.weights(home)}
    finished = host.train(home, 7, save=5).ok()
    assert host.finished(home, int(saved), 7) in finished.log and not finished.rows
    assert {path: path.stat().st_mtime_ns for path in host.weights(home)} == files
    more = host.train(home, int(saved) + 1, save=5)
    assert more.ok().numbers == [int(saved) + 1] and "is finished" not in more.log


def test_known_warnings_are_shown_where_they_are_asked_for(host: Host, tmp_path: Path) -> None:
    words = host.words(tmp_path, 3, "", 1, 0, None, 0)
    done = subprocess.run(
        host.torchrun(words, 1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=300, cwd=tmp_path, env={**host.environment(), "PYTHONWARNINGS": "default"},
        check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert host.warning in done.stdout and host.shown(done.stdout) == [1, 2, 3]
