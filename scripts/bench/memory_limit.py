"""Processes under a memory limit: what they used, and whether they were killed for it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.child import command, result

KILLED = (137, -9)
_OLD = Path("/sys/fs/cgroup/memory")  # version 1
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Limited:
    """A process that ended well.

    Attributes:
        output: of its standard output.
        peak_bytes: the most memory of its group, pages of files included, which the kernel takes
            back where memory is short.
    """

    output: str
    peak_bytes: int


def run_limited(command: Sequence[str], limit: int | None = None) -> Limited | None:
    """Run a process in a group with a memory limit, without swap where that can be said.

    Needs root and a writable memory controller, of version 1 or 2 of cgroups.

    Args:
        limit: bytes; None: as much as there is.
    Returns: None: it was killed for its memory.
    Raises:
        ValueError: no limit can be set.
        RuntimeError: the process failed.
    """
    with _group(limit or _UNLIMITED) as group:
        tasks = next(group / name for name in ("tasks", "cgroup.procs") if (group / name).exists())
        done = subprocess.run(list(command), text=True, stdout=subprocess.PIPE, check=False,
                              preexec_fn=lambda: tasks.write_text(str(os.getpid())))
        if done.returncode in KILLED:
            return None
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:7])} ... ended with status {done.returncode}")
        peak = next(group / name for name in ("memory.max_usage_in_bytes", "memory.peak")
                    if (group / name).exists())
        return Limited(done.stdout, int(peak.read_text()))


def why_not() -> str | None:
    """Why no limit can be set here; None where it can."""
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
        raise ValueError(f"no memory limit can be set ({error}): run as root where {root} is "
                         "writable") from error
    with contextlib.suppress(OSError):
        (group / "memory.swappiness").write_text("0")
    try:
        yield group
    finally:
        for _ in range(100):  # its last process may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.05)


class AnonymousPeak:
    """The most memory of this process that no file backs, sampled every 10 ms.

    Attributes: bytes.
    """

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.bytes = max(self.bytes, status_bytes("RssAnon"))
            time.sleep(0.01)


def status_bytes(field: str) -> int:
    """A field of this process's status: VmRSS, resident now; VmHWM, at most; RssAnon, without
    files.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(field + ":"))


def reset_peak() -> bool:
    """Let Linux forget VmHWM so far; False: it does not."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def call_limited(limit: int | None, function: Callable[..., Any],
                 *args: Any) -> dict[str, Any] | None:
    """The same of a function that returns a mapping, in a cgroup.

    Args:
        limit: bytes of memory; None: as much as there is.
    Returns: what the function returned, and `cgroup_peak_bytes`; None: killed for its memory.
    """
    done = run_limited(command(function, args), limit)
    return None if done is None else {"cgroup_peak_bytes": done.peak_bytes, **result(done.output)}
