"""Measure the time and memory of several candidates alternately, on the CPU or on a GPU."""

from __future__ import annotations

import datetime
import gc
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from moe_plugin.memory.passes import give_back_free_memory
from moe_plugin.utils.machine import device_name
from moe_plugin.utils.messages import tracked
from scripts.bench.child import reset_peak, status_bytes

MIB = 1 << 20
HELD_UP = 40_000_000  # cycles for which the GPU waits before a timed call, about 20 ms
# packages whose versions a page states if they are installed
PACKAGES = ("moe-plugin", "triton", "megatron-core", "fairseq", "transformer-engine",
            "scattermoe", "sonic-moe", "deepspeed", "transformers", "torchtitan", "ai2-olmo-core",
            "bitsandbytes", "kt-kernel")


@dataclass(frozen=True)
class Times:
    """The time of each round in seconds, in order."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The time of the fastest round in seconds."""
        return min(self.seconds)


def interleaved(candidates: Sequence[Callable[[], object]], device: torch.device, rounds: int = 15,
                warmup: int = 3, slow: float = math.inf) -> list[Times]:
    """Time each candidate once per round, so that background noise on the machine affects all
    candidates equally.

    Args:
        warmup: number of untimed calls per candidate before the first round.
        slow: a candidate runs only in every fourth round if it takes more than `slow` times as long
            as the first candidate. Skipping slow candidates leaves time for more rounds of
            similarly fast candidates.
    """
    clock = _cuda_seconds if device.type == "cuda" else cpu_seconds
    first = [
        min(mine) for mine in zip(
            *([clock(candidate) for candidate in candidates]
              for _ in range(max(1, warmup))), strict=True)
    ]
    every = [4 if mine > slow * first[0] else 1 for mine in first]
    seconds: list[list[float]] = [[] for _ in candidates]
    for number in tracked(range(rounds), "measure", "round"):
        for mine, candidate, stride in zip(seconds, candidates, every, strict=True):
            if number % stride == 0:
                mine.append(clock(candidate))
    return [Times(mine) for mine in seconds]


def cpu_seconds(fn: Callable[[], object]) -> float:
    """Return the duration of one call in seconds, measured with the CPU's clock."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _cuda_seconds(fn: Callable[[], object]) -> float:
    """Return the duration of one call in seconds, measured with GPU events.

    As in training, the CPU runs ahead of the GPU and launches kernels while the GPU is still busy.
    CPU time is included only if the CPU has to wait for the GPU during the call.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HELD_UP)
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_extra_mib(fn: Callable[[], object], device: torch.device, calls: int = 3) -> float | None:
    """Return the peak memory during `calls` calls, minus the memory in use before these calls, in
    MiB. Return None if the peak memory cannot be measured.

    On the CPU, the peak is measured as resident memory of the process, which includes tensors,
    reused workspaces and the allocator's cache. On a GPU, the peak is measured as allocated memory.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(calls):
            fn()
        return (torch.cuda.max_memory_allocated() - before) / MIB
    # no candidate may reuse memory freed by an earlier candidate, which would not be counted
    give_back_free_memory()
    if not reset_peak():
        return None
    before = status_bytes("VmRSS")
    for _ in range(calls):
        fn()
    return max(0.0, (status_bytes("VmHWM") - before) / MIB)


def training_step(forward: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
                  parameters: list[Tensor], x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return a function that runs one training step. The step clears gradients, runs the forward
    pass, and runs the backward pass through the output and the losses.

    Args:
        x: the input [T, D].
        grad: the gradient of the output [T, D].
    """

    def run() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        y, losses = forward(x)
        torch.autograd.backward([y, *losses], [grad, *([None] * len(losses))])

    return run


def versions(device: str) -> dict[str, str]:
    """Return the versions of packages, the device, and the date of a measurement."""
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    found = {
        "python": platform.python_version(), "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "device": device_name(torch.device(device)) + threads
    }
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
