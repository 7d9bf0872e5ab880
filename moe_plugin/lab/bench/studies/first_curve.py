"""From `git clone` to a page of curves: the commands of README's four ways in, as they are printed,
in a clone of this checkout. `--venv` takes an environment that is there instead of a new one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_plugin.lab.bench.report import columns
from moe_plugin.lab.bench.study import ROOT, Option
from moe_plugin.messages import short
from moe_plugin.planner.units import show_time

TITLE = "From the clone to the first curve"
OPTIONS = {
    "venv": Option("", "folder of an environment that is there; setting up is then not measured")}
_STEP = re.compile(r"^ {2}(\S.*?) +(\d+)s$", re.MULTILINE)  # of scripts/setup.sh
_BLOCK = re.compile(r"^```bash[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def ways(readme: str) -> dict[str, str]:
    """The commands of each way in, by its heading, behind those that stand before all of them."""
    part = readme.split("\n## Four ways in\n")[1].split("\n## ")[0]
    first, *sections = part.split("\n### ")
    return {name: "".join(_BLOCK.findall(first + text))
            for name, _, text in (section.partition("\n") for section in sections)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "moe-plugin")
        clone_s, _ = _timed(["git", "clone", "--quiet", str(ROOT), str(home)], Path(folder), {})
        setup, venv = None, Path(args.venv).resolve()
        if not args.venv:
            venv = home / ".venv"
            seconds, text = _timed(["bash", "scripts/setup.sh"], home, {})
            setup = {"seconds": seconds, "steps": _STEP.findall(text)}
        found = [{"way": name, **_way(commands, home, venv)} for name, commands in
                 ways((home / "README.md").read_text(encoding="utf-8")).items()]
    return {"clone_s": clone_s, "setup": setup, "ways": found}


def _way(commands: str, home: Path, venv: Path) -> dict[str, Any]:
    variables = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(home)}
    seconds, text = _timed(["bash", "-e", "-c", commands], home, variables)
    page = home / text.strip().splitlines()[-1]  # the report's last line
    if page.suffix != ".html" or not page.is_file():
        raise ValueError(f"{short(commands)} ended without a report; mend README's block")
    return {"seconds": seconds, "page_bytes": page.stat().st_size}


def _timed(command: list[str], home: Path, variables: dict[str, str]) -> tuple[float, str]:
    """(seconds, what it printed)."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=home, env={**kept, **variables}, check=False,
                          capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{short(command)} ended with status {done.returncode}: "
                         f"{done.stderr[-2000:]}{done.stdout[-1000:]}")
    return time.perf_counter() - begin, done.stdout


def body(found: dict[str, Any]) -> Iterator[str]:
    setup = found["setup"]
    yield ("The commands of [README](../../README.md#four-ways-in), as they are printed, in a "
           "fresh clone: the time until the report is there, imports and training data included; "
           "transformers' is that of two runs and their comparison.")
    yield columns(found["ways"], {
        "way": "{way}", "after setting up": lambda one: show_time(one["seconds"]),
        "with clone and set-up": lambda one: show_time(
            one["seconds"] + found["clone_s"] + setup["seconds"]) if setup else ""})
    if setup:
        yield (f"Cloning a repository on this machine takes {show_time(found['clone_s'])}. "
               f"`scripts/setup.sh` takes {show_time(setup['seconds'])}, nearly all of it "
               "pip: downloads from a mirror nearby or its cache, and fairseq's build.")
        yield columns(setup["steps"], {"step of setup": "{0[0]}",
                                       "seconds": lambda step: f"{step[1]} s"})
