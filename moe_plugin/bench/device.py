"""Measures a processor for the cost model: matmuls, copies, small operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from moe_plugin.machine import memory_bytes
from moe_plugin.messages import short
from moe_plugin.planner.device import Device
from moe_plugin.planner.fit import nonnegative_least_squares

ROWS = (8, 32, 128, 512, 2048)


def measure_device(device: str = "cpu", dtype: torch.dtype = torch.float32, width: int = 512,
                   inner: int = 2048, repeats: int = 7) -> Device:
    """A `Device` of this machine, as one rank sees it.

    A matmul of n rows takes launch + 2 width inner (n + half_rows) / flops seconds: a line in n.
    width, inner: of the experts.
    Raises: ValueError: a device that is not there, or widths that do not fit its memory.
    """
    where = _device(device)
    memory = memory_bytes(where) or float("inf")
    if min(width, inner) < 1 or 4 * width * inner > memory:
        raise ValueError(f"model_dim={short(width)} and hidden_dim={short(inner)} must be >= 1 and "
                         f"fit the memory of {device}, {memory} bytes; e.g. 512 and 2048")
    w_DF = torch.randn(width, inner, dtype=dtype, device=where)
    launch = _seconds(lambda x=torch.zeros(8, device=where): x + 1, where, repeats * 10)
    times = [
        _seconds(lambda x=torch.randn(n, width, dtype=dtype, device=where): x @ w_DF, where,
                 repeats) for n in ROWS
    ]
    flops, half_rows = fit_products(ROWS, times, launch, 2.0 * width * inner)
    big = torch.randn(1 << 24, device=where)
    copy = _seconds(lambda: big.clone(), where, repeats)
    return Device(name="measured", flops=flops, half_rows=half_rows, launch_s=launch,
                  memory_bytes_s=2 * big.numel() * 4 / copy,
                  memory_bytes=float(memory_bytes(where) or Device().memory_bytes))


def _device(name: str) -> torch.device:
    try:
        where = torch.device(name)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {short(name)} must be cpu or cuda; use cpu")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {short(name)}: torch sees {torch.cuda.device_count()} GPUs; "
                         "use cpu")
    return where


def fit_products(rows: tuple[int, ...], seconds: list[float], launch: float,
                 operations: float) -> tuple[float, float]:
    """(flops, half_rows) of the line through the times by least relative squares.

    operations: FLOPs of one row.
    """
    a = np.array([[n / s, 1 / s] for n, s in zip(rows, seconds, strict=True)])
    shares = np.array([(s - launch) / s for s in seconds]).clip(min=0.0)
    slope, offset = nonnegative_least_squares(a, shares)
    slope = max(slope, 1e-15)
    return operations / slope, offset / slope


def _seconds(fn: Callable[[], object], where: torch.device, repeats: int) -> float:
    def once() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        start = time.perf_counter()
        fn()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(repeats))
