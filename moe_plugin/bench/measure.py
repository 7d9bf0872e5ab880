"""Time and memory, for CPU and GPU, of several candidates in turn."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIB = 1 << 20


@dataclass(frozen=True)
class Times:
    """Seconds of each round, in order."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


def interleaved(candidates: Sequence[Callable[[], object]], device: torch.device, rounds: int = 15,
                warmup: int = 3, slow: float = math.inf) -> list[Times]:
    """Each candidate once a round: what slows the machine down for a while slows all of them down.

    slow: candidates that take more than so many times as long as the first one are in every fourth
    round only, so that those whose times are close to each other are measured the more often in the
    same while.
    """
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    first = [
        min(mine) for mine in zip(
            *([clock(candidate) for candidate in candidates]
              for _ in range(max(1, warmup))), strict=True)
    ]
    every = [4 if mine > slow * first[0] else 1 for mine in first]
    seconds: list[list[float]] = [[] for _ in candidates]
    for number in range(rounds):
        for mine, candidate, stride in zip(seconds, candidates, every, strict=True):
            if number % stride == 0:
                mine.append(clock(candidate))
    return [Times(mine) for mine in seconds]


def _cpu_seconds(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _cuda_seconds(fn: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_extra_mib(fn: Callable[[], object], device: torch.device, calls: int = 3) -> float | None:
    """Most memory over `calls` calls beyond what was held before the first, in MiB; None where the
    system cannot tell.

    CPU: resident memory of the process, whatever holds it (tensors, reused workspaces, the
    allocator). GPU: allocated bytes.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(calls):
            fn()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    _trim()
    if not _reset_peak():
        return None
    before = _status("VmRSS")
    for _ in range(calls):
        fn()
    return max(0.0, (_status("VmHWM") - before) / 1024)


def _trim() -> None:
    """Give freed heap back to the system, so that it does not hide what a candidate needs."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return


def _reset_peak() -> bool:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as stream:
            stream.write("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    """A field of /proc/self/status, in KiB."""
    with open("/proc/self/status", encoding="ascii") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith(field + ":"))
