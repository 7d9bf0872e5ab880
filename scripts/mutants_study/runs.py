"""Find the tests that execute a line, and run them for each mutant."""

from __future__ import annotations

import ast
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from scripts.mutants_study import probes
from scripts.mutants_study.faults import ROOT, Mutant

RUNS = ROOT / "runs" / "mutants"
KILLED, SURVIVED, NOT_RUN, TIMED_OUT = "killed", "survived", "not executed", "timed out"


def cover(arguments: list[str], workers: int) -> None:
    """Run the tests once, and record which lines each test executes."""
    folder = RUNS / "coverage"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    offsets, end = {}, 0
    for path in sorted((ROOT / "moe_plugin").rglob("*.py")):
        offsets[str(path)] = end
        end += len(path.read_bytes().splitlines()) + 1
    (folder / probes.OFFSETS).write_text(json.dumps(offsets | {"end": end}))
    hook = Path(sysconfig.get_path("purelib"), "mutants_probes.pth")
    hook.write_text(f"import os; os.environ.get({probes.FOLDER!r}) and "
                    f"__import__({probes.__name__!r})\n")
    try:
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", probes.__name__, "-n",
                        str(workers), "--dist", "worksteal", *arguments], cwd=ROOT, check=False,
                       env=os.environ | {probes.FOLDER: str(folder), "OMP_NUM_THREADS": "1"})
    finally:
        hook.unlink()


class TestsByLine:
    """The tests that execute a line, the quickest first."""

    def __init__(self) -> None:
        folder = RUNS / "coverage"
        self.offsets = json.loads((folder / probes.OFFSETS).read_text())
        self.tests: list[str] = []
        seconds, executed = [], []
        for path in folder.glob("records*.jsonl"):
            with open(path, encoding="utf-8") as stream:
                for line in stream:
                    name, duration, outcome, lines = json.loads(line)
                    if outcome == "passed":
                        self.tests.append(name)
                        seconds.append(duration)
                        executed.append(np.packbits(np.frombuffer(
                            zlib.decompress(base64.b64decode(lines)), np.uint8)))
        self.seconds, self.executed = np.array(seconds), np.array(executed)

    def of(self, mutant: Mutant) -> list[str]:
        """Return the names of the tests that execute the statement of a mutant."""
        path = ROOT / mutant.path
        line = max(each.lineno for part in probes.statements(ast.parse(path.read_bytes()))
                   for each in part if each.lineno <= mutant.last
                   and (each.end_lineno or each.lineno) >= mutant.first)
        byte, bit = divmod(self.offsets[str(path)] + line, 8)
        found = np.flatnonzero(self.executed[:, byte] & (128 >> bit))
        return [self.tests[number] for number in found[np.argsort(self.seconds[found])]]


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
