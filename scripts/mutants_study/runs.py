"""Find the tests that execute a line, and run them for each mutant."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from scripts.mutants_study.faults import ROOT, Mutant

RUNS = ROOT / "runs" / "mutants"
KILLED, SURVIVED, NOT_RUN, TIMED_OUT = "killed", "survived", "not executed", "timed out"

PLUGIN = """
import json, os, time
import coverage, pytest

def switch(name):
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(name)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    switch(item.nodeid)

def pytest_runtest_logreport(report):
    if report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ["MUTANTS_TIMES"], "a") as stream:
            stream.write(json.dumps([report.nodeid, report.duration, report.outcome]) + "\\n")
"""
CONFIG = """
[run]
source = moe_plugin
parallel = true
data_file = {folder}/data
patch = subprocess, _exit, fork
context = ${{PYTEST_CURRENT_TEST-}}
"""


def cover(arguments: list[str], workers: int) -> None:
    """Run the tests once, and record which lines each test executes."""
    folder = RUNS / "coverage"
    folder.mkdir(parents=True, exist_ok=True)
    (RUNS / "mutants_plugin.py").write_text(PLUGIN)
    (folder / "rc").write_text(CONFIG.format(folder=folder))
    environment = os.environ | {
        "PYTHONPATH": f"{RUNS}:{ROOT}", "COVERAGE_RCFILE": str(folder / "rc"),
        "MUTANTS_TIMES": str(folder / "times.jsonl"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "coverage", "run", f"--rcfile={folder / 'rc'}", "-m",
                    "pytest", "-q", "-p", "mutants_plugin", "-n", str(workers), "--dist",
                    "worksteal", *arguments], cwd=ROOT, env=environment, check=False)
    subprocess.run([sys.executable, "-m", "coverage", "combine", f"--rcfile={folder / 'rc'}", "-q"],
                   cwd=ROOT, env=environment, check=True)


class TestsByLine:
    """The tests that execute a line, the quickest first."""

    def __init__(self) -> None:
        import coverage

        self.data = coverage.CoverageData(str(RUNS / "coverage" / "data"))
        self.data.read()
        self.files = {Path(name).resolve().as_posix(): name for name in self.data.measured_files()}
        self.seconds: dict[str, float] = {}
        for line in (RUNS / "coverage" / "times.jsonl").read_text().splitlines():
            name, duration, outcome = json.loads(line)
            if outcome == "passed":
                self.seconds[name] = duration

    def of(self, mutant: Mutant) -> list[str]:
        """Return the names of the tests that execute the lines of a mutant."""
        name = self.files.get((ROOT / mutant.path).as_posix())
        if name is None:
            return []
        lines = self.data.contexts_by_lineno(name)
        tests = {context.split("|")[-1].removesuffix(" (call)").removesuffix(" (setup)")
                 for line in range(mutant.first, mutant.last + 1)
                 for context in lines.get(line, ())}
        return sorted(tests & self.seconds.keys(), key=self.seconds.__getitem__)


def tested(mutant: Mutant, tests: list[str], tree: Path, limit_s: float) -> tuple[str, str]:
    """Return the result of a mutant and the test that failed.

    The tests run in a process forked from this one, which has imported torch already.
    """
    path = tree / mutant.path
    original = path.read_text(encoding="utf-8")
    lines = original.splitlines()
    lines[mutant.first - 1:mutant.last] = mutant.after.splitlines()
    answer = RUNS / f"answer{os.getpid()}"
    answer.unlink(missing_ok=True)
    try:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            _run_tests(tests, tree, answer)
        deadline = time.monotonic() + limit_s
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return TIMED_OUT, ""
            time.sleep(0.05)
        subprocess.run(["pkill", "-KILL", "-g", str(child)], check=False)
    finally:
        path.write_text(original, encoding="utf-8")
    if not answer.exists():
        return KILLED, "the process of the tests died"
    failed = answer.read_text().strip()
    return (KILLED, failed) if failed else (SURVIVED, "")


def _run_tests(tests: list[str], tree: Path, answer: Path) -> None:
    """Run tests in a forked process until one fails, and write its name to a file."""
    class Failures:
        name = ""

        def pytest_runtest_logreport(self, report: object) -> None:
            if report.failed:  # type: ignore[attr-defined]
                self.name = self.name or report.nodeid  # type: ignore[attr-defined]

        def pytest_collectreport(self, report: object) -> None:
            self.pytest_runtest_logreport(report)

    os.environ["PYTHONPATH"] = str(tree)
    log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if Path(entry or ".") != ROOT)]
    failures, code = Failures(), 4
    try:
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line",
                            *tests], plugins=[failures])
        answer.write_text(failures.name or ("" if code == 0 else f"pytest ended with {code}"))
    finally:
        os._exit(0)


def run(mutants: list[Mutant], part: int, parts: int, tree: Path, limit_s: float) -> None:
    """Run the tests for every mutant that has no result yet, and store each result."""
    import hypothesis  # noqa: F401 - imported once, before the processes are forked
    import torch  # noqa: F401

    sys.dont_write_bytecode = True
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    by_line, results = TestsByLine(), RUNS / f"results{part}.jsonl"
    known = {json.loads(line)["key"] for path in RUNS.glob("results*.jsonl")
             for line in path.read_text().splitlines()}
    for mutant in mutants[part::parts]:
        if mutant.key in known:
            continue
        tests, begin = by_line.of(mutant), time.monotonic()
        mutant.result, mutant.test = (tested(mutant, tests, tree, limit_s) if tests
                                      else (NOT_RUN, ""))
        mutant.seconds = round(time.monotonic() - begin, 1)
        with open(results, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"key": mutant.key, "tests": len(tests),
                                     **asdict(mutant)}) + "\n")
        print(f"{mutant.result} ({len(tests)} tests, {mutant.seconds} s): {mutant.key}", flush=True)
