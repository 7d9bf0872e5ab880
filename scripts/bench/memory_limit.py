"""Run processes under a memory limit, and report their memory usage."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.bench.child import command, result

KILLED = (137, -9)
_OLD = Path("/sys/fs/cgroup/memory")  # exists in version 1 of cgroups
_UNLIMITED = 1 << 62


def why_not() -> str | None:
    """Return the reason why no memory limit can be set on this machine, or None."""
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
    """The peak `bytes` of this process's memory that is not backed by files, sampled every 10 ms.
    """

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, status_bytes("RssAnon"))
            time.sleep(0.01)


def status_bytes(field: str) -> int:
    """Return VmRSS, its peak VmHWM, or the resident anonymous memory RssAnon of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field + ":"))


def reset_peak() -> bool:
    """Reset VmHWM of this process. Return False if the system does not support this."""
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
