"""Run a function on several processes, on gloo or NCCL, and get the results back."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.collectives import Calls, first_difference, noted

FIRST_PORT, PORTS = 10_000, 20_000  # of `free_port`


def heeds_ctrl_c() -> None:
    """For `preexec_fn`: a shell's background job ignores SIGINT, and so would all that is started
    from it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run_gloo(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 300.0,
             group_timeout_s: float = 180.0) -> list[Any]:
    """`fn(*args)` on `world` forked processes with an initialised gloo world; results in rank
    order.

    The first error of a rank is raised here with its traceback; a rank that dies or stalls is an
    error, too, and so are collectives in another order on another rank.
    """
    return run_ranks(world, fn, *args, timeout_s=timeout_s, group_timeout_s=group_timeout_s)


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 300.0,
              group_timeout_s: float = 180.0, backend: str = "gloo") -> list[Any]:
    """The same on a backend. "nccl": the ranks share the first GPU."""
    # CUDA takes no fork of a process that has asked for it
    context = multiprocessing.get_context("spawn" if backend == "nccl" else "fork")
    store = os.path.join(tempfile.mkdtemp(), "store")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_work,
                        args=(rank, world, store, pipes[rank][1], timeout_s, group_timeout_s,
                              backend, fn, args), daemon=True) for rank in range(world)
    ]
    for process, (_, child) in zip(processes, pipes, strict=True):
        process.start()
        child.close()
    try:
        answers = [_receive(rank, parent, timeout_s) for rank, (parent, _) in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
    failed = [answer for ok, answer, _ in answers if not ok]
    difference = first_difference([calls for *_, calls in answers], not failed)
    assert not failed, "\n".join([*failed, difference])
    assert not difference, difference
    return [answer for _, answer, _ in answers]


def free_port() -> int:
    """A port that is free, and that no other test is given before 20,000 more were asked for.

    The kernel's own choice is among the ports of outgoing connections (32768 and up on Linux): of
    the hundreds that ranks make to each other, one takes it before a program listens there.
    """
    counter = os.path.join(tempfile.gettempdir(), f"moe_plugin_ports_{os.getuid()}")
    with open(counter, "a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)  # ends with the file's closing
        shared.seek(0)
        given = int(shared.read() or 0)
        while True:
            port = FIRST_PORT + given % PORTS
            given += 1
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    continue
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("", port))
                break
        shared.truncate(0)
        shared.write(str(given))
    return port


def listens(port: int) -> bool:
    """Whether a program of this machine takes connections at a port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _receive(rank: int, pipe: Any, timeout_s: float) -> tuple[bool, Any, Calls | None]:
    """Whether the rank ended well, what it returned or said, and its collectives."""
    if not pipe.poll(timeout_s):
        return False, f"rank {rank} gave no answer within {timeout_s} s", None
    try:
        # by value: a rank may be gone before its answer is read
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank} died", None


def _work(rank: int, world: int, store: str, pipe: Any, timeout_s: float, group_timeout_s: float,
          backend: str, fn: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.95 * timeout_s, file=2)  # where a rank stalls
    calls = noted()
    try:
        if backend == "nccl":
            # as if on a host of its own: NCCL refuses two ranks of a host on one GPU
            os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
            torch.cuda.set_device(0)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world,
                                timeout=timedelta(seconds=group_timeout_s))
        torch.manual_seed(0)
        answer = (True, fn(*args), calls)
        if dist.is_initialized():  # unless `fn` took the group down itself
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - sent to the parent
        answer = (False, f"rank {rank}:\n{traceback.format_exc()}", calls)
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
