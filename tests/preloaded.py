"""Processes forked from a server that has imported a host framework once.

A framework takes 3 to 6 s of CPU time to import, on every rank of every run; a forked rank takes
milliseconds. `Server` is the test's side. `python -m tests.preloaded MODULE ADDRESS OWNER` is the
server: it imports MODULE and runs the jobs that arrive at ADDRESS, a socket.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import os
import pickle
import select
import socket
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
from typing import Any

from tests.collectives import first_difference, noted

ROOT = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Finished:
    """What the ranks of one job left. code: 0, or the first exit status other than 0, or 1: their
    collectives differ; late: ranks that were killed because they did not end in time; log: what all
    ranks printed, then the difference.
    """

    code: int
    late: list[int]
    log: str
    results: list[Any]


class Server:
    """Runs functions in processes forked from one that has imported `preload`; the first job starts
    it, and all workers of a run of the tests share it.
    """

    def __init__(self, preload: str) -> None:
        self.preload = preload

    def run(self, world: int, function: Callable[..., Any], *args: Any,
            environment: Mapping[str, str] | None = None, cwd: str | Path | None = None,
            timeout_s: float = 300.0, grace_s: float = 5.0, compare: bool = True) -> Finished:
        """`function(*args)` in `world` processes, which find their rank in the variables that
        torchrun sets.

        Once a rank fails, the others get `grace_s` to end. Collectives of several ranks are
        compared, see `tests.collectives`; those alone that they look up in torch when they call
        them. compare: False where a job is so long that the notes would fill its memory.
        """
        compare = compare and world > 1
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
            code = answer["code"]
            difference = first_difference(left("calls"), code == 0) if compare else ""
            if difference:
                code, log = code or 1, f"{log}\n{difference}"
            return Finished(code, answer["late"], log, left("result"))

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        with _connected(self.preload) as connection, connection.makefile("rw") as stream:
            stream.write(json.dumps(job) + "\n")
            stream.flush()
            answer = stream.readline()
        if not answer:
            raise RuntimeError(f"the server of {self.preload} ended:\n"
                               + _log_of(_address(self.preload)).read_text(errors="replace"))
        return json.loads(answer)


def _address(preload: str) -> Path:
    """The server's socket: of this run of the tests, this tree and what Python finds first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    key = "\n".join([run, ROOT, os.environ.get("PYTHONPATH", ""), preload])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"moe_plugin_{os.getuid()}_{name}")


def _log_of(address: Path) -> Path:
    return address.with_suffix(".log")


def _connected(preload: str) -> socket.socket:
    """A connection to the server, which is started if absent."""
    address = _address(preload)
    with open(address.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the file's closing
        process = None
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(address))
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
            if process is None:
                address.unlink(missing_ok=True)
                process = _start(preload, address)
            assert process.poll() is None, _log_of(address).read_text(errors="replace")
            time.sleep(0.01)


def _start(preload: str, address: Path) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    # with pytest-xdist, whoever started this worker and the others
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    with open(_log_of(address), "w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", preload, str(address), str(owner)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def _serve(preload: str, address: Path, owner: int) -> None:
    """Import the module and run jobs, until the process `owner` is gone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)  # jobs wait for the imports
    importlib.import_module(preload)
    if preload.startswith("tests."):  # files of tests import it, in every rank
        importlib.import_module("pytest")
    gc.collect()
    gc.freeze()  # a collection over what was imported takes 0.2 s, in every rank
    for imported in weakref.finalize._registry.values():  # to end torch's operators takes 0.05 s
        imported.atexit = False
    if (dynamo := sys.modules.get("torch._dynamo.utils")) is not None:
        atexit.unregister(dynamo.dump_compile_times)
    while _lives(owner):
        if select.select([listener], [], [], 0.5)[0]:
            connection, _ = listener.accept()
            if not os.fork():
                _run_job(connection)
            connection.close()
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG)[0]:  # jobs that ended
                pass
    for path in (address, _log_of(address), address.with_suffix(".lock")):
        path.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _run_job(connection: socket.socket) -> None:
    """The job of a connection, in a process of its own, which ends here."""
    try:
        with connection.makefile("rw") as stream:
            job = json.loads(stream.readline())
            ranks = {_fork(job, rank): rank for rank in range(job["world"])}
            stream.write(json.dumps(_wait(ranks, job)) + "\n")
    except BaseException:  # noqa: BLE001 - the log is the report
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


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
    for stream in (sys.stdout, sys.stderr):  # wandb's writing of a line takes 0.3 ms
        vars(stream).pop("write", None)
    # whole lines: ranks write into one file, and PYTHONUNBUFFERED would write them in pieces
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["world"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world"]))
    os.chdir(job["cwd"])
    if (probes := sys.modules.get("scripts.mutants_study.probes")) is not None:
        probes.follow()  # lines are counted for the test that asked for this rank


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
