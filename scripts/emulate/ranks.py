"""The ranks of an emulated cluster. The ranks are forked from this process after torch has been
imported.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from moe_plugin.utils.machine import die_with_parent
from scripts.emulate.namespaces import Node

LOG_SHOWN = 32000
TRACE_S = 0.5  # time in which ranks write their tracebacks before they are killed


@dataclass
class RankEnd:
    """The result of a rank, which is a value or an error.

    Attributes:
        value: the return value of the rank's function.
        error: the error with its traceback as text, or None if the function returned normally.
        exit: exit status of the process. Negative if the process was ended by a signal. None if the
            process was killed after the timeout.
        seconds: run time of the process in seconds.
    """

    rank: int
    value: Any = None
    error: str | None = None
    exit: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rank's function returned normally."""
        return self.error is None


@dataclass
class RankProcess:
    """A running rank.

    Attributes:
        rank: number of the rank, or -1 for the process that runs the store.
        pipe: connection that receives the result.
        log: standard error of the process, which is printed if the rank fails.
        started: start time, as returned by `time.monotonic`.
    """

    rank: int
    pid: int
    pipe: Connection
    log: IO[bytes]
    started: float = field(default_factory=time.monotonic)


def fork(work: Callable[[], Any], node: Node | None, rank: int, close: Sequence[int] = ()
         ) -> RankProcess:
    """Run `work` in a forked process. The forked process is killed when this process ends.

    Args:
        work: function that is called in the forked process. The function's return value is sent to
            this process.
        node: the node on which the process runs. None runs the process outside of the emulated
            nodes.
        close: file descriptors that are closed in the forked process.
    """
    ours, theirs = Pipe(duplex=False)
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_close`, when the rank has ended
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return RankProcess(rank, pid, ours, log)
    status = 1
    # objects of this process must not be collected in the child, because the destructor of a
    # process group would join threads that do not exist after a fork
    gc.freeze()
    try:
        die_with_parent(parent)
        os.dup2(log.fileno(), 2)
        faulthandler.register(signal.SIGUSR2, 2)
        ours.close()
        if node is not None:
            node.enter()
        for descriptor in close:
            os.close(descriptor)
        answer = _answer(work)
        theirs.send_bytes(answer)
        theirs.close()
        status = 0
    finally:
        os._exit(status)  # the exit handlers belong to the parent, which may be a test runner
    raise AssertionError("unreachable")


def collect(ranks: Sequence[RankProcess], timeout_s: float) -> list[RankEnd]:
    """Wait for all ranks to end, and return how each of them ended.

    Ranks that have not sent a result after `timeout_s` seconds are killed. The errors of these
    ranks contain the stack traces of all threads.
    """
    ends: dict[int, RankEnd] = {}
    waiting = {process.pipe: process for process in ranks}
    deadline = time.monotonic() + timeout_s
    while waiting and time.monotonic() < deadline:
        for pipe in wait(list(waiting), timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
            process = waiting.pop(pipe)
            ends[process.rank] = _read(process)
    for process in waiting.values():
        _kill(process.pid, signal.SIGUSR2)  # writes the stacks of all threads to the log
    time.sleep(TRACE_S if waiting else 0)
    for process in waiting.values():
        _kill(process.pid)
        os.waitpid(process.pid, 0)
        error = f"rank {process.rank} gave no answer within {timeout_s} s{_close(process)}"
        ends[process.rank] = RankEnd(process.rank, error=error,
                                     seconds=time.monotonic() - process.started)
    return [ends[process.rank] for process in ranks]


def stop(processes: Sequence[RankProcess]) -> None:
    """Kill all processes that are still running."""
    for process in processes:
        try:
            if os.waitpid(process.pid, os.WNOHANG)[0] == 0:
                _kill(process.pid)
                os.waitpid(process.pid, 0)
        except ChildProcessError:
            continue
        _close(process)


def initialise(address: str, port: int, rank: int, world: int, timeout_s: float) -> None:
    """Initialize the gloo group of all ranks, with the store at `address`."""
    import torch.distributed as dist

    store = dist.TCPStore(address, port, is_master=False,
                          timeout=timedelta(seconds=max(timeout_s, 30)))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world,
                            timeout=timedelta(seconds=timeout_s))


def serve_store(node: Node, close: Sequence[int] = ()) -> tuple[RankProcess, int]:
    """Start a separate process on `node` that runs the store of the ranks. The store has a separate
    process, so that any rank may die without stopping it.

    Returns:
        The process and the port of the store.

    Raises:
        RuntimeError: if the store did not start.
    """
    reader, writer = os.pipe()

    def work() -> None:
        import torch.distributed as dist

        store = dist.TCPStore(node.address, 0, is_master=True, wait_for_workers=False)
        os.write(writer, str(store.port).encode())
        while True:
            time.sleep(60)

    process = fork(work, node, -1, close)
    os.close(writer)
    port = os.read(reader, 16)
    os.close(reader)
    if not port:
        raise RuntimeError(
            f"The store on {node.hostname} did not start: {collect([process], 5)[0].error}")
    return process, int(port)


def _answer(work: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((work(), None))
    except BaseException:  # noqa: BLE001 - sent to the parent
        return pickle.dumps((None, traceback.format_exc()))


def _read(process: RankProcess) -> RankEnd:
    end = RankEnd(process.rank, seconds=time.monotonic() - process.started)
    try:
        end.value, end.error = pickle.loads(process.pipe.recv_bytes())
    except EOFError:
        end.error = f"rank {process.rank} ended without an answer"
    log = _close(process)
    end.error = end.error and end.error + log
    end.exit = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    return end


def _close(process: RankProcess) -> str:
    """Close the pipe and the log of a rank. Return the end of the log, for use in an error message.
    """
    process.pipe.close()
    with process.log as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_SHOWN))
        text = log.read().decode(errors="replace").strip()
    return f"\nstandard error of rank {process.rank}:\n{text}" if text else ""


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
