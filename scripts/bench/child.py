"""Call functions in new processes: one process with its own memory and imported modules, which may
have a memory limit, or several ranks that form a gloo group.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_plugin.utils.quiet import FAIRSEQ, MEGATRON, hidden

KILLED = (137, -9)
_OLD = Path("/sys/fs/cgroup/memory")  # exists in version 1 of cgroups
_UNLIMITED = 1 << 62


def command(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Return the command line that runs `function(*args)` in a process with one thread. The process
    can import this repository's modules.
    """
    given = base64.b64encode(pickle.dumps(args)).decode()
    places = os.pathsep.join(sys.path)
    return ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={places}", sys.executable, "-m",
            "scripts.bench.child", function.__module__, function.__name__, given]


def call(function: Callable[..., Any], *args: Any,
         environment: Mapping[str, str] | None = None) -> Any:
    """Call `function(*args)` in a new process with one thread and return the result.

    Args:
        function: a function defined at the top level of a module, which returns plain values.
        environment: additional environment variables for the process.
    """
    done = subprocess.run(command(function, args), stdout=subprocess.PIPE, text=True, check=True,
                          env={**os.environ, **(environment or {})})
    return result(done.stdout)


def result(output: str) -> Any:
    """Parse the return value of the function from the output of the process."""
    return json.loads(output.splitlines()[-1])


def main() -> None:
    # the folder of this script must not be the first entry, because its modules are in a package
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    module, name, given = sys.argv[1:]
    function = getattr(importlib.import_module(module), name)
    found = function(*pickle.loads(base64.b64decode(given)))
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def on_processes(ranks: int, measure: Callable[..., Any], *args: Any, threads: int = 1) -> Any:
    """Call `measure(*args)` in new processes, and return the result of rank 0.

    Args:
        measure: a function defined at the top level of a module. Every rank calls this function
            after the default group has been initialized.
        threads: number of torch threads in each process.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_spawned, (ranks, folder, measure, args, threads),
                                    nprocs=ranks)
        return pickle.loads(Path(folder, "result").read_bytes())


def _spawned(rank: int, ranks: int, folder: str, measure: Callable[..., Any],
             args: tuple[Any, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=ranks)
    with hidden([*FAIRSEQ, *MEGATRON]):
        found = measure(*args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# -- memory


def why_not() -> str | None:
    """Return the reason why no memory limit can be set on this machine, or None if limits can be
    set.
    """
    try:
        with _group(_UNLIMITED):
            return None
    except ValueError as error:
        return str(error)


@contextlib.contextmanager
def _group(limit: int) -> Iterator[Path]:
    root, name = (_OLD, "memory.limit_in_bytes") if _OLD.is_dir() else (
        Path("/sys/fs/cgroup"), "memory.max")
    group = root / f"moe_plugin_{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit))
    except OSError as error:
        raise ValueError(f"no memory limit can be set ({error}). Run as root on a system where "
                         f"{root} is writable") from error
    with contextlib.suppress(OSError):
        (group / "memory.swappiness").write_text("0")
    try:
        yield group
    finally:
        for _ in range(100):  # the last process of the group may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.05)


class AnonymousPeak:
    """The peak of this process's anonymous memory (memory that is not backed by files), sampled
    every 10 ms.

    Attributes:
        bytes: the peak of the anonymous memory in bytes.
    """

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, status_bytes("RssAnon"))
            time.sleep(0.01)


def status_bytes(field: str) -> int:
    """Return a field of this process's `/proc/self/status` in bytes.

    Args:
        field: VmRSS (current resident memory), VmHWM (peak resident memory) or RssAnon (resident
            anonymous memory).
    """
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field + ":"))


def reset_peak() -> bool:
    """Reset the peak resident memory (VmHWM) of this process. Return False if the system does not
    support resetting the peak.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def call_limited(limit: int | None, function: Callable[..., Any],
                 *args: Any) -> dict[str, Any] | None:
    """Call a function of the top level of a module in a process whose cgroup has a memory limit in
    bytes, without swap if the system allows this. Return the function's mapping with the additional
    key `cgroup_peak_bytes`, or None if the process was killed because it exceeded the limit. The
    peak includes cached file pages, which the kernel frees when memory is short.
    """
    with _group(limit or _UNLIMITED) as group:
        tasks = next(group / name for name in ("tasks", "cgroup.procs") if (group / name).exists())
        done = subprocess.run(command(function, args), text=True, stdout=subprocess.PIPE,
                              check=False, preexec_fn=lambda: tasks.write_text(str(os.getpid())))
        if done.returncode in KILLED:
            return None
        if done.returncode:
            raise RuntimeError(f"{function.__name__} ended with status {done.returncode}")
        peak = next(group / name for name in ("memory.max_usage_in_bytes", "memory.peak")
                    if (group / name).exists())
        return {"cgroup_peak_bytes": int(peak.read_text()), **result(done.stdout)}


def compare_limited(limit: int | None, modes: Sequence[str], function: Callable[..., Any],
                    args: argparse.Namespace, place: str,
                    unlimited: Collection[str] = ()) -> list[dict[str, Any]]:
    """Call `function(args, mode, place)` for each mode in a separate process. The first mode is
    measured without the limit, and must not fit into it. Return the results of `call_limited` with
    the additional keys `mode` and `limit`.

    Args:
        limit: memory limit in bytes. None sets no limit.
        unlimited: modes that are measured without the limit.

    Raises:
        ValueError: if the first mode fits into the limit, or if another mode does not.
    """
    rows = []
    for mode in modes:
        own = None if mode in (modes[0], *unlimited) else limit
        seen = call_limited(own, function, args, mode, place)
        if seen is None:
            raise ValueError(f"{mode}: the process was killed under the memory limit. Use a larger "
                             "--limit-mib")
        rows.append({"mode": mode, "limit": own, **seen})
        if len(rows) == 1 and limit is not None and call_limited(
                limit, function, args, mode, place) is not None:
            raise ValueError(f"the {mode} model fits into the memory limit. Use a smaller "
                             "--limit-mib")
    return rows


if __name__ == "__main__":
    main()
