"""Processes forked from a server that has imported a host framework once.

A framework takes 3 to 6 s of CPU time to import, on every rank of every run; a forked rank takes
milliseconds. `Server` is the test's side. `python -m tests.preloaded MODULE` is the server: it
imports MODULE and runs jobs, one after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.collectives import first_difference, noted

ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Finished:
    """What the ranks of one job left. code: 0, or the first exit status other than 0; late: ranks
    that were killed because they did not end in time; log: what all ranks printed; difference: in
    their collectives, where they were to be compared.
    """

    code: int
    late: list[int]
    log: str
    results: list[Any]
    difference: str = ""


class Server:
    """Runs functions in processes forked from one that has imported `preload`; the first job starts
    it.
    """

    def __init__(self, preload: str) -> None:
        self.preload = preload
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")

    def run(self, world: int, function: Callable[..., Any], *args: Any,
            environment: Mapping[str, str] | None = None, cwd: str | Path | None = None,
            timeout_s: float = 300.0, grace_s: float = 5.0, compare: bool = False) -> Finished:
        """`function(*args)` in `world` processes, which find their rank in the variables that
        torchrun sets.

        Once a rank fails, the others get `grace_s` to end. compare: their collectives, see
        `tests.collectives`; those alone that they look up in torch when they call them.
        """
        with tempfile.TemporaryDirectory() as folder:
            call = (function.__module__, function.__qualname__, args)
            Path(folder, "call").write_bytes(pickle.dumps(call))
            job = {
                "folder": folder, "world": world, "cwd": str(cwd or os.getcwd()),
                "environment": dict(os.environ if environment is None else environment),
                "timeout_s": timeout_s, "grace_s": grace_s, "compare": compare
            }
            answer = self._ask(job)

            def left(name: str) -> list[Any]:
                paths = [Path(folder, f"{name}{rank}") for rank in range(world)]
                return [pickle.loads(path.read_bytes()) if path.exists() else None
                        for path in paths]

            log = Path(folder, "log").read_text(errors="replace")
            difference = first_difference(left("calls"), answer["code"] == 0) if compare else ""
            return Finished(answer["code"], answer["late"], log, left("result"), difference)

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = _start(self.preload, self._errors)
            atexit.register(self._end)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            raise RuntimeError(f"the server of {self.preload} ended with {self._process.wait()}:\n"
                               f"{self._errors.read()}")
        return json.loads(answer)

    def _end(self) -> None:
        self._process.stdin.close()  # it reads no more jobs
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _start(preload: str, errors: IO[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, "-m", "tests.preloaded", preload], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def _serve(preload: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is not an answer
    importlib.import_module(preload)
    gc.collect()
    gc.freeze()  # a collection over what was imported takes 0.2 s, in every rank
    for imported in weakref.finalize._registry.values():  # to end torch's operators takes 0.05 s
        imported.atexit = False
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        atexit.unregister(dynamo.dump_compile_times)
    for line in sys.stdin:
        job = json.loads(line)
        ranks = {_fork(job, rank): rank for rank in range(job["world"])}
        answers.write(json.dumps(_wait(ranks, job)) + "\n")
        answers.flush()


def _wait(ranks: dict[int, int], job: dict[str, Any]) -> dict[str, Any]:
    deadline, code, late = time.monotonic() + job["timeout_s"], 0, []
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            del ranks[pid]
            ended = os.waitstatus_to_exitcode(status)
            if ended and not code:
                code = ended
                deadline = min(deadline, time.monotonic() + job["grace_s"])
        elif time.monotonic() < deadline:
            time.sleep(0.003)
        else:
            late, code = sorted(ranks.values()), code or 1
            for pid in ranks:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            break
    return {"code": code, "late": late}


def _fork(job: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code, calls = 1, None
    gc.freeze()  # what the server dropped is not the ranks' to end
    try:
        _become_rank(job, rank)
        calls = noted() if job["compare"] else None
        module, name, args = pickle.loads(Path(job["folder"], "call").read_bytes())
        result = getattr(importlib.import_module(module), name)(*args)
        Path(job["folder"], f"result{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):  # as Python does at its end
            sys.stderr.write(f"{stop.code}\n")
    except BaseException:  # noqa: BLE001 - the log is the report
        sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        if calls is not None:
            Path(job["folder"], f"calls{rank}").write_bytes(pickle.dumps(calls))
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_rank(job: dict[str, Any], rank: int) -> None:
    log = os.open(os.path.join(job["folder"], "log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    # whole lines: ranks write into one file, and PYTHONUNBUFFERED would write them in pieces
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["world"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]))
    os.chdir(job["cwd"])


if __name__ == "__main__":
    _serve(sys.argv[1])
